"""The command line of pretraining: `python -m pretrain COMMAND`. Heavy imports happen inside."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep import console
from data_prep.arguments import Parser
from pretrain.config import command as recipes_command
from pretrain.config.settings import add_device, parse_arguments

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@console.lasting()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parse_arguments(_parser(), arguments)
    try:
        code: int = options.action(options)
        if code == 0:
            sys.stdout.flush()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"pretrain {options.command}: error: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write(f"pretrain {options.command}: interrupted\n")
        return EXIT_INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m pretrain", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "supervise", help="launch a run, roll it back from loss spikes, relaunch it until done"
    )
    command.add_argument("recipe", help="a YAML file, or the name of one in pretrain/recipes")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings to change, such as optimizer.learning_rate=1e-4",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="print what would be done next, and do nothing"
    )
    command.add_argument(
        "--nodes", type=int, help="machines, each with this command (default: as Slurm says, or 1)"
    )
    command.add_argument(
        "--node-rank", type=int, help="number of this one; 0 leads (default: likewise)"
    )
    command.add_argument("--master-addr", help="address of node 0 (default: its host name)")
    command.set_defaults(action=_supervise)

    command = commands.add_parser("export", help="make a model folder of a run's checkpoint")
    command.add_argument("run", type=Path)
    command.add_argument("--output", type=Path, required=True, help="the new model folder")
    command.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    command.set_defaults(action=_export)

    command = commands.add_parser(
        "convert", help="a model of fairseq's or Hugging Face's to a model folder, and back"
    )
    command.add_argument(
        "source",
        type=Path,
        help="a fairseq checkpoint (.pt), a model folder or a Hugging Face folder",
    )
    command.add_argument("--to", required=True, choices=("zeroclap", "fairseq", "huggingface"))
    command.add_argument("--output", type=Path, required=True, help="the folder (or .pt) to make")
    command.add_argument(
        "--tokenizer",
        help="the vocabulary of a source without one: roberta-base, or a file or folder that "
        "`data_prep prepare` takes",
    )
    command.add_argument(
        "--head",
        metavar="NAME",
        help="with --to huggingface: a classification head to export in place of the language "
        "model's",
    )
    command.set_defaults(action=_convert)

    command = commands.add_parser("evaluate", help="validation perplexity of a model folder")
    command.add_argument("model", type=Path)
    command.add_argument("--data", type=Path, required=True, help="a corpus folder")
    command.add_argument(
        "--lengths",
        type=_lengths,
        help="tokens of a block, such as 512,1024 (default: what the model was trained on)",
    )
    command.add_argument("--blocks", type=int, default=0, help="blocks at most (default: all)")
    command.add_argument(
        "--packing",
        choices=("best-fit", "complete"),
        help="how documents fill blocks (default: as the model was trained)",
    )
    command.add_argument("--json", type=Path, help="write the figures to this file as well")
    add_device(command)
    command.set_defaults(action=_evaluate)

    command = commands.add_parser("fill-mask", help="the likeliest fillers of <mask> in a text")
    command.add_argument("model", type=Path)
    command.add_argument("text", help='such as "The capital of China is <mask>."')
    command.add_argument("--top-k", type=int, default=5)
    add_device(command)
    command.set_defaults(action=_fill_mask)

    command = commands.add_parser(
        "plan", help="what a run will cost: parameters, memory, time, checkpoints"
    )
    command.add_argument("recipe", help="a YAML file, or the name of one in pretrain/recipes")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    command.add_argument("--gpus", type=int, default=8, help="in all (default: %(default)s)")
    command.add_argument(
        "--kind", default="a100", choices=("a100", "h100", "h200"), help="(default: %(default)s)"
    )
    command.add_argument(
        "--mfu",
        type=float,
        default=0.5,
        help="share of their peak that is reached, as you expect it (default: %(default)s)",
    )
    command.add_argument(
        "--suite",
        type=Path,
        help="take that share from this file, which bench --suite --json wrote on such a GPU",
    )
    command.add_argument("--json", type=Path, help="write the figures to this file as well")
    command.set_defaults(action=_plan)

    command = commands.add_parser(
        "bench", help="training speed and memory beside another library's, in the same run"
    )
    command.add_argument(
        "--suite",
        action="store_true",
        help="everything at once: sizes, lengths, packing, beside DeepSpeed, a plain loop, "
        "transformers and the original's way; small on a CPU. Of the options below it takes "
        "--minutes, --json and --plot",
    )
    command.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="with --suite: what does not fit is left out and named (default: %(default)s)",
    )
    command.add_argument("--plot", type=Path, help="with --suite: draw cost against length (.png)")
    command.add_argument("--against", default="transformers", choices=("transformers",))
    command.add_argument("--size", default="base", help="of the model (default: %(default)s)")
    command.add_argument("--variant", default="baseline", help="(default: %(default)s)")
    command.add_argument("--sequence-length", type=int, default=512, help="(default: %(default)s)")
    command.add_argument(
        "--micro-batch-size", type=int, default=4, help="rows of an update (default: %(default)s)"
    )
    command.add_argument(
        "--vocab-size", type=int, default=50265, help="ids, <mask> included (default: %(default)s)"
    )
    command.add_argument(
        "--steps", type=int, default=10, help="updates that are measured (default: %(default)s)"
    )
    command.add_argument("--json", type=Path, help="write the figures to this file as well")
    command.set_defaults(action=_bench)

    command = commands.add_parser("replay", help="the spike detector over recorded loss curves")
    command.add_argument(
        "curves",
        nargs="+",
        metavar="CURVE",
        help="a CSV, a JSON Lines file, a TensorBoard file or folder, or a run's folder; or a "
        "threshold, such as spike.deviations=5",
    )
    command.add_argument(
        "--labels", type=Path, help='a JSON file {curve name: [{"onset": step, "kind": "fast"}]}'
    )
    command.add_argument("--json", type=Path, help="write what was found to this file as well")
    command.add_argument("--plot", type=Path, help="draw the curves into this picture (.png)")
    command.add_argument(
        "--tag", default="train/loss", help="of the loss, in TensorBoard's files (%(default)s)"
    )
    command.add_argument(
        "--every-attempt",
        action="store_true",
        help="judge each stretch between restarts, not only the lineage that survived",
    )
    command.add_argument(
        "--checkpoint-interval",
        type=int,
        default=500,
        help="steps between the checkpoints that the policy is to suppose (default: %(default)s)",
    )
    command.set_defaults(action=_replay)

    command = commands.add_parser("status", help="what happened to a run, and what is going on")
    command.add_argument("run", type=Path)
    command.set_defaults(action=_status)

    command = commands.add_parser(
        "audit", help="prove from a run's ledger that every block was used once an epoch"
    )
    command.add_argument("run", type=Path)
    command.set_defaults(action=_audit)

    command = commands.add_parser(
        "report", help="write a run's report.md and loss.png (supervise does so when it ends)"
    )
    command.add_argument("run", type=Path)
    command.set_defaults(action=_report)

    command = commands.add_parser("recipes", help="list recipes, or write their JSON schema")
    recipes_command.add_recipes_arguments(command)
    command.set_defaults(action=recipes_command.recipes)
    return parser


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(word) for word in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers from 2 on, as in 512,1024")
    return lengths


def _supervise(options: argparse.Namespace) -> int:
    from pretrain.config import load as recipes
    from pretrain.config.preflight import check, refuse_other_recipe
    from pretrain.run.metrics import METRICS
    from pretrain.run.report import write_report
    from pretrain.supervision.agent import Agent
    from pretrain.supervision.launch import world_size
    from pretrain.supervision.nodes import place
    from pretrain.supervision.supervisor import Supervisor, forecast

    config = recipes.load(options.recipe, options.overrides)
    here = place(options.node_rank, options.nodes, options.master_addr, os.environ)
    _, manifest = check(config, world_size(config, here.count))
    refuse_other_recipe(config, manifest)
    if options.dry_run:
        sys.stdout.write(forecast(config, here))
        return 0
    if here.node:
        return Agent(config, here).run()
    code = Supervisor(config, here).run()
    try:
        if (Path(config.folder) / METRICS).exists():
            sys.stdout.write(f"report: {write_report(Path(config.folder))}\n")
    except (OSError, ValueError) as error:  # the run's own end counts
        sys.stderr.write(f"pretrain supervise: no report: {error}\n")
    return code


def _export(options: argparse.Namespace) -> int:
    from pretrain.inference.model_folder import export

    step = export(options.run, options.output, options.step)
    sys.stdout.write(f"{options.output}: the model of {options.run} after {step} steps\n")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from pretrain.convert.conversion import convert

    notes = convert(options.source, options.to, options.output, options.tokenizer, options.head)
    for note in notes:
        sys.stdout.write(f"note: {note}\n")
    sys.stdout.write(f"{options.output}: {options.source} as {options.to}\n")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    import dataclasses

    from pretrain.data.batches import validation_note
    from pretrain.engine.distributed import choose_device
    from pretrain.inference.evaluate import evaluate_lengths
    from pretrain.inference.model_folder import load
    from pretrain.run.checkpoints import write_json

    device = choose_device(options.device)
    loaded = load(options.model)
    lengths = options.lengths or [loaded.model.config.max_positions]
    results = evaluate_lengths(
        loaded.model.to(device),
        loaded.tokenizer.digest(),
        options.data,
        lengths,
        loaded.objective,
        limit=options.blocks,
        packing=options.packing or loaded.packing,
    )
    sys.stdout.write(
        f"{validation_note(loaded.objective)}\n"
        f"{'length':>8} {'subset':<20} {'targets':>12} {'loss':>8} {'perplexity':>11}\n"
    )
    for r in results:
        # One subset is all there is.
        rows = {"all": r.total, **(r.subsets if len(r.subsets) > 1 else {})}
        for name, score in rows.items():
            sys.stdout.write(
                f"{r.length:>8} {name:<20} {score.targets:>12,} {score.loss:>8.4f} "
                f"{score.perplexity:>11.2f}\n"
            )
    if options.json:
        write_json(options.json, [dataclasses.asdict(r) for r in results])
    return 0


def _fill_mask(options: argparse.Namespace) -> int:
    from pretrain.engine.distributed import choose_device
    from pretrain.inference.fill_mask import fill_mask
    from pretrain.inference.model_folder import load

    device = choose_device(options.device)
    loaded = load(options.model)
    model = loaded.model.to(device)
    for fillers in fill_mask(model, loaded.tokenizer, options.text, options.top_k):
        for filler in fillers:
            sys.stdout.write(f"{filler.probability:8.4f}  {filler.token!r:<16} {filler.text}\n")
    return 0


def _plan(options: argparse.Namespace) -> int:
    import dataclasses

    from pretrain.bench import measured_speed, plan
    from pretrain.config import load as recipes
    from pretrain.run.checkpoints import write_json

    config = recipes.load(options.recipe, options.overrides)
    share, source = options.mfu, plan.STATED
    if options.suite:
        share, source = measured_speed.utilization(options.suite, options.kind, config)
    planned = plan.plan(config, options.gpus, options.kind, share, source)
    sys.stdout.write(plan.table(planned))
    if options.json:
        write_json(options.json, dataclasses.asdict(planned))
    return 0


def _bench_suite(options: argparse.Namespace) -> int:
    from pretrain.bench import suite as bench_suite
    from pretrain.run.checkpoints import write_json

    if options.plot and options.plot.suffix != ".png":
        raise ValueError(f"--plot {options.plot}: accepted: a name that ends in .png")

    def tell(suite: bench_suite.Suite) -> None:
        sys.stderr.write(f"{suite.outcomes[-1].line()}\n")
        if options.json:  # at once: what follows may be killed
            write_json(options.json, suite.figures())

    suite = bench_suite.run(None, options.minutes, tell)
    sys.stdout.write(bench_suite.table(suite))
    if options.plot:
        bench_suite.plot(suite, options.plot)
    return 0


def _bench(options: argparse.Namespace) -> int:
    import dataclasses

    from pretrain.bench import compare as bench
    from pretrain.bench.contenders import PLAIN, Case
    from pretrain.run.checkpoints import write_json

    if options.suite:
        return _bench_suite(options)
    case = Case(
        contender=PLAIN,
        size=options.size,
        variant=options.variant,
        length=options.sequence_length,
        rows=options.micro_batch_size,
        layout="padded",
        vocab_size=options.vocab_size,
        attention_dropout=True,
    )
    results = bench.compare(case, options.against, options.steps)
    sys.stdout.write(bench.table(case, results))
    if options.json:
        figures = [dataclasses.asdict(result) for result in results]
        write_json(options.json, {"setting": dataclasses.asdict(case), "results": figures})
    return 0


def _replay(options: argparse.Namespace) -> int:
    from pretrain.run.checkpoints import write_json
    from pretrain.spikes.replay import curves
    from pretrain.spikes.replay import judge as replay
    from pretrain.spikes.replay import report as replay_report

    if options.checkpoint_interval < 1:
        raise ValueError(f"--checkpoint-interval {options.checkpoint_interval}: must be above 0")
    words = [word for word in options.curves if "=" in word and not Path(word).exists()]
    config = replay.spike_config(words)
    paths = [Path(word) for word in options.curves if word not in words]
    recorded = curves.read_all(paths, options.tag, options.every_attempt)
    names = [curve.name for curve in recorded]
    labels = replay.read_labels(options.labels, names) if options.labels else {}
    judged = [replay.judge(curve, config, options.checkpoint_interval) for curve in recorded]
    sys.stdout.write(replay_report.report(judged, labels))
    if options.json:
        write_json(options.json, replay_report.as_json(judged, labels))
    if options.plot:
        replay_report.plot(judged, labels, options.plot)
    return 0


def _status(options: argparse.Namespace) -> int:
    from pretrain.run.status import status

    sys.stdout.write(status(options.run))
    return 0


def _audit(options: argparse.Namespace) -> int:
    from pretrain.run import audit

    return audit.report(audit.audit(options.run), sys.stdout.write)


def _report(options: argparse.Namespace) -> int:
    from pretrain.run.report import write_report

    sys.stdout.write(f"{write_report(options.run)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

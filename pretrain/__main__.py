"""The command line of pretraining: `python -m pretrain COMMAND`. Heavy imports happen inside."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.action(options)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"pretrain {options.command}: error: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write(f"pretrain {options.command}: interrupted\n")
        return EXIT_INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pretrain", description=__doc__)
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
    command.set_defaults(action=_evaluate)

    command = commands.add_parser("fill-mask", help="the likeliest fillers of <mask> in a text")
    command.add_argument("model", type=Path)
    command.add_argument("text", help='such as "The capital of China is <mask>."')
    command.add_argument("--top-k", type=int, default=5)
    command.set_defaults(action=_fill_mask)

    command = commands.add_parser(
        "bench", help="training speed and memory beside another library's, in the same run"
    )
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

    command = commands.add_parser("plot", help="draw a run's loss, with its rollbacks")
    command.add_argument("run", type=Path)
    command.set_defaults(action=_plot)
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
    from pretrain import recipe as recipes
    from pretrain.checks import check, refuse_other_recipe
    from pretrain.metrics import METRICS
    from pretrain.plots import plot_loss
    from pretrain.supervisor import Supervisor, default_ranks

    config = recipes.load(options.recipe, options.overrides)
    ranks = config.training.ranks or default_ranks()
    _, manifest = check(config, ranks)
    refuse_other_recipe(config, manifest)
    code = Supervisor(config).run()
    if (Path(config.folder) / METRICS).exists():
        sys.stdout.write(f"loss plot: {plot_loss(Path(config.folder))}\n")
    return code


def _export(options: argparse.Namespace) -> int:
    from pretrain.model_folder import export

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

    from pretrain.checkpoints import write_json
    from pretrain.evaluate import evaluate_lengths
    from pretrain.model_folder import load

    loaded = load(options.model)
    lengths = options.lengths or [loaded.model.config.max_positions]
    results = evaluate_lengths(
        loaded.model,
        loaded.tokenizer.digest(),
        options.data,
        lengths,
        limit=options.blocks,
        packing=options.packing or loaded.packing,
    )
    sys.stdout.write(
        f"{'length':>8} {'subset':<20} {'masked':>12} {'loss':>8} {'perplexity':>11}\n"
    )
    for r in results:
        # One subset is all there is.
        rows = {"all": r.total, **(r.subsets if len(r.subsets) > 1 else {})}
        for name, score in rows.items():
            sys.stdout.write(
                f"{r.length:>8} {name:<20} {score.masked_tokens:>12,} {score.loss:>8.4f} "
                f"{score.perplexity:>11.2f}\n"
            )
    if options.json:
        write_json(options.json, [dataclasses.asdict(r) for r in results])
    return 0


def _fill_mask(options: argparse.Namespace) -> int:
    from pretrain.fill_mask import fill_mask
    from pretrain.model_folder import load

    loaded = load(options.model)
    for fillers in fill_mask(loaded.model, loaded.tokenizer, options.text, options.top_k):
        for filler in fillers:
            sys.stdout.write(f"{filler.probability:8.4f}  {filler.token!r:<16} {filler.text}\n")
    return 0


def _bench(options: argparse.Namespace) -> int:
    import dataclasses

    from pretrain import bench
    from pretrain.checkpoints import write_json

    setting = bench.Setting(
        size=options.size,
        variant=options.variant,
        sequence_length=options.sequence_length,
        micro_batch_size=options.micro_batch_size,
        vocab_size=options.vocab_size,
    )
    results = bench.compare(setting, options.against, options.steps)
    sys.stdout.write(bench.table(setting, results))
    if options.json:
        figures = [dataclasses.asdict(result) for result in results]
        write_json(options.json, {"setting": dataclasses.asdict(setting), "results": figures})
    return 0


def _plot(options: argparse.Namespace) -> int:
    from pretrain.plots import plot_loss

    sys.stdout.write(f"{plot_loss(options.run)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

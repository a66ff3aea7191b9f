"""The commands about cost: plan and bench."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    add = command.add_argument
    add("recipe", help="a YAML file, or the name of one in pretrain/recipes")
    add("overrides", nargs="*", metavar="key=value", help="settings to change")
    add("--gpus", type=int, default=8, help="number of GPUs in all (default: %(default)s)")
    kinds = ("a100", "h100", "h200")
    add("--kind", default="a100", choices=kinds, help="(default: %(default)s)")
    mfu = "expected share of the GPUs' peak that is reached (default: %(default)s)"
    add("--mfu", type=float, default=0.5, help=mfu)
    suite = "take that share from this file, which bench --suite --json wrote on such a GPU"
    add("--suite", type=Path, help=suite)
    add("--json", type=Path, help="also write the figures to this file")


def plan(options: argparse.Namespace) -> None:
    """Estimate what a run will cost: parameters, memory, time, checkpoints.

    example: python -m pretrain plan pile-base data.corpus=corpora/pile --gpus 8 --kind h100
    """
    import dataclasses

    from pretrain.bench import measured_speed
    from pretrain.bench import plan as planning
    from pretrain.config.load import load
    from pretrain.run.checkpoints import write_json

    config = load(options.recipe, options.overrides)
    share, source = options.mfu, planning.STATED
    if options.suite:
        share, source = measured_speed.utilization(options.suite, options.kind, config)
    planned = planning.plan(config, options.gpus, options.kind, share, source)
    sys.stdout.write(planning.table(planned))
    if options.json:
        write_json(options.json, dataclasses.asdict(planned))


def add_bench_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench`."""
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


def _bench_suite(options: argparse.Namespace) -> None:
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


def bench(options: argparse.Namespace) -> None:
    """Training speed and memory beside another library's, in the same run.

    example: python -m pretrain bench --suite --json speed.json
    """
    import dataclasses

    from pretrain.bench import compare as bench
    from pretrain.bench.contenders import PLAIN, Case
    from pretrain.run.checkpoints import write_json

    if options.suite:
        _bench_suite(options)
        return
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

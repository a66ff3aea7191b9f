"""The command that judges recorded curves: replay."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from data_prep.common import pictures
from data_prep.common.files import write_json


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `replay`."""
    add = command.add_argument
    add(
        "curves",
        nargs="+",
        metavar="CURVE",
        help="a CSV, a JSON Lines file, a TensorBoard file or folder, or a run's folder; or a "
        "threshold, such as spike.deviations=5",
    )
    add("--json", type=Path, help="also write the findings to this file")
    add("--plot", type=Path, help=pictures.HELP.format("the curves"))
    add("--tag", default="train/loss", help="tag of the loss in TensorBoard files (%(default)s)")
    attempts = "judge each stretch between restarts, not only the lineage that survived"
    add("--every-attempt", action="store_true", help=attempts)
    interval = "steps between checkpoints, for the policy (default: those of the run, or 500)"
    add("--checkpoint-interval", type=int, help=interval)


def replay(options: argparse.Namespace) -> None:
    """Run the spike detector over recorded loss curves.

    A run's folder is judged with the thresholds of its own recipe, other curves with the defaults.

    example: python -m pretrain replay runs/base other.csv spike.deviations=5 --plot curves.png
    """
    from pretrain.spikes.replay import curves, detect, report

    if options.checkpoint_interval is not None and options.checkpoint_interval < 1:
        raise ValueError(f"--checkpoint-interval {options.checkpoint_interval}: must be above 0")
    if options.plot:
        pictures.check_name("--plot", options.plot)
    overrides = [word for word in options.curves if "=" in word and not Path(word).exists()]
    detect.settings(overrides)  # refused before anything is read
    paths = [Path(word) for word in options.curves if word not in overrides]
    recorded = curves.read_all(paths, options.tag, options.every_attempt)
    found = []
    for curve in recorded:
        config, interval = detect.settings(overrides, curve.run)
        found.append(detect.detect(curve, config, options.checkpoint_interval or interval))
    sys.stdout.write(report.report(found))
    if options.json:
        write_json(options.json, report.as_json(found))
    if options.plot:
        report.plot(found, options.plot)


COMMANDS = {"replay": (add_arguments, replay)}

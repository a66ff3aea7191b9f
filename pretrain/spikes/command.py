"""The command `replay`: run the spike detector over recorded curves."""

import argparse
from pathlib import Path

from data_prep.common import pictures
from data_prep.common.files import check_writable


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `replay`."""
    add = command.add_argument
    curves = (
        "a run's folder, a CSV, JSON Lines, trainer_state.json of transformers or fairseq's JSON "
        "log; or a threshold, such as spike.deviations=5"
    )
    add("curves", nargs="+", metavar="CURVE", help=curves)
    add("--json", type=Path, help="also write the findings to this file")
    add("--plot", type=Path, help=pictures.HELP.format("the curves"))


def replay(options: argparse.Namespace) -> None:
    """Run the spike detector over recorded loss curves.

    Of a run's folder the surviving steps are read, with the thresholds of its own recipe, so that
    spikes that were rolled back are not among them; other curves use the defaults.

    example: zeroclap replay runs/base other.csv spike.deviations=5 --plot curves.png
    """
    from pretrain.spikes.replay import replay

    pictures.check_file(options.plot)
    check_writable(options.json)
    replay(options.curves, options.json, options.plot)


COMMANDS = {"replay": (add_arguments, replay)}

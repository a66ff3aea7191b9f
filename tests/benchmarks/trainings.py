"""What benchmarks of several trainings share: arguments, commands, mean and standard deviation."""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def arguments(description: str, steps: int, vocab_size: int) -> argparse.ArgumentParser:
    """A parser of `--output`, `--steps`, `--vocab-size`, `--seeds` and overrides of a recipe."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--vocab-size", type=int, default=vocab_size)
    parser.add_argument("--seeds", default="1,2,3", help="such as 1,2,3")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    return parser


def run(*words: str) -> None:
    """Run a command of this project; exits with its words if it fails."""
    print("$ python -m", *words, flush=True)
    if subprocess.run([sys.executable, "-m", *words], check=False).returncode:
        sys.exit(f"{' '.join(words)} failed")


def mean_and_deviation(values: Iterable[float], digits: int) -> str:
    """Mean and standard deviation; of equal values the value alone."""
    values = list(values)
    spread = f" ± {statistics.stdev(values):,.{digits}f}" if len({*values}) > 1 else ""
    return f"{statistics.mean(values):,.{digits}f}{spread}"

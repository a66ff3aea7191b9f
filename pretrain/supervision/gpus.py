"""Which GPUs of this machine a launch may use. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, as the variable names them.

    Follows CUDA's rules, as torch 2.13 implements them (`torch.cuda._parse_visible_devices`): the
    first entry that is not a valid device ends the list, and a repeated entry leaves no device.
    Names (GPU-..., MIG-...) cannot be checked here.

    Returns:
        Numbers from "0" on, or names; empty on a machine without GPUs.
    """
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    allowed = environ.get(VARIABLE)
    if allowed is None or not present:
        return [str(number) for number in range(present)]
    entries = allowed.split(",")
    if allowed.startswith(("GPU-", "MIG-")):
        kind = allowed[:4]
        return _unless_repeated(takewhile(lambda entry: entry.startswith(kind), entries))
    numbers = _unless_repeated(
        str(int(entry)) for entry in takewhile(bool, map(_leading_number, entries))
    )
    return list(takewhile(lambda number: int(number) < present, numbers))


def _leading_number(entry: str) -> str:
    """The number that an entry begins with, as C's strtoul reads it; "" where there is none."""
    found = re.match(r"\+?([0-9]+)", entry.strip())
    return found.group(1) if found else ""


def _unless_repeated(entries: Iterable[str]) -> list[str]:
    listed = list(entries)
    return listed if len({*listed}) == len(listed) else []


def gpus_of(processes: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of so many processes on this machine: the first visible ones.

    Returns:
        One for each rank; empty on a machine without GPUs, where ranks run on the CPU.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    gpus = visible_gpus(environ)
    if gpus and processes > len(gpus):
        raise ValueError(
            f"supervision.processes_per_node: {processes} ranks on a machine with "
            f"{len(gpus)} usable GPUs ({_in_words(environ)}); write at most {len(gpus)}"
        )
    return gpus[:processes]


def numbers_of(processes: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What `gpus_of` returns, for the deepspeed launcher, which takes numbers only.

    Raises:
        ValueError: there are fewer GPUs than ranks, or they are visible by name.
    """
    gpus = gpus_of(processes, environ)
    if not all(gpu.isdecimal() for gpu in gpus):
        raise ValueError(
            f"{_in_words(environ)}: the deepspeed launcher takes GPUs by number only; write the "
            "numbers that `nvidia-smi -L` lists, or set supervision.launcher=torchrun, which "
            "takes names"
        )
    return gpus


def refuse_with_hostfile(slots: Sequence[int], environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a CUDA_VISIBLE_DEVICES that the ranks of a hostfile would not have.

    DeepSpeed 0.19.8 ignores the variable where it has a hostfile (launcher/runner.py, `main`) and
    gives the ranks of every machine its GPUs 0 to slots - 1 (launcher/launch.py, `main`).

    Raises:
        ValueError: names both values, and what to do.
    """
    if VARIABLE not in environ or not visible_gpus({}):
        return
    taken = [str(number) for number in range(max(slots))]
    if visible_gpus(environ)[: len(taken)] != taken:
        raise ValueError(
            f"{_in_words(environ)} with supervision.hostfile: the deepspeed launcher ignores it "
            f"there, and its ranks take GPUs 0 to {len(taken) - 1}. Unset it, or start "
            "`supervise --nodes N` on each machine without a hostfile: it uses the GPUs that are "
            "visible there"
        )


def _in_words(environ: Mapping[str, str]) -> str:
    allowed = environ.get(VARIABLE)
    return f"{VARIABLE} is not set" if allowed is None else f"{VARIABLE}={allowed}"

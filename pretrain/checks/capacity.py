"""Whether this machine can hold a run, as far as that is known before a launch.

Only what cannot possibly fit is refused: the bounds leave out activations, buffers and what other
programs use. `describe` is the quick part of `preflight`, for every launch.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from data_prep.common.wording import count
from pretrain.config.run import RunConfig
from pretrain.processes import gpus
from pretrain.records import checkpoints, ledger
from pretrain.spikes.policy import max_checkpoints_kept

_QUICK_BYTES = 16 << 20
"""Written before every launch."""
_MOSTLY_FREE = 0.9
"""Share of a GPU's memory below which another program uses it."""
_SLOW_BYTES_PER_SECOND = 20e6
"""Below this, a checkpoint of a base model takes more than a minute."""
_WAY_OUT = (
    "use a smaller model, a higher ZeRO stage on more GPUs, or offload (training.deepspeed; "
    "`plan` shows the memory of each stage)"
)


def check_memory(device_bytes: int, host_bytes: int, ranks: int) -> list[str]:
    """Compare what the ranks of this machine need at least with the memory that it has.

    Args:
        device_bytes: what a rank needs on its GPU, or in host memory where there is none.
        host_bytes: what a rank needs in host memory.
        ranks: number of ranks on this machine.

    Returns:
        Warnings: what would fit, but is not free now.

    Raises:
        ValueError: the memory is too small even if nothing else used it.
    """
    host = psutil.virtual_memory()
    if not gpus.visible_gpus():
        device_bytes, host_bytes = 0, device_bytes + host_bytes
    needs = [("this machine", ranks, host_bytes, host.total, host.available)]
    if cards := gpus.memory():
        total, free = max(total for total, _ in cards), max(free for _, free in cards)
        needs.append(("a GPU of this machine", 1, device_bytes, total, free))
    warnings = []
    for where, sharing, each, total, free in needs:
        needed = sharing * each
        text = (
            f"memory: weights, gradients and optimizer state of {count(sharing, 'rank')} "
            f"need at least {needed / 1e9:,.1f} GB of {where}, which has {total / 1e9:,.1f} GB"
        )
        if needed > total:
            raise ValueError(f"{text}; {_WAY_OUT}")
        if needed > free:
            warnings.append(f"{text}, of which {free / 1e9:,.1f} GB are free now")
    return warnings


def refuse_small_disk(config: RunConfig, parameters: int) -> None:
    """Check that the run's disk has room for the checkpoints that may be kept.

    A run that has a checkpoint already is checked by its next attempt, which knows its size.

    Raises:
        ValueError: names both sizes.
    """
    run = Path(config.folder)
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    if ledger.run_state(records, config.training.seed).checkpoints:
        return
    existing = existing_folder(run)
    size = checkpoints.BYTES_PER_PARAMETER * parameters
    checkpoints.refuse_small_disk(existing, max_checkpoints_kept(config) + 1, size)


def existing_folder(folder: Path) -> Path:
    """Return a run's folder, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def write_speed(folder: Path, size: int) -> tuple[float, float]:
    """Write a file and wait until it is on disk.

    The file has no name, so that nothing is left of it even if this process is killed.

    Args:
        folder: where to write.
        size: bytes.

    Returns:
        Bytes per second, fsync included; and the seconds of the fsync of a small addition, such as
        a line of the ledger.

    Raises:
        OSError: the folder cannot be written to.
    """
    chunk = os.urandom(1 << 20)  # file systems may compress what repeats
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for offset in range(0, size, len(chunk)):
            file.write(chunk[: size - offset])
        file.flush()
        os.fsync(file.fileno())
        speed = size / (time.perf_counter() - started)
        file.write(b"small")
        file.flush()
        started = time.perf_counter()
        os.fsync(file.fileno())
        return speed, time.perf_counter() - started


def describe(found: Sequence[gpus.Gpu], bytes_per_second: float) -> list[str]:
    """Describe a machine in a line, and warn of what would slow a run down or end it.

    Args:
        found: its GPUs.
        bytes_per_second: at which the run's folder is written.
    """
    disk = f"the run's folder takes {bytes_per_second / 1e6:,.0f} MB/s"
    if not found:
        lines = [f"machine: {disk}"]
    else:
        names = ", ".join(sorted({gpu.name for gpu in found}))
        free = min(gpu.free for gpu in found)
        lines = [
            f"machine: {count(len(found), 'GPU')} ({names}, driver {found[0].driver}), "
            f"{free / 1e9:,.1f} GB or more are free on each; {disk}"
        ]
    lines += [
        f"WARNING: GPU {gpu.number}: {gpu.free / 1e9:,.1f} of {gpu.total / 1e9:,.1f} GB are free; "
        "another program uses it (`nvidia-smi` shows which)"
        for gpu in found
        if gpu.free < _MOSTLY_FREE * gpu.total
    ]
    if bytes_per_second < _SLOW_BYTES_PER_SECOND:
        lines.append("WARNING: checkpoints will take long to write; `preflight` says how long")
    return lines


def check_launch(run: Path) -> list[str]:
    """Return `describe` for a launch on this machine; takes a second or less.

    Args:
        run: the run's folder, which exists.
    """
    try:
        speed, _ = write_speed(run, _QUICK_BYTES)
    except OSError as error:
        return [f"WARNING: {run} cannot be written to now: {error}"]
    return describe(gpus.describe(), speed)

"""What the answers of all ranks mean: a table, and what is wrong. Pure functions of the answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from data_prep.common.wording import count
from pretrain.checks.devices import HEADROOM
from pretrain.preflight.measure import Answer
from pretrain.records.versions import differences


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a run needs of its machines."""

    ranks: int
    on_gpus: bool
    """Whether the machines show GPUs."""
    device_bytes: int = 0
    """Of each rank's GPU, with activations; 0 if it is not known."""


def problems(answers: Sequence[Answer], needs: Needs) -> list[str]:
    """Return what is wrong, most basic first; nothing if the run can begin.

    Speeds are shown and not judged.
    """
    given = {answer.rank for answer in answers}
    missing = [str(rank) for rank in range(needs.ranks) if rank not in given]
    found = [f"rank {', '.join(missing)} did not start"] if missing else []
    found += [f"{_who(a)} stopped in {a.stopped_in}" for a in answers if a.stopped_in]
    for rule in (_versions, _devices, _memory):
        found += rule(answers, needs)
    return found


def _who(answer: Answer) -> str:
    return f"rank {answer.rank} on {answer.host}"


def _versions(answers: Sequence[Answer], needs: Needs) -> list[str]:
    return differences((answer.host, answer.versions) for answer in answers)


def _devices(answers: Sequence[Answer], needs: Needs) -> Iterator[str]:
    for a in answers:
        if needs.on_gpus and a.device == "cpu":
            driver, built = a.versions.get("driver", "not running"), a.versions["CUDA"]
            yield (
                f"{_who(a)} would use the CPU: the machine has GPUs, but torch "
                f"{a.versions['torch']} (for CUDA {built}) cannot use them; driver {driver}"
            )


def _memory(answers: Sequence[Answer], needs: Needs) -> Iterator[str]:
    for a in answers:
        if not _is_gpu(a) or a.free_bytes is None or a.total_bytes is None:
            continue
        text = f"{_who(a)} needs about {_gigabytes(needs.device_bytes)} of its GPU"
        if needs.device_bytes > HEADROOM * a.total_bytes:
            yield f"{text}, which has {_gigabytes(a.total_bytes)}; `plan` says what fits"
        elif needs.device_bytes > HEADROOM * a.free_bytes:
            yield (
                f"{text}, of which {_gigabytes(a.free_bytes)} are free; end the other programs "
                "that `nvidia-smi` shows"
            )


def _is_gpu(answer: Answer) -> bool:
    return (answer.device or "cpu") != "cpu"


def table(answers: Sequence[Answer]) -> str:
    """Format the answers as text: a line for each rank, and what they have in common."""
    columns: list[tuple[str, Callable[[Answer], str]]] = [
        ("rank", lambda a: str(a.rank)),
        ("host", lambda a: a.host),
        ("device", lambda a: f"{a.device} ({a.name})" if a.device else "-"),
        ("memory", lambda a: _gigabytes(a.total_bytes)),
        ("free", lambda a: _gigabytes(a.free_bytes)),
        ("matrix product", lambda a: _rate(a.matmul_flops)),
        ("write", lambda a: _speed(a.write_bytes_per_second)),
        ("fsync", lambda a: _milliseconds(a.fsync_seconds)),
        ("all-reduce", lambda a: _speed(a.all_reduce_bytes_per_second)),
        ("of a number", lambda a: _milliseconds(a.all_reduce_seconds)),
    ]
    rows = [[head for head, _ in columns]]
    rows += [[cell(answer) for _, cell in columns] for answer in answers]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    versions = {f"{name} {v}": None for a in answers for name, v in a.versions.items()}
    lines += ["", f"versions: {', '.join(versions)}"]
    speeds = [a.write_bytes_per_second for a in answers if a.write_bytes_per_second]
    if speeds:
        ranks = count(len(speeds), "rank")
        lines.append(f"run's folder: {_speed(sum(speeds))} for {ranks} at once")
    return "\n".join(lines) + "\n"


def _gigabytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e9:,.1f} GB"


def _rate(flops: float | None) -> str:
    if flops is None:
        return "-"
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"


def _speed(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{bytes_per_second / 1e6:,.0f} MB/s"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"

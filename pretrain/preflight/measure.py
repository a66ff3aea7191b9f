"""What each rank of `preflight` measures: its device, its disk, its connection to the others.

The run's launcher starts this module as it would start pretrain.train. Each rank writes its answer
to a file after every measurement, so that the file of a rank that hangs or dies says how far it
came. Read `main` first, then `Answer`.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.common import files
from data_prep.common.exit_codes import EXIT_DONE
from pretrain.checks import capacity
from pretrain.processes import gpus
from pretrain.records import control
from pretrain.records.versions import versions

if TYPE_CHECKING:
    from pretrain.engine.distributed import Process

WRITTEN_BYTES = 64 << 20
"""By each rank."""
_ELEMENTS = 1 << 24
"""Of an fp32 tensor that the ranks add up: 64 MB."""
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one rank measured; fields of later measurements are None until they are made."""

    rank: int
    host: str
    versions: dict[str, str]
    """By name: those of `pretrain.records.versions`, CUDA, NCCL, driver."""
    device: str | None = None
    """Such as cuda:0 or cpu."""
    name: str | None = None
    """Of the GPU, or "CPU"."""
    capability: float | None = None
    """Compute capability of the GPU."""
    total_bytes: int | None = None
    """Memory of the GPU, or of the machine."""
    free_bytes: int | None = None
    """The part of it that is free before this rank takes any."""
    matmul_flops: float | None = None
    """FLOP/s of a matrix product, all ranks at once."""
    write_bytes_per_second: float | None = None
    """Into the run's folder, all ranks at once, fsync included."""
    fsync_seconds: float | None = None
    """Of a small file."""
    all_reduce_bytes_per_second: float | None = None
    """Bytes of the tensor over the time of its all-reduce; infinite with one rank."""
    all_reduce_seconds: float | None = None
    """Of a single number."""

    @property
    def stopped_in(self) -> str:
        """The measurement that was not finished; "" if all were."""
        return next((text for name, text in STAGES.items() if getattr(self, name) is None), "")


STAGES = {
    "device": "joining the other ranks",
    "matmul_flops": "the matrix product",
    "write_bytes_per_second": "writing to the run's folder",
    "all_reduce_bytes_per_second": "the all-reduce",
}
"""The measurements in their order, by a field that each gives."""


def answer_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's answer."""
    return folder / f"rank-{rank:05d}.json"


def read_answers(folder: Path, world_size: int) -> list[Answer]:
    """Return the answers that were written, in the order of the ranks."""
    found = [control.read_json(answer_file(folder, rank)) for rank in range(world_size)]
    return [Answer(**values) for values in found if values is not None]


def main(arguments: Sequence[str]) -> int:
    """Measure, as one rank.

    Args:
        arguments: the recipe's file, in the folder of the answers, which is also on the disk that
            is measured; the deepspeed launcher adds --local_rank.
    """
    from pretrain.engine.distributed import adopt_launcher, all_sum

    folder = Path(next(word for word in arguments if not word.startswith("-"))).parent
    adopt_launcher(os.environ)
    answer = Answer(int(os.environ["RANK"]), socket.gethostname(), _versions())
    files.replace_json(answer_file(folder, answer.rank), dataclasses.asdict(answer))
    from pretrain.engine.engine import start

    process = start()
    measurements: list[Callable[[Process, Path], dict[str, Any]]]
    measurements = [_device, _matmul, _disk, _all_reduce]
    for measure in measurements:
        all_sum([0.0], process.device)  # all ranks measure the same at the same time
        answer = dataclasses.replace(answer, **measure(process, folder))
        files.replace_json(answer_file(folder, answer.rank), dataclasses.asdict(answer))
    return EXIT_DONE


def _versions() -> dict[str, str]:
    import torch

    found = {  # what was imported, and what it was built for
        **versions(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
    }
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if cards := gpus.describe():
        found["driver"] = cards[0].driver
    return found


def _device(process: Process, folder: Path) -> dict[str, Any]:
    import psutil
    import torch

    values: dict[str, Any] = {"device": str(process.device)}
    if process.device.type == "cpu":
        memory = psutil.virtual_memory()
        return {
            **values,
            "name": "CPU",
            "total_bytes": memory.total,
            "free_bytes": memory.available,
        }
    free, total = torch.cuda.mem_get_info(process.device)
    major, minor = torch.cuda.get_device_capability(process.device)
    name = torch.cuda.get_device_name(process.device)
    values |= {"name": name, "capability": float(f"{major}.{minor}")}
    return {**values, "total_bytes": total, "free_bytes": free}


def _matmul(process: Process, folder: Path) -> dict[str, Any]:
    from pretrain.plan.speed import matmul_peak

    return {"matmul_flops": matmul_peak(str(process.device))}


def _disk(process: Process, folder: Path) -> dict[str, Any]:
    speed, seconds = capacity.write_speed(folder, WRITTEN_BYTES)
    return {"write_bytes_per_second": speed, "fsync_seconds": seconds}


def _all_reduce(process: Process, folder: Path) -> dict[str, Any]:
    """Time all-reduces, and check their sum.

    Raises:
        ValueError: the sum is wrong.
    """
    import torch

    def seconds(elements: int, repeats: int) -> float:
        tensor = torch.empty(elements, device=process.device)
        times = []
        for _ in range(repeats + 1):  # the first one opens connections
            tensor.fill_(process.rank + 1.0)
            started = time.perf_counter()
            torch.distributed.all_reduce(tensor)
            found = float(tensor[-1])  # waits for a GPU
            times.append(time.perf_counter() - started)
            expected = process.world_size * (process.world_size + 1) / 2
            if found != expected:
                raise ValueError(
                    f"an all-reduce of {process.world_size} ranks gave {found}, not {expected}"
                )
        return min(times[1:])

    speed = 4 * _ELEMENTS / seconds(_ELEMENTS, _REPEATS)
    return {"all_reduce_bytes_per_second": speed, "all_reduce_seconds": seconds(1, 4 * _REPEATS)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

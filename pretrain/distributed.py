"""Facts about this rank, and the few things that ranks say to each other."""

from __future__ import annotations

import dataclasses
import os
from typing import TypeVar

import torch
import torch.distributed

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Who we are among how many, from the variables that every launcher sets."""

    rank: int
    count: int
    local_rank: int
    local_count: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """This process; alone where no launcher started it."""
        rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            rank=rank,
            count=count,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_count=int(
                os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", count))
            ),
        )

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or the CPU where there is none."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")

    def share_cores(self) -> None:
        """Give each rank of this machine its share of the cores, unless OMP_NUM_THREADS says."""
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // self.local_count))


def all_sum(values: list[float], device: torch.device) -> list[float]:
    """Sums over all ranks, in fp64 (fp32 could not count the tokens of a large batch)."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def broadcast(value: T, device: torch.device) -> T:
    """Rank 0's value, on every rank. For small records of our own: it is pickled."""
    if not torch.distributed.is_initialized():
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0, device=device)
    return box[0]


def gather(value: T) -> list[T]:
    """Every rank's value, on every rank, in rank order."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[T | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def broadcast_code(code: int, device: torch.device) -> int:
    """Rank 0's small number, on every rank: cheap enough for every step."""
    if not torch.distributed.is_initialized():
        return code
    tensor = torch.tensor([code], device=device)
    torch.distributed.broadcast(tensor, src=0)
    return int(tensor.item())

"""Facts about this rank, and the few things that ranks say to each other."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from typing import TypeVar

import torch
import torch.distributed

T = TypeVar("T")

_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any that is free
}


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What torch's process group needs to know, in the names that torch reads.

    The deepspeed launcher and torchrun set these names; below srun they are made from Slurm's, of
    the job step alone: a batch script has those of its job too and is one process. A process that
    nobody launched is alone.

    Args:
        environ: the process's environment.

    Returns:
        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: a number is none, or a rank is not below the number of ranks.
    """
    below_srun = "RANK" not in environ and "SLURM_STEP_NUM_TASKS" in environ
    said = {**_ALONE, **(_from_slurm(environ) if below_srun else {})}
    said |= {name: environ[name] for name in said if name in environ}
    said.setdefault("LOCAL_WORLD_SIZE", said["WORLD_SIZE"])
    # The deepspeed launcher says LOCAL_SIZE and passes LOCAL_WORLD_SIZE on as it found it; torchrun
    # does the reverse.
    names = ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"]
    if "TORCHELASTIC_RUN_ID" in environ:
        names.reverse()
    for name in names:
        said["LOCAL_WORLD_SIZE"] = environ.get(name, said["LOCAL_WORLD_SIZE"])
    for name, value in said.items():
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise ValueError(f"environment: {name} is {value!r}, not a whole number")
    for rank, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if int(said[rank]) >= int(said[count]):
            raise ValueError(
                f"environment: {rank} is {said[rank]}, which is not below {count} {said[count]}"
            )
    return said


def adopt_launcher(environ: MutableMapping[str, str]) -> None:
    """Set this process's environment as its launcher meant it; before anything asks for GPUs.

    Adds `launcher_variables`. Hides all GPUs where DS_ACCELERATOR says cpu: DeepSpeed 0.19.8's
    launcher puts the ranks' numbers into CUDA_VISIBLE_DEVICES there too (launcher/launch.py, `main`
    with CPU_Accelerator.set_visible_devices_envs), which would show GPUs that the user has hidden.

    Raises:
        ValueError: the launcher's variables contradict each other.
    """
    environ.update(launcher_variables(environ))
    if environ.get("DS_ACCELERATOR") == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""


class PortInUse(ValueError):
    """The port at which the ranks were to meet is taken."""


def refuse_busy_port(environ: Mapping[str, str]) -> None:
    """Refuse a MASTER_PORT that another process listens on; asks on rank 0, which would open it.

    torch 2.13 has rank 0 open it, except below torchrun, which has opened it already
    (distributed/rendezvous.py, `_create_c10d_store`).

    Args:
        environ: with what `launcher_variables` returns.

    Raises:
        PortInUse: names the address, and how to choose another port.
    """
    port = int(environ["MASTER_PORT"])
    shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if environ["RANK"] != "0" or shared or not port or torch.distributed.is_initialized():
        return
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return  # torch may yet open it in another way
        way = "set MASTER_PORT"
        if "CROSS_RANK" in environ:
            way = "pass --master_port to deepspeed"
        elif "TORCHELASTIC_RUN_ID" in environ:
            way = "pass --master-port to torchrun"
        raise PortInUse(
            f"{environ['MASTER_ADDR']} port {port}, where the ranks are to meet, cannot be opened "
            f"({error.strerror}); to choose another port, {way}"
        ) from error


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    job, node = environ.get("SLURM_JOB_ID", "0"), int(environ.get("SLURM_NODEID", "0"))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node]),
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        # The same on all nodes, another for each job, and outside the range of random ports.
        "MASTER_PORT": str(12000 + int(job) % 20000),
    }


def first_host(nodes: str) -> str:
    """The first of Slurm's node list: `gpu[03-05,9],login` begins with gpu03."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).split(",")[0]


def tasks_per_node(tasks: str) -> list[int]:
    """Slurm's short form written out: `2(x3),1` is 2, 2, 2, 1."""
    result: list[int] = []
    for part in tasks.split(","):
        number, _, times = part.partition("(x")
        result += [int(number)] * int(times.rstrip(")") or 1)
    return result


@dataclasses.dataclass(frozen=True)
class Process:
    """Who we are among how many."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Process:
        """This process, as whoever started it says: see `launcher_variables`.

        Raises:
            ValueError: the variables contradict each other.
        """
        said = launcher_variables(environ)
        return cls(
            rank=int(said["RANK"]),
            world_size=int(said["WORLD_SIZE"]),
            local_rank=int(said["LOCAL_RANK"]),
            local_world_size=int(said["LOCAL_WORLD_SIZE"]),
        )

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or the CPU where there is none.

        Raises:
            ValueError: the machine has fewer visible GPUs than ranks.
        """
        if not torch.cuda.is_available():
            return torch.device("cpu")
        count = torch.cuda.device_count()
        if count == 1 and (self.local_rank == 0 or not _gpu_is_shared(os.environ)):
            return torch.device("cuda", 0)
        if self.local_rank < count:
            return torch.device("cuda", self.local_rank)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ValueError(
            f"local rank {self.local_rank} has no GPU: {self.local_world_size} ranks started on a "
            f"machine with {count} visible GPUs (CUDA_VISIBLE_DEVICES is "
            f"{'not set' if visible is None else repr(visible)}); start at most {count} ranks "
            "there, or make more GPUs visible"
        )

    def prepare_device(self) -> None:
        """Make this rank's GPU the current one; on every rank, before the first collective.

        The current device is where torch 2.13 puts the objects of `all_gather_object` under NCCL
        (distributed_c10d.py, `_get_object_coll_device` returns "cuda" without a number): without
        this, every rank of a machine uses its first GPU. DeepSpeed 0.19.8 binds the process group
        to the GPU whose number LOCAL_RANK is (comm/torch.py, `init_process_group`), and its engine
        uses that GPU (runtime/engine.py, `_set_distributed_vars`). So LOCAL_RANK is set to the
        GPU's number, which is 0 where each rank sees its own GPU only.

        Raises:
            ValueError: the machine has fewer visible GPUs than ranks; on each of its ranks.
        """
        _ = dataclasses.replace(self, local_rank=self.local_world_size - 1).device
        device = self.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            os.environ["LOCAL_RANK"] = str(device.index)

    def prepare_cpu(self) -> None:
        """Give each rank of this machine its share of the cores, unless OMP_NUM_THREADS says.

        Also flushes denormal numbers.
        """
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // self.local_world_size))
        _flush_denormals()


_ONLY_PROCESS = Process(0, 1, 0, 1)


def choose_device(name: str | None = None) -> torch.device:
    """The device of a command that runs in one process, made ready for use.

    Args:
        name: what --device says: cpu, cuda or cuda:N; None: the first GPU, or the CPU where there
            is none.

    Raises:
        ValueError: this machine has no such device.
    """
    device = _ONLY_PROCESS.device if name is None else _device_named(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _flush_denormals()
    return device


def _device_named(name: str) -> torch.device:
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    devices = ["cpu", *(f"cuda:{number}" for number in gpus)]
    full_name = "cuda:0" if name == "cuda" else name
    if full_name not in devices:
        raise ValueError(f"--device {name}: this machine has {', '.join(devices)}")
    return torch.device(full_name)


def _flush_denormals() -> None:
    """Treat numbers below the smallest normal one (1e-38) as zero.

    ALiBi's weights of distant keys are that small, and with them the backward pass of attention
    takes three times as long on a CPU. Threads that start later inherit the setting.
    """
    torch.set_flush_denormal(True)


def _gpu_is_shared(environ: Mapping[str, str]) -> bool:
    """Whether the only visible GPU is visible to the machine's other ranks, too.

    Slurm (--gpus-per-task) or a wrapper script may show each rank another single GPU. The deepspeed
    launcher and torchrun show all ranks the same ones, unless CUDA_VISIBLE_DEVICES was set to one
    device for each rank after they started it.
    """
    launched = "CROSS_RANK" in environ or "TORCHELASTIC_RUN_ID" in environ
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return launched and (not visible or "," in visible)


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

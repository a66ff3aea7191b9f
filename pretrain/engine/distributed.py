"""The process of a rank: launcher variables, device, memory, and small collectives."""

import ctypes
import dataclasses
import errno
import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import TypeVar

import torch
import torch.distributed
import torch.distributed.nn  # before there is a group, which its functions would keep (2.13)

from data_prep.common import children
from pretrain.processes import gpus

T = TypeVar("T")
_ALLOCATOR_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
"""The names of the variable for the settings of torch's allocator."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt (malloc.h)."""
_SINGLE_PROCESS = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any free port
}


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables from which torch creates its process group.

    The deepspeed launcher and torchrun set them. Under srun they are derived from the variables of
    the Slurm job step; those of the job are ignored, because a batch script has them too and is a
    single process. Without a launcher, the process is alone.

    Args:
        environ: the environment of the process.

    Returns:
        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: a number is not valid, or a rank is not below the number of ranks.
    """
    under_srun = "RANK" not in environ and "SLURM_STEP_NUM_TASKS" in environ
    variables = {**_SINGLE_PROCESS, **(_from_slurm(environ) if under_srun else {})}
    variables |= {name: environ[name] for name in variables if name in environ}
    # The deepspeed launcher sets LOCAL_SIZE and passes on LOCAL_WORLD_SIZE as it found it; torchrun
    # does the reverse.
    names = ["LOCAL_SIZE", "LOCAL_WORLD_SIZE"]
    if "TORCHELASTIC_RUN_ID" in environ:
        names.reverse()
    default = variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])
    variables["LOCAL_WORLD_SIZE"] = next((environ[n] for n in names if n in environ), default)
    for name, value in variables.items():
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise ValueError(f"environment: {name} is {value!r}, not a whole number")
    if int(variables["MASTER_PORT"]) > 65535:
        raise ValueError(f"environment: MASTER_PORT is {variables['MASTER_PORT']}, above 65535")
    for rank, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if int(variables[rank]) >= int(variables[count]):
            raise ValueError(
                f"environment: {rank} is {variables[rank]}, which is not below {count} "
                f"{variables[count]}"
            )
    return variables


def adopt_launcher(environ: MutableMapping[str, str]) -> None:
    """Complete this process's environment; call it before anything asks for GPUs.

    Adds `launcher_variables`, and hides all GPUs if DS_ACCELERATOR is cpu. In that case the
    launcher of DeepSpeed 0.19.8 writes the local ranks into CUDA_VISIBLE_DEVICES
    (launcher/launch.py, `main` with CPU_Accelerator.set_visible_devices_envs), which would expose
    GPUs that the user has hidden.

    Raises:
        ValueError: the launcher's variables contradict each other.
    """
    environ.update(launcher_variables(environ))
    if environ.get("DS_ACCELERATOR") == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""


class PortInUse(ValueError):
    """Another process listens on MASTER_PORT."""


def check_port_is_free(environ: Mapping[str, str]) -> None:
    """Refuse a MASTER_PORT that another process listens on.

    Only rank 0 checks. It is the rank that opens the port in torch 2.13, except under torchrun,
    which has opened the port already (distributed/rendezvous.py, `_create_c10d_store`).

    Args:
        environ: with the variables of `launcher_variables`.

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
            return  # torch may be able to open it in another way
        remedy = "set MASTER_PORT"
        if "CROSS_RANK" in environ:
            remedy = "pass --master_port to deepspeed"
        elif "TORCHELASTIC_RUN_ID" in environ:
            remedy = "pass --master-port to torchrun"
        raise PortInUse(
            f"{environ['MASTER_ADDR']} port {port}, where the ranks meet, cannot be opened "
            f"({error.strerror}); to choose another port, {remedy}"
        ) from error


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    job, node = environ.get("SLURM_JOB_ID", "0"), int(environ.get("SLURM_NODEID", "0"))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node]),
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        # Equal on all nodes, different for each job, and outside the range of ephemeral ports.
        "MASTER_PORT": str(12000 + int(job) % 20000),
    }


def first_host(nodes: str) -> str:
    """First host of a Slurm node list: gpu03 of `gpu[03-05,9],login`."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).split(",")[0]


def tasks_per_node(tasks: str) -> list[int]:
    """Expand the number of tasks per node as Slurm writes it: `2(x3),1` is 2, 2, 2, 1."""
    parts = (part.partition("(x") for part in tasks.split(","))
    return [int(number) for number, _, n in parts for _ in range(int(n.rstrip(")") or 1))]


@dataclasses.dataclass(frozen=True)
class Process:
    """Ranks and world sizes of this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Process":
        """Read this process's ranks from the variables of its launcher: see `launcher_variables`.

        Raises:
            ValueError: the variables contradict each other.
        """
        variables = launcher_variables(environ)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(variables[name]) for name in names))

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or the CPU on a machine without GPUs.

        Raises:
            ValueError: the machine has fewer visible GPUs than ranks, or as `usable_gpus`.
        """
        count = usable_gpus()
        if not count:
            return torch.device("cpu")
        if count == 1 and not _gpu_is_shared(os.environ):
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
        """Make this rank's GPU the current device; call it on every rank before any collective.

        torch 2.13 moves the objects of `all_gather_object` to the current device under NCCL
        (distributed_c10d.py, `_get_object_coll_device` returns "cuda" without an index), so without
        this call all ranks of a machine would use its first GPU. DeepSpeed 0.19.8 takes LOCAL_RANK
        as the index of the GPU for its process group (comm/torch.py, `init_process_group`) and its
        engine (runtime/engine.py, `_set_distributed_vars`). LOCAL_RANK is therefore set to the
        index of the GPU, which is 0 where each rank sees only its own GPU. Given a device, as
        DeepSpeed does on two ranks or more, torch 2.13 connects NCCL while it creates the process
        group, and barriers use that device (distributed_c10d.py, `init_process_group` and
        `barrier`): the device must be set before the group exists.

        Raises:
            ValueError: the machine has fewer visible GPUs than ranks; raised on each of its ranks.
        """
        # Every rank checks the last rank of its machine, so that all of them raise.
        _ = dataclasses.replace(self, local_rank=self.local_world_size - 1).device
        device = self.device
        if device.type == "cuda":
            # Memory that torch has cached in pieces serves larger tensors too.
            if not _ALLOCATOR_SETTINGS & os.environ.keys():
                os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
            torch.cuda.set_device(device)
            os.environ["LOCAL_RANK"] = str(device.index)

    def prepare_cpu(self) -> None:
        """Give each rank of the machine an equal share of the cores, unless OMP_NUM_THREADS is set.

        Also flushes denormal numbers to zero and, if the device is the CPU, keeps freed memory.
        """
        if "OMP_NUM_THREADS" not in os.environ:
            cores = children.usable_cores()
            torch.set_num_threads(max(1, cores // self.local_world_size))
        _flush_denormals()
        if self.device.type == "cpu":
            _keep_freed_memory()


def usable_gpus() -> int:
    """Return the number of GPUs that torch can use.

    Raises:
        ValueError: this machine has GPUs, and torch can use none of them.
    """
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    if gpus.visible_gpus():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise ValueError(
            f"torch {torch.__version__}, built {built}, cannot use the GPUs of this machine; "
            "install a torch for the version of CUDA that nvidia-smi shows, or, to use the CPU, "
            "set DS_ACCELERATOR=cpu"
        )
    return 0


def choose_device(name: str | None = None) -> torch.device:
    """Choose and prepare the device of a command that runs in one process.

    Args:
        name: the value of --device: cpu, cuda or cuda:N. By default the first GPU, or the CPU on a
            machine without GPUs.

    Raises:
        ValueError: this machine has no such device, or as `usable_gpus`.
    """
    count = 0 if name == "cpu" else usable_gpus()
    devices = ["cpu", *(f"cuda:{number}" for number in range(count))]
    if name is None:
        name = "cuda" if count else "cpu"
    full_name = "cuda:0" if name == "cuda" else name
    if full_name not in devices:
        raise ValueError(f"--device {name}: this machine has {', '.join(devices)}")
    device = torch.device(full_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _flush_denormals()
        _keep_freed_memory()
    return device


def _flush_denormals() -> None:
    """Treat numbers below the smallest normal one (1e-38) as zero.

    With ALiBi the attention weights of distant keys are that small, and the backward pass of
    attention takes three times as long on a CPU. Threads that start later inherit the setting.
    """
    torch.set_flush_denormal(True)


def _keep_freed_memory() -> None:
    """Keep the memory of freed tensors below 64 MB for the next ones, on a CPU.

    By default glibc returns that of tensors above 32 MB, and what is free at the end of its heap.
    The system then clears the pages of the next tensor: this can take a third of an update. Larger
    tensors would leave holes: a process that kept all of them took up to 1.7 times the memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if mallopt and mallopt(_M_MMAP_THRESHOLD, 2**26):  # an older glibc refuses so much
        mallopt(_M_TRIM_THRESHOLD, -1)


def _gpu_is_shared(environ: Mapping[str, str]) -> bool:
    """Whether the only visible GPU is also visible to the other ranks of the machine.

    Slurm (--gpus-per-task) or a wrapper script may show each rank its own GPU only. The deepspeed
    launcher and torchrun show the same GPUs to all ranks, unless a wrapper script has set
    CUDA_VISIBLE_DEVICES to one device in each rank.
    """
    launched = "CROSS_RANK" in environ or "TORCHELASTIC_RUN_ID" in environ
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return launched and (not visible or "," in visible)


def most_bytes(device: torch.device) -> int:
    """Most memory so far, without waiting: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage, whose peak starts at the memory of the parent process, is for gVisor alone.
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return 1024 * (int(found[1]) if found else getrusage(RUSAGE_SELF).ru_maxrss)


def leave() -> None:
    """Leave the process group; call it on every rank where the program ends without an error.

    A thread of gloo frees the tensors of a collective after it, and needs the interpreter to do so.
    One that exits meanwhile ends the thread within a destructor, and so the process (SIGABRT; one
    launch in 60 of two ranks on a CPU). Leaving waits for the thread. NCCL warns of groups that are
    left.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def all_sum(values: Sequence[float] | torch.Tensor, device: torch.device) -> list[float]:
    """Sum values over all ranks, in fp64: fp32 cannot count the tokens of a large batch.

    A tensor of fp64 on the device is overwritten.
    """
    tensor = torch.as_tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def gather(value: T) -> list[T]:
    """Gather the values of all ranks, in rank order, on every rank."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[T | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank."""
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]

"""The GPUs of this machine that a launch may use."""

import dataclasses
import functools
import os
import re
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import takewhile
from pathlib import Path

from data_prep.common import children
from data_prep.common.wording import count

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs of this machine that CUDA_VISIBLE_DEVICES shows, named as it names them.

    Follows CUDA's rules as torch 2.13 implements them (`torch.cuda._parse_visible_devices`): the
    first entry that is not a valid device ends the list, and a repeated entry leaves no device.
    Names (GPU-..., MIG-...) cannot be checked here.

    Returns:
        Numbers from "0" on, or names; empty on a machine without GPUs, and if DS_ACCELERATOR is
        cpu.
    """
    present, variable = _present(environ), environ.get(VARIABLE)
    if variable is None or not present:
        return [str(number) for number in range(present)]
    entries, kind = variable.split(","), variable[:4]
    if kind in ("GPU-", "MIG-"):
        found = [*takewhile(lambda entry: entry.startswith(kind), entries)]
    else:  # the number that an entry begins with, as C's strtoul reads it
        starts = (re.match(r"\s*\+?([0-9]+)", entry) for entry in entries)
        found = [str(int(start[1])) for start in takewhile(bool, starts) if start]
    if len({*found}) < len(found):
        return []
    return [*takewhile(lambda entry: not entry.isdecimal() or int(entry) < present, found)]


def _present(environ: Mapping[str, str]) -> int:
    """Return the number of this machine's GPUs; 0 if DS_ACCELERATOR is cpu.

    Each GPU with NVIDIA's driver for Linux has a file in /dev. Under WSL2 only the driver has one.
    """
    if environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    if numbered := len(list(_DEVICES.glob("nvidia[0-9]*"))):
        return numbered
    return len(_installed()) if (_DEVICES / "dxg").exists() else 0


def select(device: str | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Show this process, before it loads torch, and its children only what --device names.

    Args:
        device: cpu, cuda:N, cuda (all visible GPUs), or None, which changes nothing.
        environ: the environment that is changed.

    Raises:
        ValueError: this machine has no such device.
    """
    if device is None:
        return
    visible = visible_gpus({**environ, "DS_ACCELERATOR": ""})  # whatever it names
    found = {"cpu": "", **{f"cuda:{number}": gpu for number, gpu in enumerate(visible)}}
    found |= {"cuda": ",".join(visible)} if visible else {}
    if device not in found:
        raise ValueError(f"--device {device}: this machine has {', '.join(found)}")
    environ.update({"DS_ACCELERATOR": device.partition(":")[0], VARIABLE: found[device]})


def device_type() -> str:
    """Return the device that ranks on this machine use, "cpu" or "cuda"."""
    chosen = os.environ.get("DS_ACCELERATOR") or ("cuda" if visible_gpus() else "cpu")
    return "cpu" if chosen == "cpu" else "cuda"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it."""

    number: str
    capability: float
    """Compute capability, such as 8.0."""
    total: int
    """Bytes of memory."""
    free: int
    """Bytes of memory that no process uses now."""
    is_shared: bool = True
    """Whether several processes may use it at once, all of its memory: its compute mode is not
    exclusive, and it is not divided (MIG)."""
    uuid: str = ""


_FIELDS = "index,uuid,compute_cap,memory.total,memory.free,compute_mode,mig.mode.current"


def describe() -> list[Gpu]:
    """Return the GPUs of this machine; none where nvidia-smi is missing or does not work.

    Those that CUDA_VISIBLE_DEVICES hides are left out, unless it names parts of GPUs (MIG-...).
    """
    found, visible = _installed(), tuple(visible_gpus())  # a UUID may be cut short
    shown = [gpu for gpu in found if gpu.number in visible or gpu.uuid.startswith(visible)]
    return shown or found


def _installed() -> list[Gpu]:
    """Return all GPUs, whatever CUDA_VISIBLE_DEVICES hides; see `describe`."""
    query = [f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    found = []
    try:
        done = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=30, check=True
        )
        for line in done.stdout.splitlines():
            number, uuid, capability, *sizes, mode, mig = (cell.strip() for cell in line.split(","))
            total, free = (int(size) << 20 for size in sizes)
            is_shared = mode == "Default" and mig != "Enabled"
            found.append(Gpu(number, float(capability), total, free, is_shared, uuid))
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return found


@functools.cache
def least_capability() -> float | None:
    """Return the lowest compute capability of the GPUs of `describe`; None where there are none."""
    return min((gpu.capability for gpu in describe()), default=None)


def ranks_here(configured: int) -> int:
    """Return the ranks of a launch here; by default (0) one for each visible GPU, two on a CPU."""
    return configured or len(visible_gpus()) or 2


def gpus_of(processes: int, setting: str = "supervision.processes_per_node") -> list[str]:
    """Return the GPUs for this many processes on this machine: the first visible ones.

    Args:
        processes: number of ranks.
        setting: the user's setting of this number, for the message.

    Returns:
        One GPU for each process; empty on a machine without GPUs, where ranks use the CPU.

    Raises:
        ValueError: There are fewer GPUs than processes.
    """
    gpus, variable = visible_gpus(), os.environ.get(VARIABLE)
    if gpus and processes > len(gpus):
        shown = f"{VARIABLE} is not set" if variable is None else f"{VARIABLE}={variable}"
        raise ValueError(
            f"{setting}: {count(processes, 'rank')} on a machine with "
            f"{count(len(gpus), 'usable GPU')} ({shown}); write at most {len(gpus)}"
        )
    return gpus[:processes]


def environment(gpus: Sequence[str], threads: int) -> dict[str, str]:
    """Return the variables of a process that has a share of this machine.

    Args:
        gpus: that it may use, as `visible_gpus` names them; none: as this process.
        threads: of each of its ranks on a CPU, unless OMP_NUM_THREADS is set.
    """
    environ = children.environment()
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    return environ | ({VARIABLE: ",".join(gpus)} if gpus else {})

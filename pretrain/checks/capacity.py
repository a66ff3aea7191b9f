"""Whether this machine can hold a run, as far as that is known before a launch.

Only what cannot possibly fit is refused: the bounds leave out activations, buffers and what other
programs use.
"""

from pathlib import Path

import psutil

from data_prep.common.children import usable_cores, usable_memory
from data_prep.common.wording import count
from pretrain.checks import needs
from pretrain.config import deepspeed as deepspeed_settings
from pretrain.config.run import RunConfig
from pretrain.model.config import ModelConfig
from pretrain.processes import gpus
from pretrain.records import checkpoints, ledger
from pretrain.spikes.policy import max_checkpoints_kept

_CPU_FLOPS = 40e9
"""Of a core, in fp32; base models reached 36e9 on two busy ones."""
_MOST_DAYS = 2.0
_WAY_OUT = (
    "use a smaller model, a higher ZeRO stage on more GPUs, or offload (training.deepspeed; "
    "`plan` shows the memory of each stage)"
)


def check_cpu_time(config: RunConfig, model: ModelConfig, world_size: int) -> None:
    """Refuse a run that a machine without a GPU would not finish in days, unless it asks for fp32.

    Raises:
        ValueError: names the time, and the setting that says that a CPU is meant.
    """
    cores = min(psutil.cpu_count(logical=False) or 1, usable_cores())
    days = needs.work(config, model)[2] / (cores * _CPU_FLOPS) / 86400
    settings = deepspeed_settings.read_settings(*config.deepspeed_arguments(world_size))
    if days > _MOST_DAYS and needs.weight_bytes(settings) == 2:
        raise ValueError(
            f"no GPU is visible here, and on {count(cores, 'CPU core')} this run takes about "
            f"{days:,.0f} days; take a smaller recipe, such as small, or a machine with a GPU. "
            f"training.deepspeed {config.training.deepspeed} is for GPUs: with zero1_fp32 the run "
            "starts here"
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
    if gpus.device_type() == "cpu":
        device_bytes, host_bytes = 0, device_bytes + host_bytes
    parts = [("this machine", ranks, host_bytes, *usable_memory())]
    if cards := gpus.describe():
        total, free = max(card.total for card in cards), max(card.free for card in cards)
        parts.append(("a GPU of this machine", 1, device_bytes, total, free))
    warnings = []
    for where, sharing, each, total, free in parts:
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


def check_disk_space(config: RunConfig, parameters: int) -> None:
    """Check that the run's disk has room for the checkpoints that may be kept.

    A run that has a checkpoint already is checked by its next attempt, which knows its size.

    Raises:
        ValueError: names both sizes.
    """
    run = Path(config.folder)
    state = ledger.run_state(ledger.read_ledger(run / ledger.FILE_NAME))
    if not state.checkpoints:
        size = checkpoints.BYTES_PER_PARAMETER * parameters
        checkpoints.check_disk_space(existing_folder(run), max_checkpoints_kept(config) + 1, size)


def existing_folder(folder: Path) -> Path:
    """Return a run's folder, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())

"""The weights of a checkpoint's files, without an engine."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.engine import workarounds


def read_states(path: Path) -> dict[str, Any]:
    """Read a file of a checkpoint to the CPU; nothing in it is executed.

    Raises:
        ValueError: it asks for code to be run.
    """
    with workarounds.load_without_code():
        return torch.load(path, map_location="cpu", mmap=True)


def consolidated_weights(folder: Path) -> dict[str, Tensor]:
    """Assemble the fp32 weights of a checkpoint folder, on the CPU.

    They come from ZeRO's fp32 partitions, and at stage 0 from the module itself. Nothing in the
    files is executed.

    Raises:
        ValueError: a file asks for code to be run.
    """
    workarounds.select_cpu_without_gpu()
    from deepspeed.utils import zero_to_fp32

    if list(folder.glob("*_optim_states.pt")):
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            workarounds.load_without_code(),
        ):
            weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                str(folder.parent), tag=folder.name
            )
    else:
        (states,) = folder.glob("mp_rank_*_model_states.pt")
        weights = read_states(states)["module"]
    return {name: tensor.detach().float().clone() for name, tensor in weights.items()}

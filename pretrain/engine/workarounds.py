"""What DeepSpeed does otherwise than one expects, and how it is met (0.19.8). Called by the engine.

Reaches into what is private to DeepSpeed and torch; tests notice when that moves.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any


def choose_accelerator() -> None:
    """Name the CPU where there is no GPU; DeepSpeed otherwise warns each time it is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def limit_waiting() -> None:
    """Let every collective end in an error when a rank does not come: DEEPSPEED_TIMEOUT minutes.

    DeepSpeed sets that limit (10 where the variable is not set) for one group of all ranks. It
    makes others that keep torch's, half an hour with gloo, and there one waits.
    """
    from deepspeed import constants
    from torch.distributed import distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, constants.default_pg_timeout)


def switch_off_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling its CPU communication op at start-up.

    The build takes a minute or two, needs a compiler, and leaves a lock when killed on which every
    later run waits for ever. gloo does the same work.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@contextlib.contextmanager
def one_optimizer_for_all_stages() -> Iterator[None]:
    """In the block, DeepSpeed takes its ZeRO optimiser wherever there is ZeRO.

    It would take another one for bf16 added up in fp32 at stage 1, in whose checkpoints its own
    tools find no weights; the ZeRO optimiser can do the same sums there, as it does for fp16.
    """
    from deepspeed.runtime import engine

    usual = engine.DeepSpeedEngine._do_optimizer_sanity_check

    def chosen(self: Any, optimizer: object) -> object:  # noqa: ANN401
        kind = usual(self, optimizer)
        return engine.ZERO_OPTIMIZATION if self.zero_optimization() else kind

    engine.DeepSpeedEngine._do_optimizer_sanity_check = chosen
    try:
        yield
    finally:
        engine.DeepSpeedEngine._do_optimizer_sanity_check = usual


def at_smallest_scale(optimizer: object) -> bool:
    """Whether an overflow now would find fp16's loss scale at its minimum; keeps it from raising.

    DeepSpeed would end such an update with an exception on every rank. To be asked before each
    update: a checkpoint that is loaded brings its own scaler with it.
    """
    scaler: Any = getattr(optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return False
    scaler.raise_error_at_min_scale = False
    # With hysteresis the first overflows only count down to the one that lowers the scale.
    lowers = scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1
    return bool(lowers and scaler.cur_scale == scaler.min_scale)


@contextlib.contextmanager
def kept_back(owner: object, name: str, errors: list[Exception]) -> Iterator[None]:
    """In the block, the method `name` puts failed writes into `errors` and raises none."""
    method = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> None:  # noqa: ANN401
        try:
            method(*arguments, **keywords)
        except (OSError, RuntimeError) as error:
            errors.append(error)

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


def zero_padding(parameters: Sequence[Any]) -> None:
    """Clear what ZeRO 3 adds to a parameter that the ranks do not divide.

    It is memory as it was found, NaN at times, and goes into every checkpoint. Its gradient is
    zero, so that once cleared it stays so.
    """
    import torch
    from deepspeed.utils import safe_get_local_fp32_param

    for parameter in parameters:
        if not hasattr(parameter, "ds_tensor"):
            return  # not ZeRO 3
        part = parameter.ds_tensor  # this rank's, of equal size on all ranks
        real = parameter.ds_numel - torch.distributed.get_rank() * part.numel()
        padding = slice(min(max(real, 0), part.numel()), None)
        part.data[padding] = 0
        safe_get_local_fp32_param(parameter).data[padding] = 0

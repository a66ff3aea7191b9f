"""Workarounds for DeepSpeed 0.19.8 behaviour, called by the engine.

They use private parts of DeepSpeed and torch; tests fail when those move.
"""

import contextlib
import glob
import importlib
import inspect
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def select_cpu_without_gpu() -> None:
    """Name the CPU as accelerator on a machine without GPUs, before deepspeed is imported.

    Otherwise DeepSpeed warns at every import that it found none (accelerator/real_accelerator.py,
    `get_accelerator`).
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def limit_collective_timeouts() -> None:
    """Make every collective fail after DEEPSPEED_TIMEOUT minutes if a rank does not join.

    DeepSpeed sets this limit (default: 10) for the process group of all ranks only (comm/comm.py,
    `init_distributed`). The groups that it creates later keep torch's default, 30 minutes for gloo.
    """
    from deepspeed import constants
    from torch.distributed import distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, constants.default_pg_timeout)


def silence_renamed_collectives() -> None:
    """Keep torch 2.13's advice to whoever calls two renamed collectives out of a run's log.

    DeepSpeed calls both by their old names (comm/torch.py), which torch before 2.13 needs.
    """
    renamed = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)


def disable_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling its CPU communication op at start-up.

    It builds the op where it finds a compiler (comm/torch.py, `build_shm_op`). The build takes a
    minute or two, and a killed build leaves a lock that every later run waits for without end. gloo
    does the same work without the op. An empty table also spares the compiler's runs that fill it.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}


def import_without_compiler() -> None:
    """Keep torch's compiler, whose import takes a second or two, out of a rank's start-up.

    DeepSpeed imports its kernels for Muon, which nothing here uses, with every optimizer
    (runtime/zero/utils.py, `is_zero_supported_optimizer`); their decorators import the compiler's
    back end. torch's optimizers import the compiler to say that it must leave them alone
    (_compile.py, `_disable_dynamo`; optim/optimizer.py, `_use_grad_for_differentiable`); no
    optimizer is compiled here.
    """
    original = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        torch.compile = original
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = getattr(torch.optim.Optimizer, name)
        setattr(torch.optim.Optimizer, name, inspect.unwrap(method))
    adam_step = inspect.unwrap(torch.optim.Adam.step)  # AdamW has the same
    torch.optim.Adam.step = torch.no_grad()(adam_step)  # type: ignore[method-assign]


def is_scale_exhausted(optimizer: object) -> bool:
    """Whether fp16's loss scale could not be lowered if the next update overflowed.

    Such an overflow would raise an exception on every rank (runtime/fp16/loss_scaler.py,
    `DynamicLossScaler.update_scale`); this call prevents that. It is needed before each update,
    because a loaded checkpoint replaces the scaler.
    """
    scaler: Any = getattr(optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return False
    scaler.raise_error_at_min_scale = False
    # With hysteresis, the first overflows only count down to the one that lowers the scale.
    lowers = scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1
    return bool(lowers and scaler.cur_scale == scaler.min_scale)


@contextlib.contextmanager
def keep_scaler(optimizer: Any) -> Iterator[None]:  # noqa: ANN401
    """Take fp16's loss scale from a checkpoint that is loaded, but its settings from the run's.

    DeepSpeed replaces the whole scaler (runtime/zero/stage_1_and_2.py, `_load_global_state`).
    """
    own = getattr(optimizer, "loss_scaler", None)
    yield
    if own is None:
        return
    loaded, optimizer.loss_scaler = optimizer.loss_scaler, own
    if own.dynamic and loaded.dynamic:
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            setattr(own, name, getattr(loaded, name))


def judge_overflow_by_norm(optimizer: Any) -> None:  # noqa: ANN401
    """Keep a ZeRO optimizer of stages 1 and 2 from searching each gradient for inf and NaN.

    Its `step` (runtime/zero/stage_1_and_2.py) also skips an update whose norm is not finite, and
    one such element makes the norm so. The search takes 13 kernels a parameter, a collective and
    a wait for the device.
    """
    optimizer.check_overflow = lambda partition_gradients: None


def accumulate_by_group(engine: Any, settings: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Add up the gradients of each group of parameters in one tensor, at stage 1 without offload.

    DeepSpeed adds, divides, reduces, splits and copies those of each parameter: nine kernels, and
    a hook (runtime/zero/stage_1_and_2.py, `reduce_gradients`). Here one kernel joins a group's
    after each backward pass and one adds them, in `grad_accum_dtype`; after the last, each rank
    gets its part of their mean over the ranks, which moves half the bytes of an all-reduce. On one
    or two ranks the bits are DeepSpeed's. The norm of all is one operation too, in fp64 as
    DeepSpeed's, which copies each gradient to fp64 first.

    Args:
        engine: DeepSpeed's, which was not told `grad_accum_dtype`.
        settings: the run's.
    """
    from deepspeed.runtime.config import DtypeEnum

    zero, world = engine.optimizer, torch.distributed.get_world_size()
    if engine.zero_optimization_stage() != 1 or zero.cpu_offload:
        return
    for hook in zero._grad_acc_hooks:
        hook.remove()
    engine.enable_backward_allreduce = False
    precision = DtypeEnum(settings.get("data_types", {}).get("grad_accum_dtype", zero.dtype)).value
    sums = [torch.zeros_like(flat, dtype=precision) for flat in zero.bit16_groups_flat]
    parts = [zero._build_compact_grad_partition_buffer(number) for number in range(len(sums))]
    for part, total in zip(parts, sums, strict=True):
        part.flat_partition = total.chunk(world)[torch.distributed.get_rank()]
        part.move_flat_partition(total.device)  # makes the parameters' views anew

    def add() -> None:
        zero.micro_step_id += 1  # `step` sets it to -1
        for parameters, total in zip(zero.bit16_groups, sums, strict=True):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            joined = zero.flatten(gradients)
            own = total[: len(joined)]  # padding follows
            own.add_(joined) if zero.micro_step_id else own.copy_(joined)
        zero.zero_grad()
        if zero.is_gradient_accumulation_boundary():
            for part, total in zip(parts, sums, strict=True) if world > 1 else ():
                part.flat_partition.copy_(_own_part_of_mean(total, zero.communication_data_type))
            zero.averaged_gradients.update(enumerate(parts))

    zero.backward_epilogue = add
    zero.scaled_global_norm = lambda: _norm_of_groups([part.flat_partition for part in parts])


def _own_part_of_mean(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return this rank's part of the mean of all ranks' tensors; in their own dtype, in place."""
    world = torch.distributed.get_world_size()
    sent = total.to(dtype).div_(world)
    own = sent.chunk(world)[torch.distributed.get_rank()]
    torch.distributed.reduce_scatter_tensor(own, sent)
    return own


def _norm_of_groups(gradients: list[Tensor]) -> Tensor:
    """Compute the norm of this rank's parts of the groups and all others', as DeepSpeed rounds."""
    norms = torch._foreach_norm(gradients, dtype=torch.float64)
    squares = torch.stack(norms).square().float()
    torch.distributed.all_reduce(squares)
    return torch.linalg.vector_norm(squares.sqrt())


@contextlib.contextmanager
def loss_scale_grows_after(optimizer: Any) -> Iterator[None]:  # noqa: ANN401
    """Let fp16's loss scale grow after the update in this context, not within it.

    A ZeRO optimizer divides the gradient by the scale once that has grown, which it was not
    multiplied with: the update has half the gradient, and at stage 3 half the norm is reported
    (runtime/zero/stage_1_and_2.py and stage3.py, `step`). Without ZeRO there is nothing to do.
    """
    if not hasattr(optimizer, "_update_scale"):
        yield
        return
    update, applied = optimizer._update_scale, []
    optimizer._update_scale = lambda overflow: update(True) if overflow else applied.append(True)
    try:
        yield
    finally:
        del optimizer._update_scale
    if applied:
        update(False)


def held_by_rank_0(parameter: Tensor) -> Tensor:
    """Return the value of a parameter of one element, on rank 0.

    At ZeRO 3 a parameter is empty between its uses, and its first element lies in rank 0's part.
    """
    part: Tensor = getattr(parameter, "ds_tensor", parameter)
    return parameter if parameter.numel() else part[:1]


@contextlib.contextmanager
def collect_write_errors(owner: object, method: str, errors: list[Exception]) -> Iterator[None]:
    """Make a method of `owner` append its write errors to `errors`, inside the block.

    A rank that raises in `save_checkpoint` (runtime/engine.py) would leave the others waiting in
    its collectives.
    """
    original = getattr(owner, method)

    def call(*arguments: Any, **keywords: Any) -> None:  # noqa: ANN401
        try:
            original(*arguments, **keywords)
        except (OSError, RuntimeError) as error:
            errors.append(error)

    setattr(owner, method, call)
    try:
        yield
    finally:
        delattr(owner, method)


@contextlib.contextmanager
def load_without_code() -> Iterator[None]:
    """Make torch.load unpickle nothing but tensors, plain values and DeepSpeed's records.

    DeepSpeed passes `weights_only=False` wherever it loads a checkpoint
    (runtime/checkpoint_engine/torch_checkpoint_engine.py, utils/zero_to_fp32.py): whoever wrote the
    file could have any code executed, and hashes in a folder prove nothing about who wrote it.
    DeepSpeed also searches a checkpoint by `glob.glob` (runtime/engine.py, `_get_all_ckpt_names`),
    which would take a folder such as `runs/[1]` for a pattern: here only the file's name is one.

    Raises:
        ValueError: a file asks for something else; names both.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    original, search = torch.load, glob.glob

    def search_folder(pattern: str) -> list[str]:
        folder, name = os.path.split(pattern)
        return search(os.path.join(glob.escape(folder), name))

    def load(file: Any, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
        try:
            return original(file, *arguments, **{**keywords, "weights_only": True})
        except pickle.UnpicklingError as error:
            refused = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"it asks for {refused[1]}" if refused else str(error).partition("\n")[0]
            raise ValueError(f"{file}: was not loaded, because it may run code: {reason}") from None

    def stage(owner: Any, name: str) -> Any:  # noqa: ANN401
        """Take the place of `getattr`, by which Python 3.11.0 to 3.11.3 write an enum's member."""
        if owner is not ZeroStageEnum:
            raise pickle.UnpicklingError("it asks for an attribute")
        return ZeroStageEnum[name]

    torch.load, glob.glob = load, search_folder  # type: ignore[assignment]
    try:
        written = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        with torch.serialization.safe_globals([*written, (stage, "builtins.getattr")]):
            yield
    finally:
        torch.load, glob.glob = original, search


def clear_padding(parameters: Sequence[Any]) -> None:
    """Set to zero what ZeRO 3 appends to a parameter whose size the ranks do not divide.

    The padding is uninitialised memory, sometimes NaN, and is written to every checkpoint
    (runtime/zero/partition_parameters.py, `_partition_param`). Its gradient is zero, so it stays
    zero once it is cleared.
    """
    from deepspeed.utils import safe_get_local_fp32_param

    for parameter in parameters:
        if not hasattr(parameter, "ds_tensor"):
            return  # not ZeRO 3
        part = parameter.ds_tensor  # the part of this rank, of equal size on all ranks
        real = parameter.ds_numel - torch.distributed.get_rank() * part.numel()
        padding = slice(min(max(real, 0), part.numel()), None)
        part.data[padding] = 0
        safe_get_local_fp32_param(parameter).data[padding] = 0


def partitions(optimizer: object) -> list[tuple[Any, list[tuple[int, ...]]]]:
    """List the tensors that a ZeRO optimizer gives to the optimizer it wraps.

    Returns:
        For each tensor, one for a group of parameters at stages 1 and 2, and for a part of a group
        at stage 3: the tensor, and the shape of each parameter in it.
    """
    zero: Any = optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        shapes = [[tuple(p.ds_shape) for p in parameters] for parameters in zero.fp16_groups]
        return list(zip(zero.fp32_partitioned_groups_flat, shapes, strict=True))
    shapes = [[tuple(p.shape) for p in parameters] for parameters in zero.bit16_groups]
    return list(zip(zero.single_partition_of_fp32_groups, shapes, strict=True))

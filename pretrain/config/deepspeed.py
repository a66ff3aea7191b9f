"""DeepSpeed configurations: a JSON file of ds_configs/, completed with numbers of the recipe.

Imports neither torch nor deepspeed, so that an invalid file is refused before a launch.
"""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from data_prep.common.files import named_errors, read_json
from data_prep.common.records import PositiveFloat, PositiveInt, check_value, decode, unknown_key
from data_prep.common.wording import changes
from pretrain.config.sections import BatchConfig
from pretrain.config.settings import flatten, named_file
from pretrain.model.backends import AUTOMATIC

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"
_OFFLOADS = ("offload_optimizer", "offload_param")
_HALF = ("bf16", "fp16")
_Dtype = Literal["fp32", "bf16", "fp16"]


@dataclasses.dataclass(frozen=True)
class _DataTypes:
    grad_accum_dtype: _Dtype


@dataclasses.dataclass(frozen=True)
class _File:
    """What DeepSpeed reads without a check of its own, and the sections that it does check."""

    train_batch_size: Any = "auto"
    train_micro_batch_size_per_gpu: Any = "auto"
    gradient_accumulation_steps: Any = "auto"
    gradient_clipping: Any = "auto"
    prescale_gradients: bool = False
    gradient_predivide_factor: PositiveFloat = 1.0
    zero_allow_untested_optimizer: bool = True
    zero_force_ds_cpu_optimizer: bool = False
    communication_data_type: _Dtype = "fp32"
    wall_clock_breakdown: bool = False
    steps_per_print: PositiveInt = 1_000_000_000
    dump_state: bool = False
    zero_optimization: dict[str, Any] = dataclasses.field(default_factory=dict)
    fp16: dict[str, Any] = dataclasses.field(default_factory=dict)
    bf16: dict[str, Any] = dataclasses.field(default_factory=dict)
    data_types: _DataTypes = _DataTypes("fp32")


_ONE_SUB_GROUP = 10**12
"""Elements of a parameter group that a rank of ZeRO 3 keeps in one piece: more than there are."""
_OF_RANKS = "the optimizer state would depend on the number of ranks, and no other could resume"
_OWN_OPTIMIZER = "DeepSpeed has it for optimizers of its own alone"
_UNUSABLE = {
    "sub_group_size": (_ONE_SUB_GROUP, _OF_RANKS),
    "round_robin_gradients": (False, _OF_RANKS),
    "parameter_alignment": (False, f"with padding between parameters {_OF_RANKS}"),
    "load_from_fp32_weights": (True, "each resume rounds the weights to the model's precision"),
    "elastic_checkpoint": (False, "DeepSpeed does not load what it saves with it"),
    "compute_grad_norm": (True, "there is no norm of the gradient to record and to clip by"),
    "cpu_offload": (False, 'an old name; use offload_optimizer: {"device": "cpu"}'),
    "cpu_offload_param": (False, 'an old name; use offload_param: {"device": "cpu"}'),
    "zenflow": (None, _OWN_OPTIMIZER),
    "offload_optimizer.ratio": (1.0, _OWN_OPTIMIZER),
    "offload_optimizer.super_offload": (False, _OWN_OPTIMIZER),
}
"""Settings of ZeRO with the one value that works here, and what another one does."""
_FIXED = {
    "zero_optimization.stage": 0,
    "bf16.enabled": False,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.enabled": False,
    "fp16.fp16_master_weights_and_grads": False,
    "data_types.grad_accum_dtype": None,
    "communication_data_type": None,
}
"""What the numbers of a run or the files of its checkpoints depend on, with DeepSpeed's default."""


def read_settings(
    name: str, batch: BatchConfig, clipping: float, world_size: int
) -> dict[str, Any]:
    """Read the DeepSpeed configuration of a run, with every "auto" replaced by the recipe's number.

    DeepSpeed does not check the top level, so this does. The sections are checked by
    `engine.deepspeed_json`, with DeepSpeed's own records.

    Args:
        name: a file of ds_configs/ without its suffix, or a path to a JSON file.
        batch: batch sizes of the recipe.
        clipping: gradient clipping of the recipe.
        world_size: number of ranks.

    Raises:
        ValueError: there is no such file, it is not a JSON object, a key or value is not accepted,
            a number contradicts the recipe, or DeepSpeed would run a combination of settings
            differently from what it says.
    """
    path, settings = _load(name)
    _check_not_misleading(path, settings)
    accumulation = batch.accumulation_steps(world_size)
    owned = {
        "train_batch_size": batch.micro_batch_size * accumulation * world_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
    }
    for key, value in owned.items():
        if settings.get(key, "auto") not in ("auto", value):
            raise ValueError(
                f"{path}: {key} is {settings[key]}, but the recipe, which owns it, has {value}; "
                'write "auto"'
            )
    settings |= owned
    if settings.get("fp16", {}).get("loss_scale_window") == "auto":
        # As in fairseq: the scale doubles after 2^14 backward passes of all ranks together.
        settings["fp16"]["loss_scale_window"] = max(1, 2**14 // world_size // accumulation)
    # DeepSpeed's timer would synchronise with the GPU before each forward pass.
    settings["timers"] = {"throughput": {"enabled": False}}
    # DeepSpeed asks for these in order to use any optimizer that it does not know, such as ours.
    settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    settings.setdefault("steps_per_print", 1_000_000_000)
    if stage_of(settings) == 3:
        settings["zero_optimization"]["sub_group_size"] = _ONE_SUB_GROUP
    return settings


def path_of(name: str) -> Path:
    """Return the file of a DeepSpeed configuration; see `read_settings`."""
    return named_file("training.deepspeed:", name, DS_CONFIGS, ".json")


def _load(name: str) -> tuple[Path, dict[str, Any]]:
    path = path_of(name)
    settings = read_json(path)
    with named_errors(path):
        decode(_File, settings)
    zero = settings.get("zero_optimization", {})
    for key in [key for key, value in zero.items() if value == "auto"]:
        del zero[key]  # DeepSpeed takes its default
    for name in _OFFLOADS:  # DeepSpeed takes null for one that is not used
        part = zero.get(name) or {}
        check_value(f"{path}: {name}", part, isinstance(part, dict), "a mapping of keys to values")
    for name in _HALF:  # DeepSpeed reads "yes" as true, and "auto" as false
        enabled = settings.get(name, {}).get("enabled", False)
        check_value(f"{path}: {name}.enabled", enabled, enabled in (True, False), "true or false")
    for name in ("stage", "reduce_bucket_size"):
        number = zero.get(name, 0)
        fits = isinstance(number, int | float) and not number % 1
        check_value(f"{path}: {name}", number, fits, "a whole number")
    return path, settings


def _check_not_misleading(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse combinations of settings that DeepSpeed runs differently from what they say."""
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    half = half_precisions(settings)
    accumulation = settings.get("data_types", {}).get("grad_accum_dtype")
    offload = any(offloads(settings, part) for part in _OFFLOADS)
    nvme = [f"{p}.device" for p in _OFFLOADS if (zero.get(p) or {}).get("device") == "nvme"]
    combinations = [
        (len(half) > 1, f"{' and '.join(half)} are both enabled; choose one"),
        (
            stage == 0 and half,
            f"{' and '.join(half)} with ZeRO stage 0 takes another code path in DeepSpeed, whose "
            "losses differ from those of stages 1 to 3; use stage 1",
        ),
        (
            stage in (1, 2) and accumulation and offload,
            f"grad_accum_dtype {accumulation} with offload at ZeRO stage {stage} keeps a "
            "non-finite gradient, so that every later update is skipped; use stage 3",
        ),
        (
            stage < 3 and offloads(settings, "offload_param"),
            f"DeepSpeed offloads no weights at ZeRO stage {stage}; use stage 3",
        ),
        (stage == 0 and offload, "DeepSpeed offloads nothing at ZeRO stage 0; use stage 2"),
        (
            nvme,
            f"{' and '.join(nvme)} nvme: a checkpoint of what lies on the disk cannot be "
            "committed; accepted: cpu",
        ),
    ]
    given = {**flatten(zero), **zero}
    for key, (accepted, reason) in _UNUSABLE.items():
        is_other = given.get(key, accepted) != accepted and (stage == 3 or key != "sub_group_size")
        combinations.append((is_other, f"{key} {given.get(key)}: {reason}; remove it"))
    for is_wrong, message in combinations:
        if is_wrong:
            raise ValueError(f"{path}: {message}")


def offloads(settings: Mapping[str, Any], part: str) -> bool:
    """Whether "offload_optimizer" or "offload_param" puts its part into host memory."""
    return (settings.get("zero_optimization", {}).get(part) or {}).get("device", "none") != "none"


def half_precisions(settings: Mapping[str, Any]) -> list[str]:
    """Return which of bf16 and fp16 the weights of the forward pass have; none of them in fp32."""
    return [name for name in _HALF if settings.get(name, {}).get("enabled", False)]


def stage_of(settings: Mapping[str, Any]) -> int:
    """Return the ZeRO stage."""
    return int(settings.get("zero_optimization", {}).get("stage", 0))


def compiles(wanted: bool | str, settings: Mapping[str, Any], on_gpu: bool) -> bool:
    """Decide whether a run compiles its layers, head and loss (`training.compile`).

    "auto" stands for yes on a GPU. On a CPU it gains 5 % and costs every start a minute.

    Args:
        wanted: True, False or "auto".
        settings: DeepSpeed's.
        on_gpu: whether the run uses GPUs.

    Raises:
        ValueError: True at ZeRO stage 3, where it has no effect.
    """
    is_possible = stage_of(settings) != 3
    if wanted not in (False, AUTOMATIC) and not is_possible:
        raise ValueError(
            "training.compile: at ZeRO stage 3 each module fetches its weights during the forward "
            "pass, so that nothing is left to compile; use stage 2, false or auto"
        )
    return is_possible and (on_gpu if wanted == AUTOMATIC else bool(wanted))


def check_same_state(
    name: str, settings: Mapping[str, Any], saved: Mapping[str, Any], step: int
) -> None:
    """Refuse to continue a checkpoint with other arithmetic, or from other files, than it has.

    A run keeps the name of its configuration, but the file of that name may have been edited.

    Args:
        name: of the configuration, in the recipe.
        settings: the result of `read_settings`.
        saved: the same according to the checkpoint.
        step: of the checkpoint.

    Raises:
        ValueError: lists each key with both values.
    """
    values, before = ({**_FIXED, **flatten(each)} for each in (settings, saved))
    found = (change for change in changes(before, values) if change[0] in _FIXED)
    if changed := "; ".join(f"{key}: {was!r}, now {now!r}" for key, was, now in found):
        raise ValueError(
            f"training.deepspeed: {name} differs from that of the checkpoint of step {step}: "
            f"{changed}"
        )


def check_known_keys(where: str, values: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse unknown keys.

    Args:
        where: the file or section, for the message.
        values: its keys and values.
        known: the keys that DeepSpeed knows there.

    Raises:
        ValueError: names the key, and the nearest known one or all.
    """
    for key in values:
        if key not in known:
            raise ValueError(f"{where}: {unknown_key(key, known)}")

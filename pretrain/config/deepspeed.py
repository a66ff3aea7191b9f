"""DeepSpeed configurations: a JSON file of ds_configs/, completed with numbers of the recipe.

Imports neither torch nor deepspeed, so that an invalid file is refused before a launch.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from data_prep.common.files import read_json
from data_prep.common.records import check_value, unknown_key
from data_prep.common.wording import changes
from pretrain.config.sections import BatchConfig
from pretrain.config.settings import flatten, named_file
from pretrain.model.backends import AUTOMATIC

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"
_SECTIONS = ("zero_optimization", "fp16", "bf16", "data_types")
_OFFLOADS = ("offload_optimizer", "offload_param")
_TOP_LEVEL_KEYS = {
    *_SECTIONS,
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "prescale_gradients", "gradient_predivide_factor"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("communication_data_type", "wall_clock_breakdown", "steps_per_print", "dump_state"),
}
_ONE_SUB_GROUP = 10**12
"""Elements of a parameter group that a rank of ZeRO 3 keeps in one piece: more than there are."""
_OF_RANKS = "the optimizer state would depend on the number of ranks, and no other could resume"
_UNUSABLE = {
    "sub_group_size": (_ONE_SUB_GROUP, _OF_RANKS),
    "round_robin_gradients": (False, _OF_RANKS),
    "parameter_alignment": (False, f"with padding between parameters {_OF_RANKS}"),
    "load_from_fp32_weights": (True, "each resume rounds the weights to the model's precision"),
    "elastic_checkpoint": (False, "DeepSpeed does not load what it saves with it"),
    "compute_grad_norm": (True, "there is no norm of the gradient to record and to clip by"),
    "cpu_offload": (False, 'an old name; use offload_optimizer: {"device": "cpu"}'),
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

    DeepSpeed ignores unknown keys at the top level, so they are refused here. Keys of the sections
    are checked by `engine.deepspeed_json`, with DeepSpeed's own records.

    Args:
        name: a file of ds_configs/ without its suffix, or a path to a JSON file.
        batch: batch sizes of the recipe.
        clipping: gradient clipping of the recipe.
        world_size: number of ranks.

    Raises:
        ValueError: there is no such file, it is not a JSON object, a key is unknown, a number
            contradicts the recipe, or DeepSpeed would run a combination of settings differently
            from what it says.
    """
    path, settings = _load(name)
    check_known_keys(str(path), settings, _TOP_LEVEL_KEYS)
    check_known_keys(f"{path}: data_types", settings.get("data_types", {}), {"grad_accum_dtype"})
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
    # DeepSpeed asks for this in order to use any optimizer that it does not know, such as ours.
    settings["zero_allow_untested_optimizer"] = True
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
    for name in _SECTIONS:
        _check_object(f"{path}: {name}", settings.get(name, {}))
    zero = settings.get("zero_optimization", {})
    for key in [key for key, value in zero.items() if value == "auto"]:
        del zero[key]  # DeepSpeed takes its default
    for name in _OFFLOADS:  # DeepSpeed takes null for one that is not used
        _check_object(f"{path}: {name}", zero.get(name) or {})
    for name in ("stage", "reduce_bucket_size"):
        number = zero.get(name, 0)
        fits = isinstance(number, int | float) and not number % 1
        check_value(f"{path}: {name}", number, fits, "a whole number")
    return path, settings


def _check_object(where: str, part: object) -> None:
    check_value(where, part, isinstance(part, dict), "an object of keys and values")


def _check_not_misleading(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse combinations of settings that DeepSpeed runs differently from what they say."""
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    half = half_precisions(settings)
    accumulation = settings.get("data_types", {}).get("grad_accum_dtype")
    offload = any(offloads(settings, part) for part in _OFFLOADS)
    nvme = [f"{p}.device" for p in _OFFLOADS if (zero.get(p) or {}).get("device") == "nvme"]
    combinations = [
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
        (stage == 0 and offload, "DeepSpeed offloads nothing at ZeRO stage 0; use stage 2"),
        (
            nvme,
            f"{' and '.join(nvme)} nvme: a checkpoint of what lies on the disk cannot be "
            "committed; accepted: cpu",
        ),
    ]
    for key, (accepted, reason) in _UNUSABLE.items():
        is_other = zero.get(key, accepted) != accepted and (stage == 3 or key != "sub_group_size")
        combinations.append((is_other, f"{key} {zero.get(key)}: {reason}; remove it"))
    for given, message in combinations:
        if given:
            raise ValueError(f"{path}: {message}")


def offloads(settings: Mapping[str, Any], part: str) -> bool:
    """Whether "offload_optimizer" or "offload_param" puts its part into host memory."""
    return (settings.get("zero_optimization", {}).get(part) or {}).get("device", "none") != "none"


def half_precisions(settings: Mapping[str, Any]) -> list[str]:
    """Return which of bf16 and fp16 the weights of the forward pass have; none of them in fp32."""
    return [name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled", False)]


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


def check_optimizer(settings: Mapping[str, Any], optimizer: str) -> None:
    """Refuse optimizers by parameter where DeepSpeed does not show them whole partitions.

    Raises:
        ValueError: with ZenFlow or SuperOffload.
    """
    zero = settings.get("zero_optimization", {})
    super_offload = (zero.get("offload_optimizer") or {}).get("super_offload")
    if optimizer != "adamw" and (zero.get("zenflow") or super_offload):
        raise ValueError(
            f"optimizer.name: {optimizer} needs whole parameters, which DeepSpeed's zenflow and "
            'super_offload do not give; offload to "cpu" without them'
        )


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

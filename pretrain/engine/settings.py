"""The settings that DeepSpeed is given: a file of ds_configs/ with the recipe's numbers filled in.

Imports neither torch nor deepspeed, so that a wrong file is found before anything is launched.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pretrain.config.run import BatchConfig

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"
_TOP_LEVEL_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "fp16",
        "bf16",
        "data_types",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "wall_clock_breakdown",
        "steps_per_print",
        "dump_state",
    }
)

_SECTIONS = ("zero_optimization", "fp16", "bf16", "data_types")


def read(name: str, batch: BatchConfig, clipping: float, world_size: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a run, every "auto" filled in from the recipe.

    DeepSpeed accepts keys that it does not know without a word, so unknown ones are refused; those
    below the top level by the engine, which can ask DeepSpeed for their names.

    Args:
        name: a file of ds_configs/ without its ending, or a path to a JSON file.
        batch: owns the batch sizes.
        clipping: owns the gradient clipping.
        world_size: how many share a batch.

    Raises:
        ValueError: no such file, no JSON object, an unknown key, a number that contradicts the
            recipe, or a combination that DeepSpeed runs but not as it says (`_refuse_traps`).
    """
    path, settings = _load(name)
    refuse_unknown(str(path), settings, _TOP_LEVEL_KEYS)
    refuse_unknown(f"{path}: data_types", settings.get("data_types", {}), {"grad_accum_dtype"})
    _refuse_traps(path, settings)
    accumulation = batch.accumulation_steps(world_size)
    _fill_in(
        path,
        settings,
        {
            "train_batch_size": batch.global_batch_size,
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clipping,
        },
    )
    if settings.get("fp16", {}).get("loss_scale_window") == "auto":
        # fairseq's: the scale doubles after as many clean backward passes, whoever runs them.
        settings["fp16"]["loss_scale_window"] = max(1, 2**14 // world_size // accumulation)
    # We measure and print ourselves; its timer would wait for the GPU before each forward pass.
    settings["timers"] = {"throughput": {"enabled": False}}
    settings.setdefault("steps_per_print", 1_000_000_000)
    return settings


def _load(name: str) -> tuple[Path, dict[str, Any]]:
    path = next((p for p in (DS_CONFIGS / f"{name}.json", Path(name)) if p.is_file()), None)
    if path is None:
        names = sorted(p.stem for p in DS_CONFIGS.glob("*.json"))
        raise ValueError(f"training.deepspeed: {name!r} is no file, nor one of {', '.join(names)}")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error
    parts = {str(path): settings}
    if isinstance(settings, dict):
        parts |= {f"{path}: {name}": settings[name] for name in _SECTIONS if name in settings}
    for where, part in parts.items():
        if not isinstance(part, dict):
            raise ValueError(f"{where}: is {part!r}, not an object of keys and values")
    return path, settings


def _fill_in(path: Path, settings: dict[str, Any], owned: Mapping[str, float]) -> None:
    for key, value in owned.items():
        said = settings.get(key, "auto")
        if said not in ("auto", value):
            raise ValueError(
                f'{path}: {key} is {said}, the recipe\'s is {value}; write "auto", the recipe '
                "owns it"
            )
        settings[key] = value


def _refuse_traps(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed runs, but not as it reads."""
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    half = [name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled", False)]
    accumulation = settings.get("data_types", {}).get("grad_accum_dtype")
    offload = "offload_optimizer" in zero or "offload_param" in zero
    traps = (
        (
            stage == 0 and half,
            f"{' and '.join(half)} with ZeRO stage 0 takes another code path in DeepSpeed, with "
            "other losses than stages 1 to 3; use stage 1",
        ),
        (
            stage in (1, 2) and accumulation and offload,
            f"grad_accum_dtype {accumulation} with offload at ZeRO stage {stage} keeps a gradient "
            "that was not finite, so that every later update is left out; use stage 3",
        ),
        (stage == 0 and offload, "DeepSpeed offloads nothing at ZeRO stage 0; use stage 2"),
        (
            zero.get("round_robin_gradients", False),
            "round_robin_gradients orders the optimiser's state by the number of ranks, so that "
            "no other number could resume; leave it out",
        ),
    )
    for found, message in traps:
        if found:
            raise ValueError(f"{path}: {message}")


def refuse_compiling(settings: Mapping[str, Any]) -> None:
    """Refuse torch.compile where it cannot help.

    Raises:
        ValueError: at ZeRO stage 3.
    """
    if settings.get("zero_optimization", {}).get("stage", 0) == 3:
        raise ValueError(
            "training.compile: at ZeRO stage 3 each layer fetches its weights in between, so that "
            "nothing is left to compile; use stage 2"
        )


def refuse_unknown(where: str, values: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keys that are not known.

    Args:
        where: the file, or the section in it.
        values: the section.
        known: its keys.

    Raises:
        ValueError: the key, with the nearest known one.
    """
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{where}: unknown DeepSpeed key {key}{hint}")

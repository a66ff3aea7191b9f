"""The settings that DeepSpeed is given: a file of ds_configs/ with the recipe's numbers filled in.

Imports neither torch nor deepspeed, so that a wrong file is found before anything is launched.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pretrain.config import BatchConfig

DS_CONFIGS = Path(__file__).parent.parent / "ds_configs"
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
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "wall_clock_breakdown",
        "steps_per_print",
        "dump_state",
    }
)


def read(name: str, batch: BatchConfig, clipping: float, ranks: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a run, every "auto" filled in from the recipe.

    DeepSpeed accepts keys that it does not know without a word, so unknown ones are refused; those
    below the top level by the engine, which can ask DeepSpeed for their names.

    Args:
        name: a file of ds_configs/ without its ending, or a path to a JSON file.
        batch: owns the batch sizes.
        clipping: owns the gradient clipping.
        ranks: how many share a batch.

    Raises:
        ValueError: no such file, no JSON, an unknown key, a number that contradicts the recipe, or
            bf16 without ZeRO (DeepSpeed then computes something else than at every other stage).
    """
    path = next((p for p in (DS_CONFIGS / f"{name}.json", Path(name)) if p.is_file()), None)
    if path is None:
        names = sorted(p.stem for p in DS_CONFIGS.glob("*.json"))
        raise ValueError(f"training.deepspeed: {name!r} is no file, nor one of {', '.join(names)}")
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error
    owned = {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation_steps(ranks),
        "gradient_clipping": clipping,
    }
    for key, value in owned.items():
        said = settings.get(key, "auto")
        if said not in ("auto", value):
            raise ValueError(
                f'{path}: {key} is {said}, the recipe\'s is {value}; write "auto", the recipe '
                "owns it"
            )
        settings[key] = value
    refuse_unknown(str(path), settings, _TOP_LEVEL_KEYS)
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if stage == 0 and settings.get("bf16", {}).get("enabled", False):
        raise ValueError(
            f"{path}: bf16 with ZeRO stage 0 takes another code path in DeepSpeed, with other "
            "losses than stages 1 to 3; use stage 1"
        )
    settings.setdefault("steps_per_print", 1_000_000_000)  # we print ourselves
    return settings


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

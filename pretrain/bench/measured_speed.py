"""The share of a GPU's peak that a suite of benchmarks reached, for `plan`. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.bench import plan
from pretrain.bench.contenders import OURS, PLAIN
from pretrain.config.run import RunConfig
from pretrain.model import presets


def utilization(suite: Path, kind: str, config: RunConfig) -> tuple[float, str]:
    """The share of the data sheet's peak that a suite reached, and in which case.

    Of the recipe's size, through DeepSpeed where that was measured, its variant where that was, at
    the length nearest to the recipe's.

    Args:
        suite: what `bench --suite --json` wrote.
        kind: a key of plan.DEVICES.
        config: the recipe.

    Raises:
        ValueError: no such file, not what the suite writes, another GPU, or no figure for the
            recipe's size.
    """
    accepted = "accepted: what `bench --suite --json` wrote on such a GPU"
    try:
        figures = json.loads(suite.read_bytes())
        device, cases = figures["device"], figures["cases"]
        ours = [
            case
            for case in cases
            if case["tokens_per_second"]
            and case["layout"] == "full"
            and case["contender"] in (OURS, PLAIN)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--suite {suite}: {error or type(error).__name__}; {accepted}") from error
    if kind not in device.lower():
        raise ValueError(f"--suite {suite}: measured on {device!r}, not on {kind}; {accepted}")
    size, length = config.model.size, config.data.sequence_length
    if not any(case["size"] == size for case in ours):
        sizes = ", ".join(sorted({case["size"] for case in ours})) or "none"
        raise ValueError(f"--suite {suite}: no figure for model.size {size} (there are: {sizes})")

    def distance(case: Mapping[str, Any]) -> tuple[bool, bool, float]:
        return (
            case["contender"] != OURS,
            case["variant"] != config.model.variant,
            abs(math.log2(case["length"] / length)),
        )

    best = min((case for case in ours if case["size"] == size), key=distance)
    model = presets.build(size, best["variant"], best["vocab_size"], {})
    flops = plan.flops_per_token(model, best["length"], 0.15) * best["tokens_per_second"]
    words = f"{best['contender']}, {best['variant']}, {best['rows']} x {best['length']}"
    return flops / plan.DEVICES[kind].flops, f"measured: {words}, {device}"

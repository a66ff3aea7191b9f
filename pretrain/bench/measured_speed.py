"""The share of a GPU's peak that a benchmark reached, for `plan`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.bench import devices, needs
from pretrain.bench.contenders import OURS, PLAIN
from pretrain.config.run import RunConfig
from pretrain.model import presets


def utilization(bench: Path, kind: str, config: RunConfig) -> tuple[float, str]:
    """Return the share of the data sheet's peak that was reached, and a description of the case.

    Of the cases of the recipe's size, those through DeepSpeed are preferred, then those of the
    recipe's variant, then the length nearest to the recipe's.

    Args:
        bench: a file that `bench --json` wrote.
        kind: a key of devices.DEVICES.
        config: the recipe.

    Raises:
        ValueError: the file is missing, is not a benchmark, comes from another GPU, or has no
            figure for the recipe's size.
    """
    accepted = "accepted: what `bench --json` wrote on such a GPU"
    try:
        figures = json.loads(bench.read_bytes())
        device = figures["device"]
        ours = [
            case
            for case in figures["cases"]
            if case["tokens_per_second"]
            and case["layout"] == "full"
            and case["contender"] in (OURS, PLAIN)
        ]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"--bench {bench}: {error or type(error).__name__}; {accepted}") from error
    if not all(word in device.lower() for word in kind.split("-")):
        raise ValueError(f"--bench {bench}: measured on {device!r}, not on {kind}; {accepted}")
    size, length = config.model.size, config.data.sequence_length
    sizes = sorted({case["size"] for case in ours})
    if size not in sizes:
        raise ValueError(
            f"--bench {bench}: no figure for model.size {size} "
            f"(it has: {', '.join(sizes) or 'none'})"
        )

    def distance(case: Mapping[str, Any]) -> tuple[bool, bool, float]:
        return (
            case["contender"] != OURS,
            case["variant"] != config.model.variant,
            abs(math.log2(case["length"] / length)),
        )

    best = min((case for case in ours if case["size"] == size), key=distance)
    model = presets.build(size, best["variant"], best["vocab_size"], {})
    flops = needs.flops_per_token(model, best["length"], 0.15) * best["tokens_per_second"]
    case = f"{best['contender']}, {best['variant']}, {best['rows']} x {best['length']}"
    return flops / devices.DEVICES[kind].flops, f"measured: {case}, {device}"

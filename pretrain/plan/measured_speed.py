"""What `bench` measured of a recipe, and what `plan` takes from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from data_prep.common.records import PositiveFloat, decode
from pretrain.checks import devices
from pretrain.config.run import RunConfig

_UNCERTAINTY = 0.1
"""Relative, of what is expected of a recipe after a measurement of its size of model."""


@dataclasses.dataclass(frozen=True)
class Correction:
    """What the expected time of a run is multiplied by."""

    factor: float
    uncertainty: float
    """Relative, of the speed that results."""
    source: str
    """What was measured, for people."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """What `bench --json` writes."""

    device: str
    """Name of the GPU, or "CPU"."""
    torch: str
    """Its version."""
    world_size: int
    size: str
    """The recipe's `model.size`."""
    variant: str
    """The recipe's `model.variant`."""
    backend: str
    """Of attention."""
    length: int
    """Tokens per row."""
    micro_batch_size: int
    global_batch_size: int
    seconds: PositiveFloat
    """Median time of an update."""
    tokens_per_second: float
    """Of all devices."""
    flops: float
    """FLOP/s of one device that the model needs at this speed (needs.flops_per_token)."""
    matmul_flops: float
    """FLOP/s of a large matrix product on one device, measured in the same process."""
    peak_bytes: int
    """Peak memory in training: of a GPU, or of a process on the CPU."""
    start_seconds: float
    """Time to build and compile the model, with the first updates."""
    expected_seconds: PositiveFloat | None
    """Time of an update by the roofline of `plan`; None on devices that it does not know."""
    parts: dict[str, float]
    """Seconds by part of an update; each is measured alone, forward and backward."""

    @property
    def case(self) -> str:
        """What was measured, in a few words."""
        shape = f"{self.micro_batch_size} x {self.length}"
        return f"{self.size} {self.variant}, {shape}, {self.world_size} x {self.device}"


def table(speed: Speed) -> str:
    """Format what was measured as text."""
    kind = devices.kind_of(speed.device)
    shares = [(speed.matmul_flops, "of a matrix product's FLOP/s (measured)")]
    if kind:
        shares.append((devices.DEVICES[kind].flops, f"MFU (of the data sheet of {kind})"))
    expected = []
    if speed.expected_seconds:
        ratio = speed.seconds / speed.expected_seconds
        expected = [f"{ratio:.2f} of the time that `plan` expects on {kind}"]
    lines = [
        f"{speed.case}, torch {speed.torch}, attention {speed.backend}",
        f"{speed.tokens_per_second:,.0f} tokens/s; {1e3 * speed.seconds:,.1f} ms an update of "
        f"{speed.global_batch_size} x {speed.length} tokens",
        *(f"{speed.flops / peak:.1%} {name}" for peak, name in shares),
        *expected,
        f"{speed.peak_bytes / 1e9:.2f} GB peak memory; {speed.start_seconds:.1f} s to the "
        "end of the second update",
        "parts of an update, each measured by itself and not compiled:",
        *(f"{part:>12} {1e3 * seconds:>10,.1f} ms" for part, seconds in speed.parts.items()),
    ]
    return "\n".join(lines) + "\n"


def correction(bench: Path, kind: str, config: RunConfig) -> Correction:
    """Return by how much a measurement differs from what was expected of its recipe.

    Args:
        bench: a file that `bench --json` wrote.
        kind: a key of devices.DEVICES.
        config: the recipe.

    Raises:
        ValueError: the file is missing, is not a benchmark, comes from another GPU, or from another
            size of model.
    """
    remedy = f"measure with `bench --json` and this recipe on {kind}"
    try:
        speed = decode(Speed, json.loads(bench.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--bench {bench}: {error}; {remedy}") from error
    is_such = all(word in speed.device.lower() for word in kind.split("-"))
    if not is_such or not speed.expected_seconds:
        raise ValueError(f"--bench {bench}: measured on {speed.device!r}; {remedy}")
    if speed.size != config.model.size:
        raise ValueError(
            f"--bench {bench}: measured model.size {speed.size}, the recipe has "
            f"{config.model.size}; {remedy}"
        )
    factor = speed.seconds / speed.expected_seconds
    return Correction(factor, _UNCERTAINTY, f"measured: {speed.case}")

"""GPUs by their data sheets."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU according to its data sheet."""

    flops: float
    """Peak dense bf16 FLOP/s."""
    memory: float
    """Bytes."""


DEVICES = {
    "a100-40gb": Device(312e12, 40e9),
    "a100": Device(312e12, 80e9),
    "h100": Device(989e12, 80e9),
    "h200": Device(989e12, 141e9),
}
"""NVIDIA's SXM cards. Where a name fits several, the first counts (see `kind_of`)."""

HEADROOM = 0.9
"""Share of a GPU's memory that a plan may fill: CUDA itself, kernel workspaces and the allocator's
fragments take some, which `plan.Memory` does not count."""


def kind_of(name: str) -> str | None:
    """Return the key of DEVICES for a GPU's name, such as "NVIDIA A100-SXM4-40GB".

    None for other GPUs, and for the PCIe and NVL cards of Hopper, which have lower rates.
    """
    words = name.lower()
    if "a100" not in words and ("pcie" in words or "nvl" in words):
        return None
    return next((kind for kind in DEVICES if all(w in words for w in kind.split("-"))), None)

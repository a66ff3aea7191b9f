"""How much memory a rank has used at most, asked without waiting for the GPU."""

from __future__ import annotations

import resource

import torch


def most_bytes(device: torch.device) -> int:
    """Most memory so far: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts KiB

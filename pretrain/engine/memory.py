"""How much memory a rank uses, asked without waiting for the GPU."""

from __future__ import annotations

import psutil
import torch


def used_bytes(device: torch.device) -> int:
    """Most memory that tensors have had on a GPU so far; on a CPU, what the process has now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)

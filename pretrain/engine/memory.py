"""How much memory a rank has used at most, asked without waiting for the GPU."""

from __future__ import annotations

from pathlib import Path

import torch


def most_bytes(device: torch.device) -> int:
    """Most memory so far: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage: its peak starts at the memory of the parent process.
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

"""FlexAttention's kernels, forward and backward, compiled for a GPU.

    python -m tests.gpu.rehearsal.attention_kernels a100|h100 CASE ...

Takes cases (tests/gpu/attention.py) in JSON, and prints a line of JSON for each.
"""

import dataclasses
import sys

from tests.gpu.rehearsal import device  # first: before torch

properties = device.pretend(sys.argv[1])

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from pretrain.model import flex  # noqa: E402
from tests.gpu.attention import Case, gradients, ids_of, score_bias  # noqa: E402
from tests.gpu.rehearsal import kernels  # noqa: E402
from tests.gpu.rehearsal.recorder import Recorder  # noqa: E402

BATCH, HEADS, LENGTH = 4, 12, 2048
MODE = FakeTensorMode(allow_non_fake_inputs=True)


def compiled(name: str) -> dict[str, object]:
    case = Case.from_json(name)
    kernels.KERNELS.clear()
    torch.compiler.reset()
    flex._kernel.cache_clear()
    with MODE, Recorder(), torch.device("cuda"):
        shape = BATCH, LENGTH, HEADS, case.head_size
        weights, *parts = torch.empty(4, *shape, dtype=torch.bfloat16)
        ids = ids_of(case.mask, BATCH, LENGTH)
        module = score_bias(case, HEADS, "cuda")
        gradients(case, "flex", module, torch.stack(parts, dim=2), ids, weights)
    found = {
        "backward" if "backward" in name else "forward": dataclasses.asdict(kernel)
        for name, kernel in kernels.KERNELS.items()
        if "_tem_" in name
    }
    return {"kernels": found}


if __name__ == "__main__":
    kernels.compile_for(properties)
    device.tell(compiled, sys.argv[2:])

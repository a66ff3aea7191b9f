"""FlexAttention's kernels, forward and backward, compiled for a GPU.

    python -m tests.gpu.rehearsal.attention_kernels a100|h100

Prints a line of JSON for each case of test_rehearsal.py.
"""

import sys

from tests.gpu.rehearsal import device  # first: before torch

properties = device.pretend(sys.argv[1])

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from pretrain.model import flex  # noqa: E402
from tests.gpu.attention import Case, gradients, ids_of, score_bias  # noqa: E402
from tests.gpu.rehearsal import kernels  # noqa: E402
from tests.gpu.rehearsal.recorder import Recorder  # noqa: E402
from tests.gpu.rehearsal.test_rehearsal import COMPILED  # noqa: E402

BATCH, HEADS, LENGTH = 4, 12, 2048
MODE = FakeTensorMode(allow_non_fake_inputs=True)


def compiled(case: Case) -> dict[str, object]:
    kernels.KERNELS.clear()
    torch.compiler.reset()
    flex._kernel.cache_clear()
    with MODE, Recorder(), torch.device("cuda"):
        shape = BATCH, LENGTH, HEADS, case.head_size
        weights, *parts = torch.empty(4, *shape, dtype=torch.bfloat16)
        ids = ids_of(case.mask, BATCH, LENGTH)
        module = score_bias(case, HEADS, "cuda")
        gradients(case, "flex", module, torch.stack(parts, dim=2), ids, weights)
    return {
        "backward" if "backward" in name else "forward": kernel
        for name, kernel in kernels.KERNELS.items()
        if "_tem_" in name
    }


if __name__ == "__main__":
    kernels.compile_for(properties)
    device.tell(compiled, COMPILED[sys.argv[1]])

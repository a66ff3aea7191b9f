"""What FlexAttention's kernels for a GPU compute, by Triton's interpreter, against fp64.

    python -m tests.gpu.rehearsal.attention_values a100|h100

Prints a line of JSON for each case of test_rehearsal.py: relative errors of norms.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from tests.gpu.rehearsal import device  # noqa: E402 - before torch

properties = device.pretend(sys.argv[1])

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from pretrain.model import flex  # noqa: E402
from tests.gpu.attention import Case, gradients, ids_of, score_bias  # noqa: E402
from tests.gpu.rehearsal import kernels, shadow  # noqa: E402
from tests.gpu.rehearsal.test_rehearsal import INTERPRETED  # noqa: E402

BATCH, HEADS, LENGTH = 1, 2, 256
MODE = FakeTensorMode(allow_non_fake_inputs=True)


def errors(run: tuple[str, Case]) -> dict[str, object]:
    torch.compiler.reset()
    flex._kernel.cache_clear()
    name, case = run
    shape = BATCH, LENGTH, 4, HEADS, case.head_size
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    qkv, weights = values.to(getattr(torch, name)).split([3, 1], dim=2)
    weights, ids = weights[:, :, 0], ids_of(case.mask, BATCH, LENGTH)
    module = score_bias(case, HEADS, "cpu")
    expected = gradients(case, "dense", module, qkv.double(), ids, weights.double())
    with MODE, shadow.Shadow():
        ids = None if ids is None else ids.to("cuda")
        module = score_bias(case, HEADS, "cuda")
        found = gradients(case, "flex", module, qkv.to("cuda"), ids, weights.to("cuda"))
    names = ["output", "d qkv", *(["d bias"] if case.is_trained else [])]
    pairs = zip(names, map(shadow.value, found), expected, strict=True)
    return {name: float((ours.double() - of).norm() / of.norm()) for name, ours, of in pairs}


if __name__ == "__main__":
    kernels.compile_for(properties)
    shadow.follow_compiled()
    device.tell(errors, INTERPRETED)

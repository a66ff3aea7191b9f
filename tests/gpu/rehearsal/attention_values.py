"""What FlexAttention's kernels for a GPU compute, by Triton's interpreter, against fp64.

    python -m tests.gpu.rehearsal.attention_values a100|h100 float32|bfloat16:CASE ...

Takes cases in JSON, and prints a line of JSON for each: relative errors of norms.
"""

import functools
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

BATCH, HEADS, LENGTH = 1, 2, 256
MODE = FakeTensorMode(allow_non_fake_inputs=True)


def drawn(case, dtype):
    generator = torch.Generator().manual_seed(1)
    shape = BATCH, LENGTH, 3, HEADS, case.head_size
    qkv = torch.randn(shape, generator=generator).to(dtype)
    weights = torch.randn(shape, generator=generator)[:, :, 0].to(dtype)
    return qkv, ids_of(case.mask, BATCH, LENGTH), weights


def exact(case, dtype):
    """Output and gradients by the dense formula in fp64."""
    qkv, ids, weights = drawn(case, dtype)
    module = score_bias(case, HEADS, "cpu")
    return gradients(case, "dense", module, qkv.double(), ids, weights.double())


def errors(expected, name: str) -> dict[str, object]:
    torch.compiler.reset()
    flex._kernel.cache_clear()
    dtype, case = parsed(name)
    qkv, ids, weights = drawn(case, dtype)
    with MODE, shadow.Shadow():
        ids = None if ids is None else ids.to("cuda")
        module = score_bias(case, HEADS, "cuda")
        found = gradients(case, "flex", module, qkv.to("cuda"), ids, weights.to("cuda"))
    names = ["output", "d qkv", *(["d bias"] if case.is_trained else [])]
    pairs = zip(names, map(shadow.value, found), expected[name], strict=True)
    return {
        "errors": {
            name: float((ours.double() - of.double()).norm() / of.norm())
            for name, ours, of in pairs
        }
    }


def parsed(name: str):
    dtype, _, case = name.partition(":")
    return getattr(torch, dtype), Case.from_json(case)


if __name__ == "__main__":
    names = sys.argv[2:]
    expected = {name: exact(*reversed(parsed(name))) for name in names}
    kernels.compile_for(properties)
    shadow.follow_compiled()
    device.tell(functools.partial(errors, expected), names)

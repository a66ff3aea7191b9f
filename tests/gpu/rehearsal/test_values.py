"""FlexAttention's kernels for a GPU, run by Triton's interpreter, against the dense formula."""

import pytest

from tests.gpu.attention import Case

pytestmark = pytest.mark.slow
LARGEST = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative error of the norm of the output, and of each gradient."""
RUNS = [
    ("float32", Case("alibi", "padding", head_size=32)),
    ("float32", Case("none", window=128)),
    ("bfloat16", Case("alibi", slopes="trained")),
    ("bfloat16", Case("t5-bias")),
]
"""By dtype, made for an A100. The interpreter takes 10 s for each."""


@pytest.fixture(scope="module")
def errors(rehearse, table):
    """By run and case, of the output and of each gradient."""
    names = {f"{dtype}:{case.to_json()}": (dtype, case) for dtype, case in RUNS}
    (lines,) = rehearse(["attention_values", "a100", *names])
    found = {names[line["name"]]: line for line in lines}
    table(
        "FlexAttention interpreted, rows of 256: relative errors",
        (
            f"{dtype:8}  {case!s:42} "
            + ", ".join(f"{name} {error:.1e}" for name, error in line.get("errors", {}).items())
            + f"  {line['seconds']:4.1f} s"
            for (dtype, case), line in found.items()
        ),
    )
    return found


@pytest.mark.parametrize(("dtype", "case"), RUNS, ids=str)
def test_kernels_compute_the_dense_formula(dtype, case, errors):
    line = errors[dtype, case]
    assert "error" not in line, line["error"]
    assert len(line["errors"]) == 2 + case.is_trained
    assert all(error < LARGEST[dtype] for error in line["errors"].values()), line["errors"]

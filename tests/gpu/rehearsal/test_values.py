"""FlexAttention's kernels for a GPU, run by Triton's interpreter, against the dense formula."""

import pytest

from tests.gpu.attention import CASES, Case

pytestmark = pytest.mark.slow
LARGEST = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative error of the norm of the output, and of each gradient."""
RUNS = {
    ("a100", "float32"): [Case("alibi", "padding", head_size=32), Case("none", window=128)],
    ("h100", "bfloat16"): [Case("alibi", slopes="trained"), Case("t5-bias")],
}
"""By the GPU that kernels are made for and dtype. The interpreter takes 10 s for each."""


@pytest.fixture(scope="module")
def errors(rehearse, table):
    """By run and case, of the output and of each gradient."""
    commands = [["attention_values", *run, *map(CASES.index, cases)] for run, cases in RUNS.items()]
    found = {}
    for run, lines in zip(RUNS, rehearse(*commands), strict=True):
        found |= {(*run, CASES[int(line["name"])]): line for line in lines}
    table(
        "FlexAttention interpreted, rows of 256: relative errors",
        (
            f"{kind}  {dtype:8}  {case!s:42} "
            + ", ".join(f"{name} {error:.1e}" for name, error in line.get("errors", {}).items())
            + f"  {line['seconds']:4.1f} s"
            for (kind, dtype, case), line in found.items()
        ),
    )
    return found


@pytest.mark.parametrize(
    ("kind", "dtype", "case"),
    [(*run, case) for run, cases in RUNS.items() for case in cases],
    ids=str,
)
def test_kernels_compute_the_dense_formula(kind, dtype, case, errors):
    line = errors[kind, dtype, case]
    assert "error" not in line, line["error"]
    assert len(line["errors"]) == 2 + case.is_trained
    assert all(error < LARGEST[dtype] for error in line["errors"].values()), line["errors"]

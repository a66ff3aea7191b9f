"""FlexAttention's kernels, compiled to machine code for A100 and H100 on a machine without one."""

import pytest

from pretrain.model.backends import choose_backend
from tests.gpu.attention import SPILLS, Case
from tests.gpu.rehearsal.kinds import KINDS

pytestmark = pytest.mark.slow
RUNS = {
    "a100": [
        Case("alibi", head_size=128),
        Case("alibi", slopes="trained"),
        Case("none", window=128),
    ],
    "h100": [
        Case("alibi", head_size=128),
        Case("alibi", alibi="symmetric", mask="none", causal=True),
        Case("t5-bias"),
    ],
}
"""On each GPU large heads, for which flex.py has options, a bias of weights, and one more rule: a
case takes nine seconds the first time. The H100's kernel of the recipes is one of test_step.py."""


@pytest.fixture(scope="module")
def kernels(rehearse, table):
    """By GPU and case: the forward and the backward kernel."""
    found = {}
    commands = [["attention_kernels", kind, *map(Case.to_json, of)] for kind, of in RUNS.items()]
    for kind, lines in zip(RUNS, rehearse(*commands), strict=True):
        found |= {(kind, Case.from_json(line["name"])): line for line in lines}
    rows = (
        f"{kind}  {case!s:42} {way:8}  {of['registers']:3} registers, {of['spills']:4} B spilled, "
        f"{of['shared'] / 1024:5.1f} KB shared, {of['warps']} warps, {of['atomics']:2} atomic adds"
        f"  {line['seconds']:4.1f} s"
        for (kind, case), line in found.items()
        for way, of in line.get("kernels", {}).items()
    )
    table("FlexAttention in bf16, rows of 2048", rows)
    return found


@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, case) for kind, cases in RUNS.items() for case in cases],
    ids=str,
)
def test_kernels_fit_the_gpu(kind, case, kernels):
    line = kernels[kind, case]
    assert "error" not in line, line["error"]
    assert sorted(line["kernels"]) == ["backward", "forward"]
    is_taken = choose_backend(case.config(heads=12), "auto", on_gpu=True) == "flex"
    for way, of in line["kernels"].items():
        assert of["spills"] < SPILLS, way
        assert of["shared"] <= 1024 * KINDS[kind]["shared_kb"], way
        # They wait for each other: no run has them unless it asks for flex by name.
        assert not (of["atomics"] and is_taken), way

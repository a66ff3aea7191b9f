"""A compiled micro-batch of a base model, forward and backward, for A100 and H100."""

import pytest

from tests.gpu.attention import SPILLS
from tests.gpu.rehearsal.kinds import KINDS

pytestmark = pytest.mark.slow
RECIPE = "pile-base-fast", "model.variant=zero-clap"
LAUNCHES = 600
"""Of kernels, at most: about 40 a layer, and 90 before the first and after the last."""


@pytest.fixture(scope="module")
def steps(rehearse, table):
    """By GPU: a micro-batch of the recipe; and "lengths": several, of two layers."""
    commands = [["step", kind, *RECIPE, "--", "once"] for kind in KINDS]
    short = ["model.overrides.num_layers=2", "--", "lengths"]
    *lines, (lengths,) = rehearse(*commands, ["step", "h100", *RECIPE, *short])
    found = {kind: line for kind, (line,) in zip(KINDS, lines, strict=True)}
    table(
        "zero-clap, base, compiled: 16 x 2048 forward and backward",
        [
            f"{kind}  {of['compiled']} launches of compiled kernels and {of['others']} others"
            f"  {of['seconds']:4.1f} s"
            for kind, of in found.items()
            if "error" not in of
        ],
    )
    return {**found, "lengths": lengths}


@pytest.fixture(params=KINDS)
def step(request, steps):
    assert "error" not in steps[request.param], steps[request.param]["error"]
    return steps[request.param]


def test_everything_is_one_graph_for_each_part(step):
    assert step["breaks"] == {}


def test_few_kernels_are_launched_and_the_host_waits_for_none(step):
    assert 0 < step["compiled"] + step["others"] < LAUNCHES
    assert step["waits"] == {}


def test_kernels_within_layers_fit_the_gpu(step, request):
    kind = request.node.callspec.params["step"]
    assert sum("flex_attention" in name for name in step["kernels"]) >= 2
    for name, of in step["kernels"].items():
        assert of["spills"] < SPILLS, name
        assert of["shared"] <= 1024 * KINDS[kind]["shared_kb"], name


def test_each_length_is_compiled_once_for_training_and_evaluation(steps):
    """A run of several phases has several; torch gives up after so many recompilations."""
    step = steps["lengths"]
    assert "error" not in step, step["error"]
    assert step["breaks"] == {}
    first = step["graphs"][0]
    assert step["graphs"] == [first, 2 * first, *[3 * first] * 4]

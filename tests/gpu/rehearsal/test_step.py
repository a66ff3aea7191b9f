"""A compiled micro-batch of a base model with two layers, forward and backward, for an H100.

Layers are compiled once for all but the last, so more of them would show the same kernels.
"""

import pytest

from tests.gpu.attention import SPILLS
from tests.gpu.rehearsal.kinds import KINDS

pytestmark = pytest.mark.slow
RECIPE = "pile-base-fast", "model.variant=zero-clap", "model.overrides.num_layers=2"
LAUNCHES = 190
"""Of kernels, at most: about 40 a layer, and 90 before the first and after the last."""


@pytest.fixture(scope="module")
def steps(rehearse, table):
    """A micro-batch of the recipe; and several of two lengths."""
    (lines,) = rehearse(["step", "h100", *RECIPE, "--", "once", "lengths"])
    found = {line["name"]: line for line in lines}
    for line in found.values():
        assert "error" not in line, line["error"]
    once = found["once"]
    heading = "zero-clap, base, two layers, compiled for an H100: 16 x 2048 forward and backward"
    launches = f"{once['compiled']} launches of compiled kernels and {once['others']} others"
    table(heading, [f"{launches}  {once['seconds']:4.1f} s"])
    return found


@pytest.fixture
def step(steps):
    return steps["once"]


def test_everything_is_one_graph_for_each_part(step):
    assert step["breaks"] == {}


def test_few_kernels_are_launched_and_the_host_waits_for_none(step):
    assert 0 < step["compiled"] + step["others"] < LAUNCHES
    assert step["waits"] == {}


def test_kernels_within_layers_fit_the_gpu(step):
    flex = [of for name, of in step["kernels"].items() if "flex_attention" in name]
    assert len(flex) >= 2
    assert not any(of["atomics"] for of in flex)  # they wait for each other
    for name, of in step["kernels"].items():
        assert of["spills"] < SPILLS, name
        assert of["shared"] <= 1024 * KINDS["h100"]["shared_kb"], name


def test_each_length_is_compiled_once_for_training_and_evaluation(steps):
    """A run of several phases has several; torch gives up after so many recompilations."""
    step = steps["lengths"]
    assert step["breaks"] == {}
    first = step["graphs"][0]
    assert step["graphs"] == [first, *[2 * first] * 3]

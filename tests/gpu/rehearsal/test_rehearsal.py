"""What torch generates for a GPU, looked at on a machine without one."""

import pytest

from pretrain.model import presets
from pretrain.model.backends import choose_backend
from tests.gpu.attention import Case

pytestmark = pytest.mark.slow
SPILLS = 200
"""Bytes a thread that a kernel may keep in memory for want of registers."""
COMPILED = {
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
case takes nine seconds the first time. The H100's kernel of the recipes is one of `step`."""
INTERPRETED = [
    ("float32", Case("alibi", "padding", head_size=32, window=128)),
    ("bfloat16", Case("alibi", slopes="trained")),
    ("bfloat16", Case("t5-bias")),
]
"""By dtype. The interpreter takes 20 s for each."""
LARGEST = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative error of the norm of the output, and of each gradient."""
RECIPE = "pile-base-fast", "model.variant=zero-clap", "model.overrides.num_layers=2"
"""Layers are compiled once for all but the last, so more of them would show the same kernels."""
LAUNCHES = 190
"""Of kernels, at most: about 40 a layer, and 90 before the first and after the last."""


@pytest.mark.parametrize("kind", COMPILED)
def test_kernels_of_attention_fit_the_gpu(kind, rehearse):
    for case, kernels in zip(COMPILED[kind], rehearse("attention_kernels", kind), strict=True):
        assert sorted(kernels) == ["backward", "forward"]
        is_taken = choose_backend(case.config(heads=12), "auto", on_gpu=True) == "flex"
        for way, kernel in kernels.items():
            print(case, way, kernel)
            assert kernel["spills"] < SPILLS
            assert kernel["shared"] <= kernel["shared_limit"]
            # They wait for each other: no run has them unless it asks for flex by name.
            assert not (kernel["atomics"] and is_taken)


def test_interpreted_kernels_of_attention_compute_the_dense_formula(rehearse):
    lines = rehearse("attention_values", "a100")
    for (dtype, case), errors in zip(INTERPRETED, lines, strict=True):
        print(case, dtype, errors)
        assert len(errors) == 2 + case.is_trained
        assert all(error < LARGEST[dtype] for error in errors.values())


@pytest.fixture(scope="module")
def step(rehearse):
    """A micro-batch, forward and backward; and several of two lengths."""
    (found,) = rehearse("step", "h100", *RECIPE)
    return found


def test_everything_is_one_graph_for_each_part(step):
    assert [part["breaks"] for part in step.values()] == [{}, {}]


def test_few_kernels_are_launched_and_the_host_waits_for_none(step):
    once = step["once"]
    print(f"{once['compiled']} launches of compiled kernels and {once['others']} others")
    assert 0 < once["compiled"] + once["others"] < LAUNCHES
    assert once["waits"] == {}


def test_kernels_within_layers_fit_the_gpu(step):
    kernels = step["once"]["kernels"]
    flex = [kernel for name, kernel in kernels.items() if "flex_attention" in name]
    assert len(flex) >= 2
    assert not any(kernel["atomics"] for kernel in flex)  # they wait for each other
    for name, kernel in kernels.items():
        assert kernel["spills"] < SPILLS, name
        assert kernel["shared"] <= kernel["shared_limit"], name


def test_each_length_is_compiled_once_for_training_and_evaluation(step):
    """A run of several phases has several; torch gives up after so many recompilations."""
    graphs = step["lengths"]["graphs"]
    assert graphs == [graphs[0], *[2 * graphs[0]] * 3]


def test_a_graph_can_capture_the_passes_of_every_variant(rehearse):
    """A classifier's: no wait of the host, and no copy."""
    for variant, passes in zip(presets.VARIANTS, rehearse("passes", "h100"), strict=True):
        print(variant, passes)
        assert passes["launches"] > 0
        assert passes["waits"] == {}, variant

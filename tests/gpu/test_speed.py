"""Training speed on the GPU, as a share of what a large matrix product reaches on it."""

import pytest

from pretrain.bench import suite
from pretrain.bench.contenders import PLAIN, Case
from pretrain.bench.worker import Measured, matmul_peak, measure

# Alone: other work on the GPU would slow it down.
pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.filterwarnings("default")]
FLOOR = 0.3
"""Least share of the measured matmul peak. A requirement for data centre GPUs that was stated
before any measurement; raise it to what was measured."""


@pytest.mark.parametrize("variant", ["baseline", "zero-clap"])
def test_an_update_reaches_a_share_of_the_matmul_peak(variant, device):
    on_gpu = device.type == "cuda"
    size, length, rows, ids = ("base", 2048, 16, 50265) if on_gpu else ("tiny", 64, 4, 2000)
    peak = matmul_peak()
    case = Case(PLAIN, size, variant, length, rows, "full", ids)
    measured = measure(case, 2.0 if on_gpu else 0.1)
    assert isinstance(measured, Measured), measured
    share = suite.Outcome(case, measured, "").utilization(peak)
    print(f"{case.name()}: {share:.1%} of {peak / 1e12:.1f} TFLOP/s")
    assert share > (FLOOR if on_gpu else 0)

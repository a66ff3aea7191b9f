"""Training speed on the GPU, as a share of what a large matrix product reaches on it."""

import json

import pytest

from pretrain.plan.measured_speed import Speed
from tests.gpu.conftest import run

# Alone: other work on the GPU would slow it down.
pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.filterwarnings("default")]
FLOOR = 0.35
"""Least share of the measured matmul peak. Such recipes had 0.38 to 0.46 on an H100."""


@pytest.mark.parametrize("variant", ["baseline", "zero-clap"])
def test_an_update_reaches_a_share_of_the_matmul_peak(variant, device, tmp_path):
    on_gpu, path = device.type == "cuda", tmp_path / "bench.json"
    words = [f"model.variant={variant}", "model.overrides.attention_dropout=0.0"]
    words += ["batch.global_batch_size=32", "batch.micro_batch_size=16"]
    words += ["training.deepspeed=zero1_bf16"]
    if not on_gpu:
        words += ["model.size=tiny", "data.sequence_length=64"]
    print(run("pretrain", "bench", "pile-base", *words, "--seconds", "2", "--json", path))
    speed = Speed(**json.loads(path.read_text()))
    assert speed.flops / speed.matmul_flops > (FLOOR if on_gpu else 0)

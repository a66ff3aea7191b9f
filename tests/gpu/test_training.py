"""Training on the GPU: the CPU's losses, the same bits after a kill, and fp16."""

import json
import os
import signal
import time

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from pretrain.config.deepspeed import DS_CONFIGS
from pretrain.engine.consolidated import consolidated_weights
from pretrain.records import checkpoints, metrics
from tests.gpu.conftest import ON_CPU, finish, losses

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
STEPS = 50
SHORT = [f"training.steps={STEPS}", "training.checkpoint_interval=25"]
NO_DROPOUT = "model.overrides.dropout=0.0"
STAGES = ["zero0_fp32", "zero1_bf16", "zero2_bf16", "zero3_bf16"]
TOLERANCE = {"fp32": 0.01, "bf16": 0.05}
"""Largest difference of a step's loss from the CPU's in fp32, in nats. The loss falls by more than
2; bf16 on a CPU differs by less than 0.01."""


def needs_gpu(device):
    if device.type == "cpu":
        pytest.skip("a GPU's feature")


def end_after(step, folder, run, number):
    """Send a signal to a run that has saved this step, and wait for its end."""
    manifest = checkpoints.folder_of(folder, step) / checkpoints.MANIFEST
    while run.poll() is None and not manifest.is_file():
        time.sleep(0.01)
    run.send_signal(number)
    run.communicate()


@pytest.fixture(scope="module")
def cpu_losses(begin, tmp_path_factory):
    """The losses of 50 steps on the CPU, in fp32."""
    folder = tmp_path_factory.mktemp("cpu") / "run"
    finish(begin(folder, *SHORT, NO_DROPOUT, "training.deepspeed=zero1_fp32", **ON_CPU))
    return losses(folder)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((stage, []) for stage in [*STAGES, "zero1_fp32"]),
        ("zero1_fp32", ["training.attention_backend=flex"]),
        ("zero1_bf16", ["training.attention_backend=flex"]),
        ("zero1_fp32", ["training.compile=true"]),
        ("zero1_bf16", ["training.attention_backend=flex", "training.compile=true"]),
    ],
)
def test_fifty_steps_have_the_losses_of_the_cpu(
    name, settings, begin, cpu_losses, device, tmp_path
):
    if settings:
        needs_gpu(device)
    folder = tmp_path / "run"
    finish(begin(folder, *SHORT, NO_DROPOUT, f"training.deepspeed={name}", *settings))
    assert len(cpu_losses) == STEPS
    assert losses(folder) == pytest.approx(cpu_losses, abs=TOLERANCE[name[-4:]])
    assert cpu_losses[-1] < cpu_losses[0] - 2  # there is something to agree on


@pytest.mark.parametrize(
    ("name", "backend"), [*((stage, "dense") for stage in STAGES), ("zero1_bf16", "flex")]
)
def test_a_run_that_is_killed_and_relaunched_has_the_bits_of_one_that_was_not(
    name, backend, begin, device, tmp_path
):
    if backend == "flex":
        needs_gpu(device)
    settings = [f"training.deepspeed={name}", f"training.attention_backend={backend}"]
    settings += ["training.compile=auto"] if backend == "flex" else []
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    whole, part = begin(straight, *settings), begin(killed, *settings)
    end_after(10, killed, part, signal.SIGKILL)
    finish(whole)
    assert part.returncode == -signal.SIGKILL, "it ended before it could be killed"
    finish(begin(killed, *settings))
    assert losses(killed) == losses(straight)
    ours, theirs = (consolidated_weights(checkpoints.folder_of(f, 40)) for f in (killed, straight))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("compiled", ["false", "auto"])
def test_activation_checkpointing_changes_no_bit(compiled, begin, tmp_path):
    """With dropout, whose masks are drawn twice."""
    folders = tmp_path / "plain", tmp_path / "checkpointed"
    for folder in folders:
        word = f"training.activation_checkpointing={str(folder.name == 'checkpointed').lower()}"
        finish(begin(folder, word, f"training.compile={compiled}", "training.steps=10"))
    plain, checkpointed = map(losses, folders)
    assert plain == checkpointed


def test_fp16_recovers_from_an_overflow(begin, tmp_path):
    """The first loss scale is far too large: the first gradients overflow and are skipped."""
    if not get_accelerator().is_fp16_supported():
        pytest.skip("this device does not compute in fp16")
    settings = json.loads((DS_CONFIGS / "zero1_fp16.json").read_text())
    settings["fp16"]["initial_scale_power"] = 24
    file = tmp_path / "overflowing.json"
    file.write_text(json.dumps(settings))
    # So many overflows in a row would otherwise be a spike, before the scale fits.
    patience = ["spike.confirm_steps=50", "training.checkpoint_interval=20"]
    finish(begin(tmp_path / "run", f"training.deepspeed={file}", *patience))
    lines = metrics.read_metrics(tmp_path / "run" / metrics.METRICS)
    skipped = [line["step"] for line in lines if line.get("skipped")]
    assert skipped == [*range(len(skipped))]
    assert 0 < len(skipped) < 20
    assert [line["loss_scale"] for line in lines[: len(skipped) + 1]] == [
        2.0 ** (24 - count) for count in range(len(skipped) + 1)
    ]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", STAGES[1:])
def test_ranks_train_like_one_and_resume_with_the_same_bits(name, ranks, begin, device, tmp_path):
    """On a GPU each; or on one that they share, with ZEROCLAP_TEST_SHARED_GPU set.

    Of three ranks two have a micro-batch without targets. Not yet run on any GPU. On a shared one
    gloo takes the place of NCCL, of which it shows nothing.
    """
    settings = [NO_DROPOUT, f"training.deepspeed={name}", "training.steps=20"]
    settings += ["training.checkpoint_interval=5"]
    where: dict[str, object] = {"ranks": ranks}
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        if "ZEROCLAP_TEST_SHARED_GPU" not in os.environ:
            pytest.skip("there are fewer GPUs; with ZEROCLAP_TEST_SHARED_GPU=1 ranks share one")
        where |= {"module": "tests.gpu.shared_gpu", "CUDA_VISIBLE_DEVICES": "0"}
    one, several, stopped = (tmp_path / name for name in ("one", "several", "stopped"))
    finish(begin(one, *settings))
    finish(begin(several, *settings, **where))
    assert losses(several) == pytest.approx(losses(one), abs=TOLERANCE["bf16"])
    part = begin(stopped, *settings, **where)
    end_after(5, stopped, part, signal.SIGTERM)
    finish(begin(stopped, *settings, **where))
    assert losses(stopped) == losses(several)

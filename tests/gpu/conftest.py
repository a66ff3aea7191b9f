"""The device of the GPU tests, and training attempts on it as processes of their own.

`make test-gpu` sets ZEROCLAP_TEST_DEVICE=cuda. With ZEROCLAP_TEST_DEVICE=cpu the same tests run on
the CPU, which finds mistakes in the tests; what a CPU cannot do is skipped. Without the variable
all are skipped. Training takes place in processes of its own, since a process that has used CUDA
cannot fork.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretrain.model import flex
from pretrain.records import metrics
from tests.pretrain.model.conftest import unfused_kernel

ROOT = Path(__file__).parents[2]
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
WIDE_HEADS = ["hidden_size=128", "num_heads=2", "intermediate_size=256"]
"""FlexAttention on a GPU takes heads of 16 numbers or more."""
SETTINGS = [
    "training.deterministic=true",
    *(f"model.overrides.{setting}" for setting in WIDE_HEADS),
    "model.overrides.attention_dropout=0.0",
    "training.compile=false",  # takes longer than such a run
    # No loss is judged: the runs are too short for that.
    "spike.window=2000",
]


@pytest.fixture(scope="session", autouse=True)
def device():
    """The GPU, or the CPU where the variable says so."""
    name = os.environ.get("ZEROCLAP_TEST_DEVICE")
    if name not in ("cuda", "cpu"):
        pytest.skip("runs on a GPU only; `make test-gpu` runs it")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no GPU that torch can use")
    return torch.device(name)


@pytest.fixture
def fresh_kernels(device, monkeypatch):
    """Compile anew for each test: after many recompilations torch would stop compiling."""
    torch.compiler.reset()
    flex._kernel.cache_clear()
    if device.type == "cpu":
        monkeypatch.setattr(flex, "_kernel", lambda: unfused_kernel)


def start(*command, **environment):
    """Start `python -m COMMAND` in the repository."""
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    """What a process printed; fails unless its exit code is 0."""
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, f"{process.args}\n{output[-5000:]}"
    return output


def run(*command, **environment):
    return finish(start(*command, **environment))


@pytest.fixture(scope="session")
def begin(recipe):
    """`begin(folder, *overrides)`: start one attempt on one rank, deterministically."""

    def begin(folder, *overrides, ranks=1, module="pretrain.train", **environment):
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        words = [recipe.path, f"folder={folder}", *SETTINGS, *overrides]
        command = [*(launcher if ranks > 1 else []), module, *words]
        return start(*command, **environment)

    return begin


def losses(folder):
    """The loss of each step that counts, in order."""
    return [
        line["loss"] for line in metrics.surviving(metrics.read_metrics(folder / metrics.METRICS))
    ]

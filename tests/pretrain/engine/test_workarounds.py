"""Workarounds that need no engine, or a fresh process; the others are tested with the engine."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretrain.engine.consolidated import consolidated_weights

ROOT = Path(__file__).parents[3]
COMPILER = """
import sys, torch
compiled = []
torch.compile = compile = lambda function: compiled.append(function) or function
from pretrain.engine import workarounds
workarounds.import_without_compiler()
assert torch.compile is compile
muon = sys.modules["deepspeed.runtime.zero.muon.original_muon"]
assert not compiled, compiled
for _ in range(2):
    muon.zeropower_via_newtonschulz5(torch.eye(4), steps=1)
assert [function.__name__ for function in compiled] == ["zeropower_via_newtonschulz5"], compiled
"""


@pytest.mark.slow
def test_functions_of_others_are_compiled_when_they_are_first_called():
    done = subprocess.run(
        [sys.executable, "-c", COMPILER], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({"module": {"w": torch.zeros(1).expand(10**9, 200)}}, r"has w \[1000000000, 200\]"),
        ({"module": {}, "more": [{"x": (torch.zeros(1).expand(9),)}]}, r"has x \[9\]"),
        ({"module": {"w": torch.empty(10**12, device="meta")}}, "has w"),
        ({"module": dict.fromkeys("abc", torch.zeros(9))}, "108 bytes; accepted: up to 72"),
    ],
)
def test_a_small_checkpoint_does_not_ask_for_much_memory(states, message, tmp_path):
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save(states, path)
    with pytest.raises(ValueError, match=message) as caught:
        consolidated_weights(tmp_path)
    assert str(caught.value).startswith(str(path))


def test_weights_that_are_shared_names_of_one_are_refused(tmp_path):
    """At ZeRO 1 to 3 the file of the states says which weights are the same."""
    names = [f"w{n}" for n in range(9)]
    states = {"buffer_names": [], "param_shapes": [{"w": torch.Size([8])}], "module": {}}
    shared = {"shared_params": dict.fromkeys(names, "w"), "ds_version": "0"}
    torch.save({**states, **shared}, tmp_path / "mp_rank_00_model_states.pt")
    parts = {"zero_stage": 2, "partition_count": 1}
    parts["single_partition_of_fp32_groups"] = [torch.zeros(8)]
    torch.save(
        {"optimizer_state_dict": parts}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    with pytest.raises(ValueError, match="320 bytes; accepted: up to 64"):
        consolidated_weights(tmp_path)

"""Workarounds that need no engine, or a fresh process; the others are tested with the engine."""

import subprocess
import sys
from pathlib import Path

import pytest

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

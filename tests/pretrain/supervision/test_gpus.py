"""The visible GPUs of a machine, by CUDA's rules."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pretrain.supervision.gpus import visible_gpus

PRESENT = 4
ENTRIES = ["0", "1", "3", "4", "-1", "", " 2", "+1", "2gpu", "x", "GPU-a", "GPU-b", "MIG-a"]


@pytest.fixture
def four(monkeypatch):
    found = [Path(f"/dev/nvidia{number}") for number in range(PRESENT)]
    monkeypatch.setattr(Path, "glob", lambda path, pattern: list(found))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.sampled_from(ENTRIES), max_size=4).map(",".join))
@example("2,3,-1,1")
@example("1,1")
@example("0,7,1")
def test_the_variable_is_parsed_as_torch_does(four, variable):
    import torch

    before = os.environ["CUDA_VISIBLE_DEVICES"]
    os.environ["CUDA_VISIBLE_DEVICES"] = variable
    try:
        theirs = [str(entry) for entry in torch.cuda._parse_visible_devices()]
    finally:
        os.environ["CUDA_VISIBLE_DEVICES"] = before
    ours = visible_gpus({"CUDA_VISIBLE_DEVICES": variable})
    # torch counts the machine's devices elsewhere: a number beyond them ends the list.
    beyond = [n for n, entry in enumerate(theirs) if entry.isdecimal() and int(entry) >= PRESENT]
    assert ours == theirs[: beyond[0] if beyond else None]


def test_without_the_variable_all_gpus_are_visible(four):
    assert visible_gpus({}) == ["0", "1", "2", "3"]

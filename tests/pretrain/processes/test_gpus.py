"""The visible GPUs of a machine, by CUDA's rules."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pretrain.processes import gpus
from pretrain.processes.gpus import visible_gpus

PRESENT = 4
ENTRIES = ["0", "1", "3", "4", "-1", "", " 2", "+1", "2gpu", "x", "GPU-a", "GPU-b", "MIG-a"]


@pytest.fixture
def four(monkeypatch):
    found = [Path(f"/dev/nvidia{number}") for number in range(PRESENT)]
    monkeypatch.setattr(Path, "glob", lambda path, pattern: list(found))


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, derandomize=True
)
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


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ([], {}, []),  # nvidia-smi is not asked
        (["nvidia0", "nvidiactl"], {}, ["0"]),
        (["nvidia0"], {"DS_ACCELERATOR": "cpu"}, []),
        (["dxg"], {}, ["0", "1", "2"]),  # WSL2
        (["dxg"], {"CUDA_VISIBLE_DEVICES": "1"}, ["1"]),
        (["dxg"], {"DS_ACCELERATOR": "cpu"}, []),
    ],
)
def test_gpus_are_counted_by_their_files_and_where_they_have_none_by_nvidia_smi(
    files, environ, expected, tmp_path, monkeypatch
):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "_installed", lambda: [None] * 3)
    assert visible_gpus(environ) == expected


def test_without_the_variable_all_gpus_are_visible(four):
    assert visible_gpus({}) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("device", "accelerator", "shown"),
    [(None, "cpu", "1,3"), ("cpu", "cpu", ""), ("cuda", "cuda", "1,3"), ("cuda:1", "cuda", "3")],
)
def test_a_process_sees_the_devices_that_are_named(four, device, accelerator, shown):
    """Also where the environment names the CPU."""
    environ = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "1,3"}
    gpus.select(device, environ)
    assert environ == {"DS_ACCELERATOR": accelerator, "CUDA_VISIBLE_DEVICES": shown}
    with pytest.raises(ValueError, match="--device cuda:2: this machine has cpu, cuda:0, cuda:1"):
        gpus.select("cuda:2", environ | {"CUDA_VISIBLE_DEVICES": "1,3"})

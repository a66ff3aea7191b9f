"""What a machine can hold, before a launch."""

import shutil
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from pretrain.checks import capacity
from pretrain.config.load import load
from pretrain.config.run import RunConfig
from pretrain.config.sections import TrainingConfig
from pretrain.processes import gpus
from pretrain.records import ledger
from pretrain.spikes.policy import max_checkpoints_kept

GB = 10**9
NVIDIA_SMI = """\
0, GPU-1b, 9.0, 143771, 143128, Default, Disabled
1, GPU-2c, 9.0, 143771, 20, Exclusive_Process, [N/A]
2, GPU-2d, 9.0, 81559, 81559, Default, Enabled
"""
"""What nvidia-smi prints for `gpus._FIELDS`, in the form of its manual; not from a real machine."""
Disk = namedtuple("Disk", "free")


def test_a_run_of_many_days_without_a_gpu_is_refused_unless_it_asks_for_fp32(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 2)
    config = load("pile-base-fast")
    with pytest.raises(ValueError, match=r"no GPU is visible .* 2 CPU cores .* [\d,]{5,} days; .*"):
        capacity.check_cpu_time(config, config.architecture(50265), 2)
    for recipe, setting in (("pile-base-fast", "training.deepspeed=zero1_fp32"), ("small", "")):
        config = load(recipe, [setting] if setting else [])
        capacity.check_cpu_time(config, config.architecture(50265), 2)


@pytest.fixture
def machine(monkeypatch):
    """`machine(host, cards)`: (total, free) GB of host memory and of each GPU."""

    def describe(host, cards=()):
        total, available = host
        memory = SimpleNamespace(total=total * GB, available=available * GB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        monkeypatch.setenv("DS_ACCELERATOR", "cuda" if cards else "cpu")
        found = [gpus.Gpu(str(n), 9.0, t * GB, f * GB) for n, (t, f) in enumerate(cards)]
        monkeypatch.setattr(gpus, "describe", lambda: found)

    return describe


def test_on_a_cpu_all_ranks_share_the_memory_of_the_machine(machine):
    machine((24, 20))
    assert capacity.check_memory(9 * GB, 1 * GB, 2) == []
    (warning,) = capacity.check_memory(9 * GB, 2 * GB, 2)
    assert "of 2 ranks need at least 22.0 GB of this machine" in warning
    assert "has 24.0 GB, of which 20.0 GB are free now" in warning
    with pytest.raises(ValueError, match=r"at least 26\.0 GB of this machine, .* 24\.0 GB; use"):
        capacity.check_memory(10 * GB, 3 * GB, 2)


def test_on_gpus_each_rank_has_its_own_and_what_is_offloaded_needs_host_memory(machine):
    machine((24, 20), [(80, 79), (80, 10)])
    assert capacity.check_memory(70 * GB, 1 * GB, 2) == []
    with pytest.raises(ValueError, match=r"1 rank need at least 90\.0 GB of a GPU of this machine"):
        capacity.check_memory(90 * GB, 0, 2)
    with pytest.raises(ValueError, match=r"2 ranks need at least 26\.0 GB of this machine"):
        capacity.check_memory(70 * GB, 13 * GB, 2)
    machine((24, 20), [(80, 60)])
    (warning,) = capacity.check_memory(70 * GB, 0, 1)
    assert "60.0 GB are free now" in warning


def test_ranks_on_gpus_that_nvidia_s_driver_does_not_show_need_no_memory_of_the_machine(
    machine, monkeypatch
):
    """As on ROCm, where DS_ACCELERATOR says that they are there."""
    machine((24, 20))
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert capacity.check_memory(70 * GB, 1 * GB, 2) == []


def test_gpus_whose_memory_is_unknown_are_not_judged(machine, monkeypatch, tmp_path):
    machine((24, 20), [(80, 79)])
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.least_capability.__wrapped__() is None
    assert gpus.describe() == []
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<END\n{NVIDIA_SMI}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpus.least_capability.__wrapped__() == 9.0
    assert gpus.describe() == [
        gpus.Gpu("0", 9.0, 143771 << 20, 143128 << 20, uuid="GPU-1b"),
        gpus.Gpu("1", 9.0, 143771 << 20, 20 << 20, is_shared=False, uuid="GPU-2c"),
        gpus.Gpu("2", 9.0, 81559 << 20, 81559 << 20, is_shared=False, uuid="GPU-2d"),
    ]
    program.write_text("#!/bin/sh\necho '0, GPU-1b, [N/A], 1, 1, Default, [N/A]'\n")
    assert gpus.least_capability.__wrapped__() is None
    assert gpus.describe() == []


def test_a_disk_without_room_for_the_checkpoints_of_a_new_run_is_refused(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "new"
    config = RunConfig(folder=str(run), training=TrainingConfig(checkpoints_kept=5))
    needed = (max_checkpoints_kept(config) + 1) * 16 * 10**6
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(needed))
    capacity.check_disk_space(config, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(needed - 1))
    with pytest.raises(ValueError, match=rf"^{tmp_path}: \d+ checkpoints of 16\.0 MB need"):
        capacity.check_disk_space(config, 10**6)
    run.mkdir(parents=True)
    ledger.append(run / ledger.FILE_NAME, "commit", step=500, attempt=1)
    capacity.check_disk_space(config, 10**6)  # the next attempt knows the size


def test_gpus_that_are_hidden_are_left_out(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<END\n{NVIDIA_SMI}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for visible, numbers in (
        (["1"], ["1"]),
        (["0", "1"], ["0", "1"]),
        (["GPU-2d", "GPU-1"], ["0", "2"]),
        (["MIG-2d"], ["0", "1", "2"]),
    ):
        monkeypatch.setattr(gpus, "visible_gpus", lambda visible=visible: visible)
        assert [gpu.number for gpu in gpus.describe()] == numbers

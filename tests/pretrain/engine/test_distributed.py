"""The device of a rank, with a replaced torch.cuda, and the port where the ranks meet."""

import os
import socket

import pytest
import torch

from pretrain.engine import distributed, engine
from pretrain.engine.distributed import (
    PortInUse,
    Process,
    adopt_launcher,
    check_port_is_free,
    choose_device,
)
from pretrain.processes import gpus
from pretrain.processes.launching import free_port
from pretrain.train.setup import prepare
from tests.running import python

CUDA_0, CUDA_1 = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch):
    """`cuda(count)` simulates `count` visible GPUs; returns the list of calls."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator()  # chooses once per process, and must not see the replacement

    def pretend(count, **environ):
        calls = []
        names = ("CUDA_VISIBLE_DEVICES", "CROSS_RANK", "TORCHELASTIC_RUN_ID", "DS_ACCELERATOR")
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name in distributed._ALLOCATOR_SETTINGS:
            monkeypatch.setenv(name, "")  # so that what is set here does not outlive the test
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
        return calls

    return pretend


def variables(*numbers):
    """What a launcher tells a rank of these numbers, in the order of `Process`."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    numbered = dict(zip(names, map(str, numbers), strict=True))
    return {**numbered, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def started(monkeypatch, calls):
    """Call engine.start() up to the process group."""
    import deepspeed

    from pretrain.engine import workarounds

    def init_distributed(dist_backend, verbose):
        calls.append((dist_backend, os.environ["LOCAL_RANK"]))

    monkeypatch.setattr(deepspeed, "init_distributed", init_distributed)
    monkeypatch.setattr(workarounds, "limit_collective_timeouts", lambda: None)
    monkeypatch.setattr(workarounds, "disable_shared_memory_op", lambda: None)
    monkeypatch.setattr(Process, "prepare_cpu", lambda self: None)
    return engine.start()


@pytest.mark.parametrize(
    ("count", "given", "expected"),
    [
        (0, {}, {}),
        (1, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (1, {"PYTORCH_ALLOC_CONF": "mine"}, {"PYTORCH_ALLOC_CONF": "mine"}),
        (1, {"PYTORCH_CUDA_ALLOC_CONF": "mine"}, {"PYTORCH_CUDA_ALLOC_CONF": "mine"}),
    ],
)
def test_the_allocator_of_a_gpu_has_expandable_segments_unless_the_user_sets_it(
    cuda, monkeypatch, count, given, expected
):
    calls = cuda(count, **variables(0, 1, 0, 1), **given)
    started(monkeypatch, calls)
    found = {name: os.environ.get(name) for name in distributed._ALLOCATOR_SETTINGS}
    assert {name: value for name, value in found.items() if value is not None} == expected


@pytest.mark.parametrize("visible", ["0", "3", "GPU-8932f937"])
def test_a_rank_that_sees_only_its_own_gpu_uses_it(cuda, monkeypatch, visible):
    """As under `srun --gpus-per-task 1`. DeepSpeed uses LOCAL_RANK as the index of the GPU."""
    calls = cuda(1, CUDA_VISIBLE_DEVICES=visible, **variables(3, 4, 1, 2))
    process = started(monkeypatch, calls)
    assert calls == [CUDA_0, ("nccl", "0")]
    assert process.device == CUDA_0
    assert (process.rank, process.local_rank) == (3, 1)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_more_ranks_than_visible_gpus_are_refused_on_every_rank(cuda, monkeypatch, rank):
    calls = cuda(2, CUDA_VISIBLE_DEVICES="4,5", **variables(rank, 3, rank, 3))
    with pytest.raises(ValueError, match="3 ranks .* 2 visible GPUs .*'4,5'.*start at most 2"):
        started(monkeypatch, calls)
    assert calls == []


@pytest.mark.parametrize("launcher", ["CROSS_RANK", "TORCHELASTIC_RUN_ID"])
def test_one_gpu_shown_to_all_ranks_belongs_to_the_first_rank_only(cuda, launcher):
    for visible in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}):  # deepspeed lists as many as ranks
        cuda(1, **{launcher: "0"}, **visible)
        assert Process(0, 2, 0, 2).device == CUDA_0
        with pytest.raises(ValueError, match="2 ranks .* 1 visible GPUs"):
            _ = Process(1, 2, 1, 2).device
    cuda(1, CUDA_VISIBLE_DEVICES="1", **{launcher: "0"})  # a wrapper script around each rank
    assert Process(1, 2, 1, 2).device == CUDA_0


def test_without_a_gpu_every_rank_is_on_the_cpu(cuda, monkeypatch):
    calls = cuda(0, **variables(1, 2, 1, 2))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert started(monkeypatch, calls).device == torch.device("cpu")
    assert calls == [("gloo", "1")]


def test_ranks_on_the_cpu_see_no_gpu():
    """DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES for them nevertheless."""
    environ = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}
    adopt_launcher(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    adopt_launcher(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_command_runs_on_the_first_gpu_or_on_the_given_device(cuda):
    calls = cuda(2)
    assert choose_device() == choose_device("cuda") == choose_device("cuda:0") == CUDA_0
    assert choose_device("cuda:1") == CUDA_1
    assert calls == [CUDA_0, CUDA_0, CUDA_0, CUDA_1]
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("cuda:2", "gpu", "cuda:-1", "mps"):
        with pytest.raises(ValueError, match=f"--device {name}: .* has cpu, cuda:0, cuda:1"):
            choose_device(name)
    cuda(0)
    assert choose_device() == torch.device("cpu")
    with pytest.raises(ValueError, match="--device cuda: this machine has cpu"):
        choose_device("cuda")


def test_gpus_that_torch_cannot_use_are_an_error(cuda, monkeypatch, recipe, tmp_path):
    """As with torch's build for CPUs, or a driver older than its CUDA."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    calls = cuda(0, **variables(0, 1, 0, 1))
    uses = [choose_device, lambda: choose_device("cuda"), lambda: started(monkeypatch, calls)]
    for use in [*uses, lambda: prepare(recipe.load(tmp_path), None, 1)]:
        with pytest.raises(ValueError, match="built .* CUDA.*, .* DS_ACCELERATOR=cpu"):
            use()
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_device() == started(monkeypatch, calls).device == torch.device("cpu")


def test_a_command_on_the_cpu_flushes_denormal_numbers(cuda):
    cuda(0)
    torch.set_flush_denormal(False)
    try:
        tiny = torch.tensor([1e-39])
        assert float(tiny * 1.0) != 0
        choose_device("cpu")
        assert float(tiny * 1.0) == 0
    finally:
        torch.set_flush_denormal(False)


def test_a_command_on_the_cpu_keeps_the_memory_of_freed_tensors():
    """The system clears the pages of few of the tensors."""
    code = """
import resource, torch
from pretrain.engine.distributed import choose_device
choose_device("cpu")
for tensors in (1, 100):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(tensors):
        torch.ones(12 * 2**20)  # 48 MB
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    one, hundred = map(int, python("-c", code).split())
    assert hundred < 20 * one


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::"])
def busy(request):
    """A port that another socket listens on."""
    family = socket.AF_INET6 if request.param == "::" else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("launcher", "remedy"),
    [
        ("CROSS_RANK", "pass --master_port to deepspeed"),
        ("TORCHELASTIC_RUN_ID", "pass --master-port to torchrun"),
        ("SLURM_PROCID", "set MASTER_PORT"),
    ],
)
def test_the_message_for_a_busy_port_says_how_to_choose_another(busy, launcher, remedy):
    environ = {**variables(0, 2, 0, 2), "MASTER_PORT": str(busy), launcher: "0"}
    with pytest.raises(PortInUse, match=f"127.0.0.1 port {busy}, .*in use.*another port, {remedy}"):
        check_port_is_free(environ)
    check_port_is_free({**environ, "RANK": "1"})  # rank 0 opens it
    by_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # which has opened it
    check_port_is_free({**environ, **by_torchrun})
    check_port_is_free({**environ, "MASTER_PORT": "0"})  # any free port
    check_port_is_free({**environ, "MASTER_PORT": str(free_port())})

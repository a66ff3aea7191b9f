"""Every program that has ranks sets its device before the first collective, and leaves its group.

The ranks are real processes and so is their process group, over gloo. Only torch.cuda is replaced:
it has two GPUs and records which one is chosen.
"""

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch

from pretrain.engine import workarounds
from pretrain.engine.distributed import Process
from tests.finetune.conftest import plans

COLLECTIVES = [
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier"),
    *("all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "recv", "send"),
]


class FirstCollective(BaseException):
    """Ends the program; not an Exception, which a program may catch."""


def calls_until_the_first_collective(program):
    """What a rank does with its device and its group, up to and with the first collective."""
    calls = []
    workarounds.disable_shared_memory_op()  # start() does so where it sees no GPU
    init_process_group = torch.distributed.init_process_group

    def join(backend, **settings):
        calls.append((f"init_process_group {backend}", os.environ["LOCAL_RANK"]))
        init_process_group("gloo", **settings)

    def collective(name):
        def call(*arguments, **settings):
            calls.append(name)
            raise FirstCollective

        return call

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(FirstCollective):
        patch.setattr(torch.distributed, "init_process_group", join)
        for name in COLLECTIVES:
            patch.setattr(torch.distributed, name, collective(name))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        patch.setattr(torch.cuda, "Stream", lambda: None)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        patch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
        patch.setattr(Process, "prepare_cpu", lambda self: None)
        program(patch)
    return calls


@pytest.fixture
def pretraining(recipe, tmp_path):
    def program(patch):
        from pretrain.train import __main__ as train

        words = ["training.steps=2", "schedule.warmup_steps=1"]
        train.main([str(recipe.path), f"folder={tmp_path / 'run'}", *words])

    return program


@pytest.fixture
def fine_tuning(tiny_model, easy_glue, tmp_path):
    short = ["epochs=1", "max_train_examples=16"]
    (plan,) = plans(tiny_model, easy_glue, *short, names=["RTE"])
    plan.write(tmp_path / "run")

    def program(patch):
        from finetune import train

        train.main(tmp_path / "run")

    return program


@pytest.fixture
def benchmark():
    def program(patch):
        from finetune.zeroclap import main

        sizes = ["batch.global_batch_size=2", "batch.micro_batch_size=1", "model.size=tiny"]
        main(["bench", "small", "--seconds", "0", "data.sequence_length=8", *sizes])

    return program


@pytest.mark.parametrize("program", ["pretraining", "fine_tuning", "benchmark"])
def test_each_rank_sets_its_device_before_the_first_collective(program, request, run_ranks):
    program = request.getfixturevalue(program)
    for rank, calls in enumerate(run_ranks(2, calls_until_the_first_collective, program)):
        *before, first = calls
        assert before == [f"cuda:{rank}", ("init_process_group nccl", str(rank))]
        assert first in COLLECTIVES


@pytest.mark.parametrize("program", ["pretraining", "fine_tuning", "benchmark"])
def test_a_program_that_ends_has_waited_for_the_threads_of_its_group(program, request, run_ranks):
    """Else they may abort the interpreter's exit. DeepSpeed keeps a group with two, which idle."""
    program = request.getfixturevalue(program)

    def work():
        with contextlib.redirect_stdout(io.StringIO()):
            program(None)
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return names.count("pt_gloo_runloop\n")

    assert run_ranks(2, work) == [2, 2]

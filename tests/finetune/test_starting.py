"""Runs beside each other: their devices, cores and memory, and why one failed."""

import dataclasses
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from data_prep.common import children
from finetune import starting
from finetune.config import FinetuneConfig
from pretrain.checks import needs
from pretrain.model import presets
from pretrain.processes import gpus


@pytest.mark.parametrize(
    ("gpus", "jobs", "world_size", "fitting", "expected"),
    [
        ("", 0, 1, 9, [""] * 8),
        ("", 0, 2, 9, [""] * 4),
        ("", 3, 1, 9, [""] * 3),
        ("012", 0, 1, 1, ["0", "1", "2"]),
        ("012", 0, 2, 0, ["01"]),
        ("01", 3, 1, 0, ["0", "1", "0"]),
        ("0", 0, 1, 3, ["0"] * 3),
        ("0", 0, 1, 9, ["0"] * 4),  # two cores each
        ("01", 0, 1, 9, ["0", "1", "0", "1"]),
        ("0123", 0, 2, 9, ["01", "23"]),
        ("01234", 0, 1, 0, list("01234")),
    ],
)
def test_runs_share_the_devices(gpus, jobs, world_size, fitting, expected):
    found = starting.slots(list(gpus), 8, jobs, world_size, fitting)
    assert found == [list(each) for each in expected]


def test_the_memory_of_a_run_is_that_of_its_weights_states_and_activations():
    """For each of a base model's 125 M weights 18 bytes (2, a sum in 4, 12), and activations.

    And 2 bytes in each of the graphs, for up to 32, 64, ... tokens.
    """
    base, long = presets.build("base", "zero-clap", 50265, {}), 512
    config = FinetuneConfig(batch_size=16, max_tokens=long)
    of_states, of_a_graph = (each * needs.parameters(base) for each in (18, 2))
    needed = starting.run_bytes(config, base, 1)
    assert of_states + 2**30 < needed - 16 * of_a_graph < 8e9
    less = starting.run_bytes(dataclasses.replace(config, max_tokens=128), base, 1)
    assert of_states + 2**30 < less - 4 * of_a_graph < needed - 16 * of_a_graph - 1e9
    without = starting.run_bytes(dataclasses.replace(config, deepspeed="zero3_bf16"), base, 1)
    assert without < needed - 10 * of_a_graph


@pytest.mark.parametrize(("is_shared", "expected"), [(True, 3), (False, 0)])
def test_a_gpu_in_exclusive_mode_has_room_for_one_run(is_shared, expected, tmp_path, monkeypatch):
    model, fitting = presets.build("tiny", "baseline", 50, {}), []
    gpu = gpus.Gpu("0", 9.0, 1 << 40, 4, is_shared)
    monkeypatch.setattr(starting, "describe", lambda: [gpu])
    monkeypatch.setattr(starting, "slots", lambda *given: fitting.append(given[-1]) or [["0"]])
    starting.run_all(tmp_path, [], model, planned=0)  # a run of one byte, as there is none
    assert fitting == [expected]


@pytest.mark.parametrize(("planned", "threads"), [(1, 8), (2, 4), (99, 1)])
def test_the_last_of_several_runs_has_the_threads_of_the_others(
    planned, threads, tmp_path, monkeypatch
):
    """It may be the only one that is left to do, and its threads decide its last digits."""
    monkeypatch.setattr(children, "usable_cores", lambda: 8)
    given = []
    monkeypatch.setattr(starting, "_start", lambda *args: given.append(args[3]))
    monkeypatch.setattr(children, "run_in_slots", lambda plans, n, start, *_: start(plans[0], 0))
    plan = SimpleNamespace(config=FinetuneConfig())
    model = presets.build("tiny", "baseline", 50, {})
    starting.run_all(tmp_path, [plan], model, planned=planned)
    assert given == [threads]


def test_a_run_has_its_share_of_the_cores_unless_the_environment_says_otherwise(
    tmp_path, monkeypatch
):
    """A study runs several of these commands beside each other, with one thread each."""
    monkeypatch.setattr(starting.subprocess, "Popen", lambda command, **options: options["env"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = SimpleNamespace(name="")
    assert starting._start(tmp_path, run, [], 5, 1)["OMP_NUM_THREADS"] == "1"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert starting._start(tmp_path, run, [], 5, 1)["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("step 1\nfinetune.train: error: a.tsv: is empty\n", "finetune.train: error: a.tsv: is"),
        ("Traceback:\n  x\ntorch.OutOfMemoryError: CUDA out of memory\n", "torch.OutOfMemory"),
        ("[rank1]: RuntimeError: bad\nerrors.ChildFailedError: \n====\n", "RuntimeError: bad"),
        ("step 1\n", "was killed by signal 9 (SIGKILL; out of memory?)"),
    ],
)
def test_the_cause_of_a_failure_is_the_last_error_of_the_log_or_how_the_process_ended(
    tmp_path, log, cause
):
    (tmp_path / "log.txt").write_text(log)
    assert starting._cause(tmp_path, SimpleNamespace(name=""), -signal.SIGKILL).startswith(cause)


def test_of_two_runs_that_end_at_once_the_second_counts_as_left_while_the_first_is_logged():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    left = []
    children.run_in_slots("ab", 2, lambda *_: done, lambda task, code, rest: left.append(rest))
    assert left == [["b"], []]

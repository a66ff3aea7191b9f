import os
import signal
import sys
from contextlib import closing
from importlib.util import find_spec

import pytest

from data_prep.engines import WorkerDied, _position_bytes, run_locally, run_on_ray
from data_prep.manifest import Settings
from data_prep.progress import Done
from data_prep.run import plan, prepare
from tests.data_prep.conftest import SETTINGS, content
from tests.running import python, wait_until

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def work(task, progress):
    """Succeed for the first input, and fail with ValueError and OSError for the others."""
    progress(Done(3, 200, 50))
    if task.index == 1:
        raise ValueError("bad\ninput")
    if task.index == 2:
        raise OSError(28, "No space left on device", str(task.input))
    progress(Done(3, 200, 50, task.input.stat().st_size))
    return task.name


@pytest.fixture
def tasks(inputs, tmp_path):
    return plan(inputs, [], tmp_path, Settings(), "")


def test_each_task_has_one_outcome_and_its_progress_is_summed(tasks):
    ticks: list[Done] = []
    with closing(run_locally(work, tasks, 1, ticks.append)) as outcomes:
        found = {task.index: outcome for task, outcome in outcomes}
    assert found[0] == "shard-00000"
    assert str(found[1]) == "bad\ninput"
    assert isinstance(found[2], OSError)
    assert found[2].filename == str(tasks[2].input)
    # Failed inputs do not count as read.
    assert ticks[-1] == Done(9, 600, 150, tasks[0].input.stat().st_size)


def test_the_position_in_the_input_is_that_of_files_open_for_reading(tmp_path):
    (tmp_path / "input").write_bytes(bytes(99))
    before = _position_bytes()
    with open(tmp_path / "input", "rb", 0) as file, open(tmp_path / "made", "wb", 0) as made:
        made.write(file.read(40))
        assert _position_bytes() - before == 40


def die(task, progress):
    """Kill the worker of the second input, when that of the first one is at work."""
    marks = [task.corpus.parent / name for name in ("at work", "dead")]
    if task.index == 1:
        wait_until(marks[0].exists)
        marks[1].touch()
        os.kill(os.getpid(), signal.SIGKILL)
    marks[0].touch()
    wait_until(marks[1].exists)
    return task.name


def test_a_killed_worker_costs_its_own_shard_only(tasks):
    with closing(run_locally(die, tasks, 2, lambda _: None)) as outcomes:
        found = {task.index: outcome for task, outcome in outcomes}
    assert (found[0], found[2]) == ("shard-00000", "shard-00002")
    assert isinstance(found[1], WorkerDied)
    assert "a worker process died while shard-00001" in str(found[1])


def test_missing_ray_is_reported_in_one_line(tasks, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="--engine ray: Ray is not installed"):
        next(run_on_ray(work, tasks, 1, lambda _: None))


@pytest.mark.slow
@needs_ray
def test_ray_makes_the_same_bytes(inputs, tokenizer_folder, tmp_path, monkeypatch):
    """Use a separate process, because Ray starts threads and leaves warnings."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = ["prepare", "--tokenizer", tokenizer_folder, "--input", *inputs, "--engine", "ray"]
    words += ["--max-tokens", "64", "--valid-fraction", "0.2", "--workers", "2"]
    python("-m", "finetune.zeroclap", *words, "--output", tmp_path / "ray")
    prepare(inputs, tmp_path / "local", tokenizer_folder, SETTINGS)
    assert content(tmp_path / "ray") == content(tmp_path / "local")


RAY_PROGRAM = """
import os, signal, sys
from pathlib import Path
from data_prep.engines import run_on_ray
from data_prep.manifest import Settings
from data_prep.progress import Done
from data_prep.run import plan

inputs = [Path(name) for name in sys.argv[1:]]
tasks = plan(inputs, [], inputs[0].parent, Settings(), "")

def work(task, progress):
    progress(Done(3, 200, 50))
    if task.index == 1:
        raise ValueError("bad input")
    if task.index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    progress(Done(3, 200, 50, task.input.stat().st_size))
    return task.name

ticks = []
for task, outcome in run_on_ray(work, tasks, 1, ticks.append):
    print(task.index, repr(outcome), flush=True)
print(ticks[0])
"""


@pytest.mark.slow
@needs_ray
def test_failures_in_ray_are_reported_as_in_local_processes(inputs):
    printed = python("-c", RAY_PROGRAM, *inputs)
    lines = [line for line in printed.splitlines() if "raylet" not in line]
    assert lines[0] == "0 'shard-00000'"
    assert lines[1] == "1 ValueError('bad input')"
    assert lines[-2].startswith("2 WorkerDied('a worker process died while shard-00002")
    assert lines[-1] == str(Done(3, 200, 50, inputs[0].stat().st_size))

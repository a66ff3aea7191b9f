"""Child processes import nothing from the folder that a user works in."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from data_prep.common import children
from pretrain.records import control
from pretrain.records.control import ControlFile
from pretrain.supervision import hosts, launch
from tests.running import ROOT

NAMES = ("pretrain", "finetune", "data_prep", "deepspeed", "torch", "numpy", "pickle", "random")


def hostile_folder(folder):
    """Return a folder with modules that end every process that imports them."""
    (folder / "pretrain").mkdir(parents=True)
    for name in (*NAMES, "pretrain/train", "pretrain/__init__"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user was run')\n")
    return folder


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    folder = hostile_folder(tmp_path / "hostile")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.usefixtures("hostile")
def test_a_child_finds_our_packages_and_none_in_its_folder():
    """Also in a checkout that is not installed: `-S` hides an editable installation."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(third_party())}
    code = "import random, numpy, pretrain.records.collective as found; print(found.__file__)"
    command = [sys.executable, "-S", "-c", code]
    environ = children.environment(environ)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(ROOT / "pretrain" / "records" / "collective.py"), done.stderr


def third_party():
    return [path for path in sys.path if path.endswith("site-packages")]


def test_the_folder_of_a_checkout_is_named_to_a_child_and_that_of_an_installation_is_not(
    monkeypatch,
):
    found = children.environment({"PYTHONPATH": "/a"})
    assert found["PYTHONPATH"] == os.pathsep.join([str(ROOT), "/a"])
    assert children.environment(found) == found
    monkeypatch.setattr(children, "_ROOT", Path(third_party()[0]))
    assert children.environment({}) == {"PYTHONSAFEPATH": "1"}
    assert children.environment({"RANK": "0", "LOCAL_SIZE": "1"}) == {"PYTHONSAFEPATH": "1"}


def test_workers_of_a_pool_import_nothing_from_their_folder(hostile):
    with children.spawn_context().Pool(1) as pool:
        assert pool.apply(os.getcwd) == str(hostile)


def test_ctrl_c_never_reaches_a_worker_not_even_while_it_starts():
    with children.spawn_context().Pool(1) as pool:
        assert signal.SIGINT in pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, []))
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_process_whose_start_a_stop_signal_interrupts_is_ended_and_waited_for():
    begun = []

    def start(task, slot):
        begun.append(subprocess.Popen(["sleep", "60"]))
        signal.raise_signal(signal.SIGTERM)
        return begun[0]

    with pytest.raises(KeyboardInterrupt):
        children.run_in_slots(["a", "b"], 2, start)
    assert [process.returncode for process in begun] == [-signal.SIGTERM]


def of_a_launch(monkeypatch, folder):
    return launch.environment(folder, ControlFile("t", 1, control.RUN))


def of_ssh(monkeypatch, folder):
    return json.loads(hosts.variables({}))


def of_fine_tuning(monkeypatch, folder):
    from finetune import starting

    (folder / "a").mkdir()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: env)
    return starting._start(folder, SimpleNamespace(name="a"), [], 1, 1)


@pytest.mark.parametrize("variables", [of_a_launch, of_ssh, of_fine_tuning])
def test_every_child_gets_the_environment(variables, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    found = variables(monkeypatch, tmp_path)
    assert found["PYTHONSAFEPATH"] == "1"
    assert "SLURM_STEP_NUM_TASKS" not in found


def test_the_batch_script_starts_the_program_that_ignores_the_working_directory():
    text = (ROOT / "pretrain/recipes/supervise.sbatch").read_text()
    assert "zeroclap " in text
    assert "python -m" not in text


def test_the_program_itself_ignores_the_working_directory(hostile):
    program = Path(sys.executable).with_name("zeroclap")
    if not program.exists():
        pytest.skip("not installed")
    done = subprocess.run([program, "recipes"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("group", "limit"),
    [
        ("0::/job/step", "job/memory.max"),  # Slurm limits the job
        ("0::/", "memory.max"),  # a container has a namespace of its own
        ("4:memory:/docker/1", "memory/memory.limit_in_bytes"),  # or does not see its path
    ],
)
def test_the_memory_of_a_process_is_that_of_its_container_or_job(
    monkeypatch, tmp_path, group, limit
):
    memory = SimpleNamespace(total=24, available=20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    groups, folder = tmp_path / "groups", tmp_path / "files"
    monkeypatch.setattr(children, "_CGROUPS", groups)
    monkeypatch.setattr(children, "_CGROUP_FILES", folder)
    assert children.usable_memory() == (24, 20)  # without cgroups, as in gVisor
    groups.write_text(f"2:cpu:/\n{group}\n")
    (folder / limit).parent.mkdir(parents=True)
    for content, bytes_left in (("max", (24, 20)), ("22", (22, 20)), ("16", (16, 16))):
        (folder / limit).write_text(content)
        assert children.usable_memory() == bytes_left

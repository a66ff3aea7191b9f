"""`python -m pretrain supervise`: what it refuses, and what it would do."""

import os
import pty
import subprocess
import sys

import pytest

from pretrain import __main__ as command_line
from pretrain.config.run import RunConfig
from pretrain.exit_codes import EXIT_PREEMPTED
from pretrain.run import ledger
from pretrain.supervision import gpus, processes, supervisor
from tests.pretrain.supervision.test_supervisor import HEAD, ROOT, WAIT_FOR_REQUEST


@pytest.fixture
def supervise(recipe, tmp_path, capsys):
    def run(*words):
        code = command_line.main(
            ["supervise", str(recipe.path), f"folder={tmp_path / 'run'}", *words]
        )
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_dry_run_prints_the_decision_and_the_command_and_touches_nothing(supervise, tmp_path):
    code, told, _ = supervise("--dry-run")
    assert code == 0
    assert "next: Launch" in told
    assert "from step 0: " in told
    assert "--num_gpus 2" in told
    assert "--module pretrain.train" in told
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_several_nodes_shows_this_node_s_command(supervise):
    code, told, _ = supervise(
        "supervision.processes_per_node=1", "--dry-run", "--nodes", "2", "--master-addr", "a"
    )
    assert code == 0
    assert "--no_ssh --node_rank 0 --master_addr a" in told


def test_another_machine_s_agent_may_come_before_the_leader(supervise, tmp_path):
    (tmp_path / "run" / "control").mkdir(parents=True)
    assert supervise("--dry-run")[0] == 0


def test_ranks_of_all_machines_must_share_a_batch(supervise):
    code, _, error = supervise("supervision.processes_per_node=1", "--dry-run", "--nodes", "3")
    assert code == 2
    assert "x 3 ranks" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "2", "--node-rank", "2"), "--node-rank 2 with --nodes 2"),
        (("supervision.launcher=mpirun",), "one of deepspeed, torchrun, srun"),
        (("supervision.hostfile=nowhere",), "nowhere names no machine"),
        (("supervision.launcher=srun", "--nodes", "2"), "without --nodes"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_the_way_out(
    supervise, tmp_path, monkeypatch, words, message
):
    code, _, error = supervise(*words)
    assert code == 2
    assert message in error
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["--nodes", "2", "--node-rank", "1"]])
def test_more_ranks_than_gpus_are_refused_before_anything_is_made(
    supervise, tmp_path, monkeypatch, words
):
    monkeypatch.setattr(gpus, "visible_gpus", lambda environ: ["3"])
    code, _, error = supervise(*words)
    assert code == 2
    assert "supervision.processes_per_node: 2 ranks on a machine with 1 usable GPUs" in error
    assert not (tmp_path / "run").exists()


def test_a_launcher_that_is_not_there_is_refused(supervise, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, error = supervise("supervision.launcher=srun")
    assert code == 2
    assert "no `srun` beside" in error
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_refused_with_its_holder_named(supervise, tmp_path):
    first = supervisor.Supervisor(RunConfig(folder=str(tmp_path / "run")))
    try:
        code, _, error = supervise()
    finally:
        first._lock.close()
    assert code == 2
    assert f"in use by another supervisor (process {os.getpid()}" in error
    assert ledger.read(tmp_path / "run" / ledger.FILE_NAME) == []


IN_A_TERMINAL = """
import os, sys
os.login_tty(int(sys.argv[1]))
from pretrain import __main__ as command_line
from pretrain.supervision import launch
launch.command = lambda *_, **__: [sys.executable, "-c", sys.argv[2]]
sys.exit(command_line.main(["supervise", *sys.argv[3:]]))
"""
ATTEMPT = """
import json, shutil
shutil.copy(run / "supervised.yaml", run / "run.yaml")
from pretrain.run import metrics
line = {**dict.fromkeys(metrics.NEEDED[metrics.METRICS], 1), "step": 0, "skipped": False}
(run / "metrics.jsonl").write_text(json.dumps(line) + chr(10))
tell("created")
tell("attempt")
"""


def test_the_end_of_its_terminal_lets_the_ranks_save_and_is_told_by_exit_code_76(recipe, tmp_path):
    """What it would print then can be written nowhere."""
    run = tmp_path / "run"
    script = HEAD.format(run=str(run)) + ATTEMPT + WAIT_FOR_REQUEST
    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", IN_A_TERMINAL, str(theirs), script]
    child = subprocess.Popen(
        [*words, str(recipe.path), f"folder={run}"], cwd=ROOT, pass_fds=[theirs]
    )
    os.close(theirs)
    try:
        with open(ours, "rb", buffering=0) as terminal:
            said = b""
            while b"attempt 1 began" not in said:
                said += terminal.read(1000)
        assert child.wait(60) == EXIT_PREEMPTED
    finally:
        child.kill()
        child.wait()
        processes.end_all(run, 0.0)
    assert [r["kind"] for r in ledger.read(run / ledger.FILE_NAME)][2:] == ["commit", "preempted"]
    assert "## What happened" in (run / "report.md").read_text()

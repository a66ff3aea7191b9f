"""The batch script for Slurm; small programs replace srun and scontrol."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.running import ROOT, wait_until

SCRIPT = ROOT / "pretrain" / "recipes" / "supervise.sbatch"


@pytest.fixture
def submit(tmp_path):
    """Start the script with a line of shell as srun; scontrol writes its arguments to a file."""

    def program(name, line):
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\ncd {tmp_path}\n{line}\n")
        path.chmod(0o755)

    started = []

    def start(srun, zeroclap="", **given):
        program("srun", f'echo "$@" > arguments\n{srun}')
        program("scontrol", 'echo "$@" > requeued')
        program("squeue", 'echo "$reason"')
        program("sleep", "exec /bin/sleep 0.05")
        program("zeroclap", zeroclap)
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        environment = os.environ | variables | given
        words = ["bash", SCRIPT, "demo", "folder=a b"]
        started.append(subprocess.Popen(words, env=environment, start_new_session=True))
        return started[-1]

    yield start
    for script in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)


def ignores(pid, number):
    masks = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()
    return int(masks[0], 16) >> (number - 1) & 1


@pytest.mark.parametrize("code", [0, 1, 76])
def test_without_a_signal_the_job_ends_with_the_code_of_its_agents(submit, tmp_path, code):
    """They alone may have been asked to stop."""
    assert submit(f"exit {code}").wait(60) == code
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == "requeue 17\n" * (code == 76)
    assert (tmp_path / "arguments").read_text().endswith(" zeroclap supervise demo folder=a b\n")


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_signal_kills_is_started_again_but_not_for_ever(submit, tmp_path, whole):
    """An agent on its node, or the job's step."""
    kill = "echo >> starts; kill -9 $$"
    run = 'while [ "$1" != bash ]; do shift; done; exec "$@"'
    once = f"[ -e starts ] || {{ {kill}; }}; exit 0"
    (script, agents) = (once, "") if whole else (run, once)
    assert submit(script, agents).wait(60) == 0
    assert (tmp_path / "starts").read_text() == "\n"
    assert submit(*((kill, "") if whole else (run, kill))).wait(60) == 137
    assert len((tmp_path / "starts").read_text()) == 1 + (10 if whole else 100)


def test_a_program_that_is_missing_is_named_before_anything_is_started(submit, tmp_path):
    script = SCRIPT.read_text().replace("program=(zeroclap)", "program=(/no/zeroclap)")
    (tmp_path / "script").write_text(script)
    done = subprocess.run(["bash", tmp_path / "script"], capture_output=True, text=True)
    assert (done.returncode, "/no/zeroclap: not found on" in done.stderr) == (2, True)


def test_tasks_that_are_not_one_a_node_are_refused_before_anything_is_started(submit, tmp_path):
    """Each would be a supervisor of its own."""
    assert submit("", SLURM_NNODES="2", SLURM_NTASKS="16").wait(60) == 2
    assert not (tmp_path / "arguments").exists()
    assert submit("", SLURM_NNODES="2", SLURM_NTASKS="2").wait(60) == 0


def test_agents_get_the_cores_of_the_smallest_node_and_none_of_another_job_s(submit, tmp_path):
    """A job that is submitted from within another one inherits that one's variables."""
    inherited = {"SLURM_CPUS_PER_TASK": "1", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1"}
    srun = '[ -z "$SLURM_CPU_BIND" ] || touch bound'
    assert submit(srun, SLURM_JOB_CPUS_PER_NODE="16(x3),4,8(x2)", **inherited).wait(60) == 0
    assert " --cpus-per-task=4 " in (tmp_path / "arguments").read_text()
    assert not (tmp_path / "bound").exists()


def test_a_task_of_an_array_is_queued_again_without_the_others(submit, tmp_path):
    """The last one's job number is that of the array."""
    array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    assert submit("exit 76", **array).wait(60) == 76
    assert (tmp_path / "requeued").read_text() == "requeue 17_3\n"


SAVES = "trap 'exit {}' USR1; touch ready; for i in {{1..999}}; do sleep 0.05; done"


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (76, True), (137, True)])
def test_the_signal_before_the_time_limit_reaches_the_agents(
    submit, tmp_path, capfd, code, requeued
):
    """Sent again and again, at every moment of the script's wait for their end."""
    script = submit(SAVES.format(code))
    number = signal.SIGINT if code == 1 else signal.SIGUSR1
    wait_until((tmp_path / "ready").exists)
    wait_until(lambda: script.poll() is not None or script.send_signal(number))
    assert script.returncode == code
    assert (tmp_path / "requeued").exists() == requeued
    assert ("is --time longer than the time in --signal?" in capfd.readouterr().err) == requeued


def test_a_signal_to_the_shell_of_an_agent_alone_reaches_the_agent(submit, tmp_path):
    """As `scancel --signal=INT` does on all nodes. Our srun ignores it, Slurm's tasks do not."""
    shell = (
        'echo $$ > shell; while [ "$1" != bash ]; do shift; done; exec env --default-signal "$@"'
    )
    script = submit(shell, SAVES.format(76))
    wait_until((tmp_path / "ready").exists)
    os.kill(int((tmp_path / "shell").read_text()), signal.SIGINT)
    assert script.wait(60) == 76


@pytest.mark.parametrize(
    ("numbers", "reason", "requeued"),
    [
        ([signal.SIGTERM], "None", False),
        ([signal.SIGUSR1, signal.SIGTERM], "None", False),
        ([signal.SIGUSR1, signal.SIGTERM], "TimeLimit", True),
    ],
)
def test_a_job_that_was_asked_to_save_is_queued_again_at_its_limit_and_not_when_cancelled(
    submit, tmp_path, numbers, reason, requeued
):
    """Slurm sends TERM for both, also to the agents; here they end when they like."""
    agents = "trap '' USR1 TERM; touch ready; until [ -e told ]; do sleep 0.05; done; exit 76"
    script = submit(agents, reason=reason)
    wait_until((tmp_path / "ready").exists)
    for number in numbers:
        script.send_signal(number)
        wait_until(lambda number=number: ignores(script.pid, number))  # it has dealt with one
    (tmp_path / "told").touch()
    assert script.wait(60) == 76
    assert (tmp_path / "requeued").exists() == requeued

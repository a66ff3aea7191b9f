"""All faults that a run has to survive, with real processes.

Several faults strike the same run, each in an attempt of its own. At the end its weights must be
those of the undisturbed run. Each attempt takes about ten seconds.
"""

import contextlib
import json
import os
import re
import signal
import subprocess

import psutil
import pytest

from data_prep.common.exit_codes import EXIT_PREEMPTED
from pretrain.config.deepspeed import DS_CONFIGS
from pretrain.config.load import dump
from pretrain.processes import processes
from pretrain.records import control, metrics
from pretrain.records.folder import SUPERVISED
from pretrain.supervision import launch
from pretrain.supervision.nodes import Node
from tests.chaos.conftest import PATIENCE, ROOT, SHORT, weights
from tests.chaos.fault import PLAN

KILL, TERMINATE = signal.SIGKILL, signal.SIGTERM
pytestmark = pytest.mark.slow


def test_faults_of_launchers_and_ranks_strike_one_run(chaos, undisturbed):
    """The launcher alone would leave orphans, or wait forever."""
    paused = [("pause", 0, 6)]
    chaos.schedule(
        {
            1: paused,
            2: paused,
            3: [("freeze", 1, 7)],
            4: [("exit-0", 1, 9)],
            5: [("raise", 1, 10)],
            6: [("die", 1, 10)],
            7: [("freeze-at-start", 1, 0)],
            8: [("die-while-writing", 1, 12)],
            9: [("die-when-committed", 0, 12)],
        }
    )
    supervisor = chaos.start("supervision.hang_seconds=30")
    for number in (KILL, TERMINATE):
        chaos.wait_for_pause()
        next_log = chaos.run / "logs" / f"attempt-{len(chaos.start_steps()) + 1:03d}.log"
        chaos.signal_launcher(number)
        chaos.wait_for(next_log.exists)
        chaos.go_on()
    assert supervisor.wait(600) == 0, chaos.output()
    assert chaos.start_steps() == [0, 4, 4, 4, 8, 8, 8, 8, 8, 8], chaos.output()
    endings = chaos.records("crash", "hang")
    assert [number for number, one in enumerate(endings) if one["kind"] == "hang"] == [2, 6]
    assert "was killed by signal 9" in endings[0]["reason"]
    assert re.search("no heartbeat for|rank 1 .* is stopped", endings[2]["reason"])
    # The other rank loses its connection, and the launcher has its own exit code.
    raised = r"rank 1 on \S+: KeyError: 'a fault of this rank alone' \(pretrain/.*, line \d+\)"
    assert re.fullmatch(raised, endings[4]["reason"])
    assert "KeyError" in chaos.log.read_text()
    # The launcher may look at the other rank first.
    named = "rank 1 ended without a message|the launcher ended with code"
    assert re.search(named, endings[5]["reason"])
    # Long before the limit of the start-up, which is ten minutes.
    hang, began = endings[6], chaos.records("attempt")[6]
    assert re.fullmatch(r"rank 1 \(pid \d+\) is stopped, as by SIGSTOP", hang["reason"])
    assert hang["time"] - began["time"] < 90
    chaos.assert_same_as(undisturbed)


def test_a_recipe_that_only_ranks_can_refuse_is_refused_once(chaos, tmp_path):
    settings = json.loads((DS_CONFIGS / "zero1_fp32.json").read_text())
    settings["zero_optimization"]["stagee"] = 1
    (tmp_path / "wrong.json").write_text(json.dumps(settings))
    assert chaos.supervise(f"training.deepspeed={tmp_path / 'wrong.json'}") == 2, chaos.output()
    assert "error: rank 0, 1 on" in chaos.log.read_text()
    assert "unknown DeepSpeed key stagee" in chaos.log.read_text()
    assert len(list((chaos.run / "logs").iterdir())) == 1
    assert not chaos.kinds("crash")


@pytest.mark.parametrize("module", ["deepspeed", "safetensors"])  # of the launcher; of the ranks
def test_a_broken_installation_is_given_up_after_the_retries(module, chaos, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / f"{module}.py").write_text("raise ImportError('libfoo.so.1: cannot open')\n")
    path = os.pathsep.join([str(broken), str(ROOT)])
    assert chaos.supervise("supervision.max_retries=1", PYTHONPATH=path) == 1, chaos.output()
    assert chaos.kinds("crash", "gave-up") == ["crash", "crash", "gave-up"]
    reason = chaos.records("gave-up")[0]["reason"]
    assert "2 attempts failed without a new checkpoint" in reason
    assert "ImportError: libfoo.so.1: cannot open" in chaos.output()


def test_a_new_supervisor_adopts_or_ends_what_a_killed_one_left(chaos, undisturbed):
    chaos.schedule({1: [("pause", 0, 6)], 2: [("die-before-save", 1, 16)]})
    first = chaos.start()
    chaos.wait_for_pause()
    first.kill()
    first.wait()
    chaos.signal_launcher(KILL)
    chaos.wait_for(lambda: not chaos.launchers())
    assert processes.members(chaos.run), "the ranks must outlive their launcher"
    second = chaos.start()  # ends the orphans
    chaos.wait_for(lambda: len(chaos.start_steps()) == 2)
    chaos.go_on()
    second.kill()
    second.wait()
    assert len(chaos.launchers()) == 1
    assert chaos.supervise() == 0, chaos.output()  # adopts it, notices its crash, launches again
    assert "attempt 2 still runs; watching it" in chaos.output()
    assert len(chaos.start_steps()) == 3
    chaos.assert_same_as(undisturbed)


def test_a_request_to_stop_with_a_clock_that_jumps(chaos, undisturbed):
    chaos.schedule({1: [("clock", "all", 0), ("pause", 0, 6)], 2: [("clock", "all", 0)]})
    supervisor = chaos.start(CHAOS_CLOCK="1")
    chaos.wait_for_pause()
    supervisor.send_signal(TERMINATE)
    token = control.read_control_file(chaos.run).token
    chaos.wait_for(lambda: control.stop_requested(chaos.run, token))
    chaos.go_on()
    assert supervisor.wait(300) == EXIT_PREEMPTED, chaos.output()
    assert processes.members(chaos.run) == []
    assert [r["step"] for r in chaos.records("preempted")] == [7]
    assert chaos.supervise(CHAOS_CLOCK="1") == 0, chaos.output()
    assert chaos.start_steps() == [0, 7]
    chaos.assert_same_as(undisturbed)


def test_a_disk_that_is_full_for_all_files_of_a_run(chaos, undisturbed):
    """Ledger, metrics, control files and logs: no process is left running, nothing is lost."""
    chaos.run.mkdir(parents=True)
    (chaos.run / "train.lock").touch()  # marks the folder as that of a run
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(chaos.run)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        (chaos.run / "train.lock").touch()
        chaos.schedule({1: [("fill-run", 0, 5)]})
        supervisor = chaos.start()
        chaos.wait_for(lambda: "trying again" in chaos.output() or supervisor.poll() is not None)
        assert "No space left on device" in chaos.output()
        assert processes.members(chaos.run) == []
        (chaos.run / "filler").unlink()
        assert supervisor.wait(PATIENCE) == 0, chaos.output()
        assert chaos.start_steps() == [0, 4], chaos.output()
        chaos.assert_same_as(undisturbed)
    finally:
        subprocess.run(["umount", "--lazy", str(chaos.run)], check=True)


def test_non_finite_updates_are_rolled_back_to_the_checkpoint_before_them(chaos):
    """ZeRO skips them, so the checkpoint of step 8 is as good as any before it."""
    chaos.schedule({1: [("nan-gradients", "all", 8)]})
    assert chaos.supervise() == 0, chaos.output()
    (spike,), (_, rollback) = chaos.records("spike"), chaos.records("segment")
    assert (spike["channel"], spike["onset"], spike["step"]) == ("non-finite", 8, 9)
    assert (rollback["step"], rollback["rung"]) == (8, 1)
    assert chaos.start_steps() == [0, 8], chaos.output()
    assert chaos.kinds("crash", "hang", "discontinuity") == []
    assert all(tensor.isfinite().all() for tensor in weights(chaos.run).values())
    lines = metrics.read_metrics(chaos.run / metrics.METRICS)
    assert not [line for line in metrics.surviving(lines) if not line["loss"] < 100]


def test_a_zombie_attempt_does_not_commit_or_write_records(chaos, recipe, undisturbed):
    """It is frozen before it commits, and continued after another attempt has finished.

    It behaves as on a node that the second supervisor cannot see: its processes have another mark,
    and its lock is lost, as on some network file systems.
    """
    chaos.schedule({1: [("freeze-before-commit", 0, 8)]})
    elsewhere = chaos.run.with_name("elsewhere")
    launcher = start_by_hand(chaos, recipe.load(chaos.run, *SHORT), processes.mark(elsewhere))
    try:
        chaos.wait_for(lambda: is_stopped(elsewhere, "0"))
        zombies = [member.pid for member in processes.members(elsewhere)]
        (chaos.run / "train.lock").unlink()
        assert chaos.supervise() == 0, chaos.output()
        assert chaos.start_steps() == [0, 4]
        before = chaos.records()
        for pid in zombies:
            os.kill(pid, signal.SIGCONT)
        assert launcher.wait(PATIENCE) != 0
        assert chaos.records() == before
        assert "this one stops" in (chaos.run / "zombie.log").read_text()
        chaos.assert_same_as(undisturbed)
    finally:
        processes.end_all(elsewhere, 0.0, launcher=launcher.pid)
        launcher.wait()


def start_by_hand(chaos, config, mark):
    """Do what a supervisor does for the first attempt, with another mark."""
    chaos.run.mkdir(parents=True)
    dump(config, chaos.run / SUPERVISED)
    control_file = launch.next_control_file(config, Node(), [])
    control.write(chaos.run, control_file)
    words = launch.command(chaos.run, control_file)
    command = ["tests.chaos.fault" if word == "pretrain.train" else word for word in words]
    environment = launch.environment(chaos.run, control_file)
    environment |= {PLAN: str(chaos.plan), processes.RUN_VARIABLE: mark, "PYTHONPATH": str(ROOT)}
    with (chaos.run / "zombie.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def is_stopped(run, rank):
    """Return whether a rank is stopped by a signal; its short-lived children may end meanwhile."""
    for pid in [member.pid for member in processes.members(run) if member.rank == rank]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                return True
    return False

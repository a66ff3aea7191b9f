"""All faults that a run has to survive, with real processes.

Several faults strike the same run, each in an attempt of its own. At the end its weights must be
those of the undisturbed run. Each attempt takes about ten seconds, so few tests have many.
"""

import contextlib
import json
import os
import re
import signal
import subprocess

import psutil
import pytest

from data_prep.common.exit_codes import EXIT_PREEMPTED, EXIT_SPIKE
from data_prep.common.wording import count
from pretrain.config.deepspeed import DS_CONFIGS
from pretrain.config.load import dump
from pretrain.processes import processes
from pretrain.records import control
from pretrain.records.folder import SUPERVISED
from pretrain.supervision import decide, launch
from pretrain.supervision.nodes import Node
from tests.chaos.fault import PLAN
from tests.chaos.fixtures import PATIENCE, ROOT, SHORT
from tests.pretrain.builders import weights_of

KILL, TERMINATE = signal.SIGKILL, signal.SIGTERM
pytestmark = pytest.mark.slow


def test_faults_of_launchers_and_ranks_strike_one_run(chaos, recipe, run_disk, undisturbed):
    """The launcher alone would leave orphans, or wait forever."""
    pause = ("pause", 0, 6)
    jumping = ("clock", "all", 0)
    chaos.schedule(
        {
            1: [("freeze-before-commit", 0, 8)],
            2: [pause],
            3: [pause],
            4: [pause],
            5: [("exit-0", 1, 9)],
            6: [("raise", 1, 10)],
            7: [("freeze-at-start", 1, 0)],
            8: [("die-while-writing", 1, 12)],
            9: [("pause", 0, 10), ("die-when-committed", 0, 12)],
            10: [("fill-run" if run_disk else "die", 0, 13)],
            11: [("pause", 0, 14), jumping],
            12: [jumping],
        }
    )
    with zombie(chaos, recipe.load(chaos.run, *SHORT)) as wake_up:
        supervisor = chaos.start()
        for number in (KILL, TERMINATE):
            chaos.wait_for_pause()
            chaos.signal_launcher(number)
            go_on_in_the_next_attempt(chaos)

        chaos.wait_for_pause()
        supervisor.kill()
        supervisor.wait()
        chaos.signal_launcher(KILL)
        chaos.wait_for(lambda: not chaos.launchers())
        assert processes.members(chaos.run), "the ranks must outlive their launcher"
        supervisor = chaos.start("supervision.hang_seconds=30")  # ends the orphans
        go_on_in_the_next_attempt(chaos)

        chaos.wait_for_pause()
        supervisor.kill()
        supervisor.wait()
        assert len(chaos.launchers()) == 1
        supervisor = chaos.start(CHAOS_CLOCK="1")
        chaos.wait_for(lambda: "attempt 9 still runs; watching it" in chaos.output())
        chaos.go_on()
        if run_disk:
            said = "No space left on device", "trying again"
            chaos.wait_for(lambda: all(text in chaos.output() for text in said))
            assert processes.members(chaos.run) == []
            (chaos.run / "filler").unlink()

        chaos.wait_for_pause()
        supervisor.send_signal(TERMINATE)
        token = control.read_control_file(chaos.run).token
        chaos.wait_for(lambda: control.stop_requested(chaos.run, token))
        chaos.go_on()
        assert supervisor.wait(PATIENCE) == EXIT_PREEMPTED, chaos.output()
        assert processes.members(chaos.run) == []
        assert chaos.supervise(CHAOS_CLOCK="1") == 0, chaos.output()

        before = chaos.records()
        wake_up()
        assert chaos.records() == before
        assert "this one stops" in (chaos.run / "zombie.log").read_text()
    assert chaos.start_steps() == [0, 4, 4, 4, 4, 8, 8, 8, 8, 8, 12, 15], chaos.output()
    endings = {record["attempt"]: record for record in chaos.records("crash", "hang", "preempted")}
    assert [n for n, one in endings.items() if one["kind"] != "crash"] == [7, 11]
    assert "was killed by signal 9" in endings[2]["reason"]
    # The other rank loses its connection, and the launcher has its own exit code.
    raised = r"rank 1 on \S+: KeyError: 'a fault of this rank alone' \(pretrain/.*, line \d+\)"
    assert re.fullmatch(raised, endings[6]["reason"])
    assert "KeyError" in chaos.log.read_text()
    # Long before the limit of the start-up, which is ten minutes.
    hang, began = endings[7], chaos.records("attempt")[6]
    assert re.fullmatch(r"rank 1 \(pid \d+\) is stopped, as by SIGSTOP", hang["reason"])
    assert hang["time"] - began["time"] < 90
    # The launcher may look at the other rank first.
    named = "rank 1 ended without a message|the launcher ended with code"
    assert re.search(named, endings[8]["reason"])
    assert (endings[11]["kind"], endings[11]["step"]) == ("preempted", 15)
    chaos.assert_same_as(undisturbed)


@pytest.fixture
def run_disk(chaos):
    """Whether the run has a disk of its own to fill, with its ledger, metrics and logs."""
    chaos.run.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(chaos.run)]
    if subprocess.run(mount, capture_output=True).returncode:
        yield False
        return
    yield True
    chaos.clean_up()
    subprocess.run(["umount", "--lazy", str(chaos.run)], check=True)


def go_on_in_the_next_attempt(chaos):
    """Let the paused ranks wait until the next attempt is launched, whose ranks pause later."""
    next_log = chaos.run / "logs" / f"attempt-{len(chaos.start_steps()) + 1:03d}.log"
    chaos.wait_for(next_log.exists)
    chaos.go_on()


@contextlib.contextmanager
def zombie(chaos, config):
    """A first attempt whose rank 0 is frozen before it commits; yields what continues it.

    It behaves as on a node that no supervisor can see: its processes have another mark, and its
    lock is lost, as on some network file systems.
    """
    elsewhere = chaos.run.with_name("elsewhere")
    launcher = start_by_hand(chaos, config, processes.mark(elsewhere))

    def wake_up():
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        assert launcher.wait(PATIENCE) != 0

    try:
        chaos.wait_for(lambda: is_stopped(elsewhere, "0"))
        frozen = [member.pid for member in processes.members(elsewhere)]
        (chaos.run / "train.lock").unlink()
        yield wake_up
    finally:
        processes.end_all(elsewhere, 0.0, launcher=launcher.pid)
        launcher.wait()


def test_a_recipe_that_only_ranks_can_refuse_is_refused_once(chaos, tmp_path):
    settings = json.loads((DS_CONFIGS / "zero1_fp32.json").read_text())
    settings["zero_optimization"]["stagee"] = 1
    (tmp_path / "wrong.json").write_text(json.dumps(settings))
    assert chaos.supervise(f"training.deepspeed={tmp_path / 'wrong.json'}") == 2, chaos.output()
    assert "error: rank 0, 1 on" in chaos.log.read_text()
    assert "unknown key 'stagee'; did you mean 'stage'" in chaos.log.read_text()
    assert len(list((chaos.run / "logs").iterdir())) == 1
    assert not chaos.kinds("crash")


@pytest.mark.parametrize(
    ("module", "retries"), [("deepspeed", 1), ("safetensors", 0)], ids=["launcher", "ranks"]
)
def test_a_broken_installation_is_given_up_after_the_retries(module, retries, chaos, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / f"{module}.py").write_text("raise ImportError('libfoo.so.1: cannot open')\n")
    path = os.pathsep.join([str(broken), str(ROOT)])
    words = f"supervision.max_retries={retries}"
    assert chaos.supervise(words, PYTHONPATH=path) == 1, chaos.output()
    assert chaos.kinds("crash", "gave-up") == [*["crash"] * (retries + 1), "gave-up"]
    reason = chaos.records("gave-up")[0]["reason"]
    assert f"{count(retries + 1, 'attempt')} failed without a new checkpoint" in reason
    assert "ImportError: libfoo.so.1: cannot open" in chaos.output()


def test_non_finite_updates_are_rolled_back_to_the_checkpoint_before_them(attempt, chaos, recipe):
    """ZeRO skips them, so the checkpoint of step 8 is as good as any before it."""
    nan = {"what": "nan-gradients", "step": 8}
    assert [code for code, *_ in attempt("first", nan)] == [EXIT_SPIKE] * 2
    (spike,) = chaos.records("spike")
    assert (spike["channel"], spike["onset"], spike["step"]) == ("non-finite", 8, 9)
    rollback = decide.decide(chaos.records(), recipe.load(chaos.run, *SHORT))
    assert (rollback.step, rollback.rung) == (8, 1)
    assert chaos.kinds("crash", "hang", "discontinuity") == []
    assert all(tensor.isfinite().all() for tensor in weights_of(chaos.run, 8).values())


def start_by_hand(chaos, config, mark):
    """Do what a supervisor does for the first attempt, with another mark."""
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

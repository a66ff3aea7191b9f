"""What the supervisor decides, and how it ends processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain import supervisor
from pretrain.config import RunConfig, SpikeConfig, TrainingConfig
from pretrain.spikes import GiveUp, Rollback
from pretrain.supervisor import Finished, Launch, decide

CONFIG = RunConfig(
    training=TrainingConfig(seed=1, checkpoint_interval=100, checkpoints_kept=5),
    spike=SpikeConfig(margin_steps=100, max_rollbacks=2, max_crashes=2),
)

CREATED, ATTEMPT, DONE = ("created", {}), ("attempt", {}), ("done", {"step": 900})


def commit(step):
    return ("commit", {"step": step})


def spike(onset):
    return ("spike", {"onset": onset, "step": onset + 50})


def crash(reason="it fell over"):
    return ("crash", {"reason": reason})


def rollback(step, seed):
    return ("rollback", {"step": step, "seed": seed})


@pytest.mark.parametrize(
    ("told", "events", "decision"),
    [
        ("nothing yet", [], Launch()),
        ("created", [CREATED], Launch()),
        ("killed with its supervisor", [CREATED, ATTEMPT, commit(100)], Launch()),
        ("crashed once", [CREATED, ATTEMPT, crash()], Launch()),
        ("done", [CREATED, ATTEMPT, commit(900), DONE], Finished()),
        ("done after a crash", [CREATED, ATTEMPT, crash(), ATTEMPT, DONE], Finished()),
        (
            "spiked",
            [ATTEMPT, commit(100), commit(200), commit(300), spike(350)],
            Rollback(200, 2),
        ),
        ("spiked before any checkpoint", [ATTEMPT, spike(40)], Rollback(0, 2)),
        (
            "a suspicion that healed",
            [ATTEMPT, ("suspect", {"onset": 5}), ("healed", {"onset": 5})],
            Launch(),
        ),
        (
            "rolled back already",
            [ATTEMPT, commit(100), spike(350), rollback(100, 2)],
            Launch(),
        ),
        (
            "spiked again",
            [ATTEMPT, commit(100), commit(200), spike(350), rollback(200, 2), ATTEMPT, spike(320)],
            Rollback(200, 3),
        ),
        (
            "rejected the checkpoint it would take",
            [commit(100), commit(200), ("reject", {"step": 200}), spike(350)],
            Rollback(100, 2),
        ),
        (
            "spiked, and its launcher fell over on the way out",
            [ATTEMPT, commit(200), spike(350), crash()],
            Rollback(200, 2),
        ),
    ],
)
def test_what_follows_from_a_ledger(told, events, decision):
    assert decide(records(events), CONFIG) == decision


def records(events):
    return [{"number": n, "kind": kind, **fields} for n, (kind, fields) in enumerate(events)]


def test_rollbacks_have_a_budget():
    events = [commit(100), spike(300), rollback(100, 2), spike(300), rollback(100, 3)]
    assert decide(records(events), CONFIG) == Launch()
    decision = decide(records([*events, spike(300)]), CONFIG)
    assert isinstance(decision, GiveUp)
    assert "structural" in decision.reason


def test_crashes_have_a_budget_that_progress_restores():
    events = [ATTEMPT, crash("a"), ATTEMPT, crash("b")]
    assert decide(records(events), CONFIG) == Launch()
    given_up = decide(records([*events, ATTEMPT, crash("no space left")]), CONFIG)
    assert isinstance(given_up, GiveUp)
    assert "3 attempts ended without a new checkpoint" in given_up.reason
    assert "no space left" in given_up.reason
    assert decide(records([*events, commit(100), crash("c")]), CONFIG) == Launch()
    assert decide(records([*events, rollback(0, 2), crash("c")]), CONFIG) == Launch()


def test_crashes_are_counted_from_the_last_progress():
    some = [crash("a"), commit(100), crash("b"), ATTEMPT, crash("c")]
    counted = supervisor.crashes_without_progress(records(some))
    assert [record["reason"] for record in counted] == ["b", "c"]
    assert supervisor.crashes_without_progress([]) == []


def test_a_person_who_starts_again_after_it_gave_up_gets_a_new_budget_of_crashes():
    events = [crash()] * 3
    assert isinstance(decide(records(events), CONFIG), GiveUp)
    assert decide(records([*events, ("gave-up", {"reason": "x"})]), CONFIG) == Launch()


@pytest.fixture
def opened():
    """Supervisors that are opened here give their lock back at the end."""
    kept = []

    def open_one(config, **keywords):
        kept.append(supervisor.Supervisor(config, **keywords))
        return kept[-1]

    yield open_one
    for one in kept:
        one._lock.close()


def test_a_second_supervisor_of_a_run_is_refused(opened, tmp_path):
    config = RunConfig(folder=str(tmp_path / "run"))
    first = opened(config)
    with pytest.raises(ValueError, match=f"in use by another supervisor .process {os.getpid()}"):
        supervisor.Supervisor(config)
    opened(RunConfig(folder=str(tmp_path / "other")))
    first._lock.close()
    opened(config)


def process(run, code):
    """A process of a run, ready when this returns."""
    environment = {**os.environ, supervisor.RUN_VARIABLE: str(run.resolve())}
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(1, flush=True); import time; time.sleep(60)"],
        env=environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout.readline() == b"1\n"
    child.stdout.close()
    return child


def test_every_process_of_a_run_is_ended_even_one_that_ignores_the_signal(tmp_path):
    run, other = tmp_path / "run", tmp_path / "run-2"
    polite = process(run, "pass")
    stubborn = process(run, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    stranger = process(other, "pass")
    try:
        assert set(supervisor.processes_of(run)) == {polite.pid, stubborn.pid}
        supervisor.end_processes(run, grace_seconds=0.6)
        assert polite.wait(5) == -signal.SIGTERM
        assert stubborn.wait(5) == -signal.SIGKILL
        assert supervisor.processes_of(run) == []
        assert stranger.poll() is None
    finally:
        supervisor.end_processes(run, grace_seconds=0)
        supervisor.end_processes(other, grace_seconds=0)
        stranger.wait(5)


def test_a_grandchild_in_another_session_is_found(tmp_path):
    code = (
        "import subprocess, sys; "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True, stdout=subprocess.DEVNULL)"
    )
    child = process(tmp_path, code)
    assert len(supervisor.processes_of(tmp_path)) == 2
    supervisor.end_processes(tmp_path, grace_seconds=5)
    child.wait(5)
    assert supervisor.processes_of(tmp_path) == []


class Launcher:
    """Stands in for the `deepspeed` program: a short Python script an attempt."""

    def __init__(self, monkeypatch, *scripts):
        self.scripts, self.started = list(scripts), 0
        monkeypatch.setattr(supervisor, "launch_command", self.command)

    def command(self, config, run, port):
        script = self.scripts[self.started]
        self.started += 1
        head = f"from pretrain import ledger; from pathlib import Path; p = Path({str(run)!r})"
        append = "a = lambda kind, **f: ledger.append(p / 'ledger.jsonl', kind, **f)"
        return [sys.executable, "-c", f"{head}\n{append}\n{script}"]


def supervise(opened, folder, said, **spike):
    policy = {"margin_steps": 100, "max_crashes": 2, **spike}
    config = RunConfig(folder=str(folder), spike=SpikeConfig(**policy))
    return opened(config, write=said.append, poll_seconds=0.05).run()


def test_exit_code_0_without_a_finished_run_is_a_crash(opened, tmp_path, monkeypatch):
    """The launcher's code can lie: only the ledger counts."""
    said = []
    launcher = Launcher(
        monkeypatch,
        "a('attempt'); print('the last words')",
        "a('attempt'); a('commit', step=5); a('done', step=5); raise SystemExit(9)",
    )
    assert supervise(opened, tmp_path, said) == 0
    assert launcher.started == 2
    told = "".join(said)
    assert "attempt 1 failed: the launcher ended with code 0 and the run is not done" in told
    assert "the last words" in told
    assert "finished" in told


def test_what_the_user_wrote_wrongly_is_not_tried_again(opened, tmp_path, monkeypatch):
    said = []
    launcher = Launcher(monkeypatch, "print('error: no such thing'); raise SystemExit(2)")
    assert supervise(opened, tmp_path, said) == 2
    assert launcher.started == 1
    assert "no such thing" in "".join(said)


def test_it_gives_up_when_attempts_keep_failing_and_leaves_its_reason(
    opened, tmp_path, monkeypatch
):
    said = []
    launcher = Launcher(monkeypatch, *["a('attempt'); raise SystemExit(7)"] * 5)
    assert supervise(opened, tmp_path, said) == 1
    assert launcher.started == 3
    last = supervisor.ledger.read(tmp_path / "ledger.jsonl")[-1]
    assert last["kind"] == "gave-up"
    assert "code 7" in last["reason"]


def test_an_attempt_that_falls_silent_is_ended_and_launched_again(opened, tmp_path, monkeypatch):
    said = []
    launcher = Launcher(
        monkeypatch,
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "a('attempt'); time.sleep(60)",
        "a('attempt'); a('done', step=1)",
    )
    started = time.monotonic()
    assert supervise(opened, tmp_path, said, hang_seconds=2.0) == 0
    assert time.monotonic() - started < 30
    assert launcher.started == 2
    assert "nothing was heard of it for 2 s" in "".join(said)


def test_a_spike_is_told_and_rolled_back(opened, tmp_path, monkeypatch):
    said = []
    Launcher(
        monkeypatch,
        "a('attempt'); a('commit', step=100)\n"
        "a('spike', onset=250, step=260, loss=9.0, baseline=3.0); raise SystemExit(75)",
        "a('attempt'); a('done', step=300)",
    )
    assert supervise(opened, tmp_path, said) == 0
    told = "".join(said)
    assert "LOSS SPIKE at step 260: loss 9.00 against 3.00, since step 250" in told
    assert "rolling back to the checkpoint of step 100, going on with seed 2" in told
    kinds = [record["kind"] for record in supervisor.ledger.read(tmp_path / "ledger.jsonl")]
    assert kinds == ["attempt", "commit", "spike", "rollback", "attempt", "done"]


def test_ranks_are_the_visible_gpus_or_two(monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda path, pattern: ["nvidia0", "nvidia1", "nvidia2"])
    for visible, ranks in [("0", 1), ("0,2", 2), ("0,1,2", 3), ("", 2)]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert supervisor.default_ranks() == ranks, visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert supervisor.default_ranks() == 3
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [])
    assert supervisor.default_ranks() == 2


def test_the_newest_line_of_a_growing_file_is_followed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = supervisor._Follower(path)
    assert follower.newest() is None
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert follower.newest() == {"step": 2}
    assert follower.newest() is None
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert follower.newest() == {"step": 3}

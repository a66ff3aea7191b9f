"""The supervisor; small scripts replace the launcher."""

import contextlib
import errno
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep.common import files
from data_prep.common.exit_codes import EXIT_FAILED, EXIT_PREEMPTED
from pretrain.config.run import RunConfig
from pretrain.config.sections import NotifyConfig, SupervisionConfig
from pretrain.processes import processes
from pretrain.records import control, failures, heartbeat, ledger, metrics, progress
from pretrain.records import folder as run_folder
from pretrain.supervision import jobs, launch, supervisor
from pretrain.supervision.decide import Problem
from tests.pretrain.builders import commit_checkpoint

ROOT = Path(__file__).parents[3]


@pytest.fixture
def opened():
    """Create supervisors whose locks are released after the test."""
    supervisors = []

    def open_one(config, **keywords):
        supervisors.append(supervisor.Supervisor(config, **keywords))
        return supervisors[-1]

    yield open_one
    for one in supervisors:
        one._lock.close()


def test_a_second_supervisor_of_a_run_is_refused(opened, tmp_path):
    config = RunConfig(folder=str(tmp_path / "run"))
    first = opened(config)
    with pytest.raises(ValueError, match=f"in use by another supervisor .process {os.getpid()}"):
        supervisor.Supervisor(config)
    opened(RunConfig(folder=str(tmp_path / "other")))
    first._lock.close()
    opened(config)


STEPS = RunConfig().training.steps
HEAD = """
import os, signal, sys, time
from pathlib import Path
from pretrain.records import ledger
from pretrain.records import control
from pretrain.records import failures, heartbeat
run, token = Path({run!r}), os.environ["ZEROCLAP_ATTEMPT"]
def record(kind, **fields):
    number = control.read_control_file(run).attempt
    defaults = {{"token": token, "step": 0, "attempt": number, "ranks": 2, "seed": 1}}
    defaults |= {{"host": "here", "hosts": ["here"] * 2}}
    if kind == "done":
        defaults["step"] = STEPS
    ledger.append(run / "ledger.jsonl", kind, **{{**defaults, **fields}})
""".replace("STEPS", str(STEPS))


class Launcher:
    """Replaces the `deepspeed` program by a short Python script for each attempt."""

    def __init__(self, monkeypatch, *scripts):
        self.scripts, self.started = list(scripts), 0
        monkeypatch.setattr(launch, "command", self.command)

    def command(self, run, control_file, node=0):
        self.started = control_file.attempt
        script = self.scripts[min(control_file.attempt, len(self.scripts)) - 1]
        return [sys.executable, "-c", HEAD.format(run=str(run)) + script]


def supervise(opened, folder, output, **supervision):
    limits = {"max_retries": 2, **supervision}
    config = RunConfig(folder=str(folder), supervision=SupervisionConfig(**limits))
    return opened(config, write=output.append, poll_seconds=0.05).run()


def kinds(folder):
    return [record["kind"] for record in ledger.read_ledger(folder / "ledger.jsonl")]


def test_exit_code_0_without_a_finished_run_is_a_crash(opened, tmp_path, monkeypatch):
    """The exit code of the launcher can be wrong; only the ledger counts."""
    output = []
    launcher = Launcher(
        monkeypatch,
        "record('attempt'); print('last lines of the log')",
        "record('attempt'); record('commit', step=5); record('done'); raise SystemExit(9)",
    )
    assert supervise(opened, tmp_path, output) == 0
    assert launcher.started == 2
    text = "".join(output)
    assert "attempt 1 failed: the launcher ended with code 0 before the run was done" in text
    assert "last lines of the log" in text
    assert "finished" in text


def test_the_first_launch_of_a_fork_that_is_refused_is_no_crash(opened, tmp_path, monkeypatch):
    """The attempts before the fork are the source's."""
    for kind in ("attempt", "commit", "segment"):
        ledger.append(tmp_path / "ledger.jsonl", kind, step=4, attempt=1, why="fork", run="a")
    launcher = Launcher(monkeypatch, "print('error: no such thing'); raise SystemExit(2)")
    assert supervise(opened, tmp_path, []) == 2
    assert launcher.started == 2  # numbers go on
    assert kinds(tmp_path) == ["attempt", "commit", "segment"]


FAILS = """
def fail(rank, code, error, unexpected):
    os.environ["RANK"] = str(rank)
    try:
        raise error
    except Exception as caught:
        failures.report(run, code, caught, unexpected)
closed = RuntimeError("gloo: Connection closed by peer")
"""


def test_a_recipe_that_a_rank_refuses_is_not_tried_again_whatever_the_launcher_reports(
    opened, tmp_path, monkeypatch
):
    """A launcher may exit with 1 whatever the exit codes of its ranks."""
    output = []
    refused = "fail(1, 2, ValueError('model.size: no such size'), False); raise SystemExit(1)"
    launcher = Launcher(monkeypatch, FAILS + refused)
    assert supervise(opened, tmp_path, output) == 2
    assert launcher.started == 1
    assert kinds(tmp_path) == []
    assert re.search(r"error: rank 1 on \S+: model.size: no such size", "".join(output))


def test_the_reason_is_the_first_error_and_not_a_lost_connection(opened, tmp_path, monkeypatch):
    output = []
    fails = (
        FAILS + "record('attempt'); print('the gloo', 'traceback of rank 0')\n"
        "fail(0, 1, closed, True); fail(1, 1, KeyError('wrong'), True); raise SystemExit(1)"
    )
    lost = FAILS + "record('attempt'); fail(0, 1, closed, True); raise SystemExit(247)"
    Launcher(monkeypatch, fails, lost, "record('attempt'); record('done')")
    assert supervise(opened, tmp_path, output) == 0
    reasons = [
        r["reason"] for r in ledger.read_ledger(tmp_path / "ledger.jsonl") if r["kind"] == "crash"
    ]
    assert re.fullmatch(r"rank 1 on \S+: KeyError: 'wrong'", reasons[0])
    assert reasons[1].startswith("rank 1 ended without a message; the launcher ended with code 247")
    text = "".join(output)
    assert "Traceback" in text
    assert "the gloo traceback" not in text


def test_an_error_without_a_supervisor_is_read_by_the_next_one(opened, tmp_path, monkeypatch):
    control.write(tmp_path, control.ControlFile("t", 1, control.RUN))
    ledger.append(tmp_path / "ledger.jsonl", "attempt", attempt=1, step=0, token="t")
    monkeypatch.setenv(control.TOKEN_VARIABLE, "t")
    monkeypatch.setenv("RANK", "1")
    failures.report(tmp_path, 1, ValueError("no such file"))
    monkeypatch.delenv(control.TOKEN_VARIABLE)
    Launcher(monkeypatch, "", "record('attempt'); record('done')")
    assert supervise(opened, tmp_path, []) == 0
    assert ledger.read_ledger(tmp_path / "ledger.jsonl")[1]["reason"].endswith(": no such file")


def test_progress_is_printed_once_for_a_step_and_an_adopted_launcher_has_no_exit_code(
    opened, tmp_path, monkeypatch
):
    line = json.dumps({**dict.fromkeys(metrics.NEEDED[metrics.METRICS], 1), "step": 7})
    script = (
        f"record('attempt'); (run / 'metrics.jsonl').write_text({line!r} + chr(10))\n"
        "time.sleep(1.5)"
    )
    Launcher(monkeypatch, script, "record('attempt'); record('done')")
    monkeypatch.setattr(jobs.Job, "code", lambda self: None)
    often = functools.partial(progress.ProgressPrinter, seconds=0.1)
    monkeypatch.setattr(progress, "ProgressPrinter", often)
    output = []
    config = RunConfig(folder=str(tmp_path))
    one = opened(config, write=output.append, poll_seconds=0.05)
    assert one.run() == 0
    assert re.findall(r"step +(\d+)/", "".join(output)) == ["8"]
    assert "failed: the launcher ended before the run was done" in "".join(output)


def test_the_last_step_is_printed_at_once_and_before_the_end_of_the_run(
    opened, tmp_path, monkeypatch
):
    common = dict.fromkeys(metrics.NEEDED[metrics.METRICS], 1)
    lines = [json.dumps({**common, "step": step}) + "\n" for step in (7, STEPS - 1)]
    script = (
        "record('attempt')\nwith (run / 'metrics.jsonl').open('a') as file:\n"
        f"    for line in {lines!r}:\n"
        "        file.write(line); file.flush(); time.sleep(0.5)\n"
        "record('done'); time.sleep(0.5)"
    )
    Launcher(monkeypatch, script)
    output = []
    assert supervise(opened, tmp_path, output) == 0
    told = [text.split()[1] for text in output if text.split()[1] in ("step", "done:")]
    assert told == ["step", "step", "done:"]


def test_a_launcher_that_fails_at_every_start_is_given_up_with_the_end_of_its_log(
    opened, tmp_path, monkeypatch
):
    output = []
    launcher = Launcher(monkeypatch, "raise ImportError('libfoo.so.1: no such file')")
    assert supervise(opened, tmp_path, output) == 1
    assert launcher.started == 3
    assert "3 attempts failed" in ledger.read_ledger(tmp_path / "ledger.jsonl")[-1]["reason"]
    assert "".join(output).count("ImportError: libfoo.so.1") == 3


def test_a_recipe_that_the_launcher_refuses_is_tried_once_by_each_supervisor(
    opened, tmp_path, monkeypatch
):
    launcher = Launcher(monkeypatch, "print('error: no such thing'); raise SystemExit(2)")
    for number in (1, 2):
        output = []
        assert supervise(opened, tmp_path, output) == 2
        assert launcher.started == number
        assert "no such thing" in "".join(output)


def test_each_validation_is_printed_with_the_best_one(opened, tmp_path, monkeypatch):
    line = {"attempt": 1, "perplexity": 20.0, "subsets": {}}
    script = "record('attempt')\nwith (run / 'validation.jsonl').open('a') as file:\n" + "".join(
        f"    file.write({json.dumps({**line, 'step': step, 'loss': loss})!r} + chr(10))\n"
        "    file.flush()\n    time.sleep(0.5)\n"
        for step, loss in ((100, 3.0), (200, 3.1))
    )
    Launcher(monkeypatch, script + "record('done')")
    output = []
    assert supervise(opened, tmp_path, output) == 0
    assert [text for text in output if text.startswith("[supervisor] validation")] == [
        "[supervisor] validation after 100 steps: loss 3.0000, perplexity 20.00\n",
        "[supervisor] validation after 200 steps: loss 3.1000, perplexity 20.00 "
        "(best 20.00 after 100)\n",
    ]


def test_a_recipe_that_was_accepted_once_is_tried_again(opened, tmp_path, monkeypatch):
    """A disk may have been full or unavailable."""
    Launcher(monkeypatch, "record('attempt'); raise SystemExit(1)", FAILS_ONCE)
    assert supervise(opened, tmp_path, []) == 0
    assert kinds(tmp_path) == ["attempt", "crash", "crash", "attempt", "done"]
    logs = [f"attempt-{number:03d}.log" for number in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == logs, (
        "one log for each launch"
    )


FAILS_ONCE = """
if not (run / "tried").exists():
    (run / "tried").touch()
    raise SystemExit(2)
record('attempt')
record('done')
"""


def test_a_silent_attempt_is_ended_and_launched_again(opened, tmp_path, monkeypatch):
    output = []
    hang = "record('attempt'); heartbeat.Heartbeat(run, token).beat('save', 7); time.sleep(60)"
    Launcher(monkeypatch, hang, "record('attempt'); record('done')")
    monkeypatch.setattr(heartbeat, "_SAVE_FACTOR", 0.1)
    assert supervise(opened, tmp_path, output, init_seconds=10.0) == 0
    assert kinds(tmp_path) == ["attempt", "hang", "attempt", "done"]
    reason = ledger.read_ledger(tmp_path / "ledger.jsonl")[1]["reason"]
    assert reason == "no heartbeat for 1 s in stage save, step 7"


def test_a_rank_that_is_stopped_during_the_start_up_is_a_hang(opened, tmp_path, monkeypatch):
    output = []
    script = (
        "record('attempt'); os.environ['RANK'] = '1'\n"
        "stop = 'import os, signal; os.kill(os.getpid(), signal.SIGSTOP)'\n"
        "os.execv(sys.executable, [sys.executable, '-c', stop])"
    )
    Launcher(monkeypatch, script, "record('attempt'); record('done')")
    assert supervise(opened, tmp_path, output, hang_seconds=1.0) == 0
    assert kinds(tmp_path) == ["attempt", "hang", "attempt", "done"]
    hang = ledger.read_ledger(tmp_path / "ledger.jsonl")[1]
    assert "rank 1 (pid" in hang["reason"]
    assert hang["reason"].endswith("is stopped, as by SIGSTOP")


def test_a_spike_is_rolled_back_and_told_as_is_the_end(opened, tmp_path, monkeypatch):
    run, told, output = tmp_path / "run", tmp_path / "told", []
    Launcher(
        monkeypatch,
        "record('segment', why='start', step=0, seed=1)\n"
        "record('attempt'); record('commit', step=100)\n"
        "record('spike', onset=250, step=260, loss=9.0, baseline=3.0, channel='fast')\n"
        "raise SystemExit(75)",
        "record('attempt', step=100); record('done')",
    )
    notify = NotifyConfig(["sh", "-c", f"cat >> {told}"])
    config = RunConfig(folder=str(run), notify=notify)
    assert opened(config, write=output.append, poll_seconds=0.05).run() == 0
    assert kinds(run)[1:] == ["attempt", "commit", "spike", "segment", "attempt", "done"]
    assert ledger.read_ledger(run / "ledger.jsonl")[4]["onset"] == 250
    assert "LOSS SPIKE" in "".join(output)
    rolled_back = "rolled back to the checkpoint of step 100, continuing with seed 2"
    assert rolled_back in "".join(output)
    events = [json.loads(line) for line in told.read_text().splitlines()]
    assert [event["event"] for event in events] == ["rollback", "done"]
    assert events[0]["text"].startswith(f"run: {rolled_back}")


SIGNAL = "os.kill(os.getppid(), {number:d})\n"
WAIT_FOR_REQUEST = (
    "while not control.stop_requested(run, token): time.sleep(0.05)\n"
    "record('commit', step=5)\n"
    "record('preempted', step=5, reason='requested'); raise SystemExit(76)"
)


def test_a_request_to_a_rank_stops_the_supervisor_as_well(opened, tmp_path, monkeypatch):
    Launcher(
        monkeypatch, "record('attempt'); record('preempted', reason='x'); raise SystemExit(76)"
    )
    assert supervise(opened, tmp_path, []) == EXIT_PREEMPTED


def test_it_stops_without_saving_after_the_time_limit_or_a_second_request(
    opened, tmp_path, monkeypatch
):
    monkeypatch.setattr(control, "_SAME_REQUEST_SECONDS", 0.1)
    signal_once = SIGNAL.format(number=signal.SIGTERM)
    once = f"record('attempt'); {signal_once}time.sleep(60)"
    twice = f"record('attempt'); {signal_once}time.sleep(0.5); {signal_once}time.sleep(60)"
    Launcher(monkeypatch, once, twice)
    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "_SAVE_SECONDS", 0.5)
        assert supervise(opened, tmp_path, []) == EXIT_PREEMPTED
    assert supervise(opened, tmp_path, []) == EXIT_PREEMPTED
    assert kinds(tmp_path) == ["attempt", "preempted"] * 2
    assert processes.members(tmp_path) == []


def test_ctrl_c_saves_before_it_stops(opened, tmp_path, monkeypatch):
    interrupts = SIGNAL.format(number=signal.SIGINT)
    Launcher(monkeypatch, f"record('attempt'); {interrupts}{WAIT_FOR_REQUEST}")
    output = []
    assert supervise(opened, tmp_path, output) == EXIT_PREEMPTED
    assert "finishes its current step and saves, which may take up to 240 s" in "".join(output)
    assert kinds(tmp_path) == ["attempt", "commit", "preempted"]
    assert processes.members(tmp_path) == []


def test_a_new_supervisor_adopts_an_attempt_that_still_runs(opened, tmp_path, monkeypatch):
    """Its supervisor was killed; no step of the attempt is lost."""
    Launcher(monkeypatch, f"record('attempt')\n{WAIT_FOR_REQUEST}")
    control_file = control.ControlFile("t", 1, control.RUN)
    control.write(tmp_path, control_file)
    command = launch.command(tmp_path, control_file)
    environment = launch.environment(tmp_path, control_file)
    child = subprocess.Popen(command, env=environment, start_new_session=True, cwd=ROOT)
    threading.Thread(target=child.wait, daemon=True).start()  # as init does
    output = []

    def listen(text):
        output.append(text)
        if "attempt 1 still runs; watching it" in text:
            os.kill(os.getpid(), signal.SIGUSR1)

    config = RunConfig(folder=str(tmp_path))
    assert opened(config, write=listen, poll_seconds=0.05).run() == EXIT_PREEMPTED
    assert len(output) > 1
    assert kinds(tmp_path) == ["attempt", "commit", "preempted"]


def test_the_ranks_that_a_killed_supervisor_left_are_ended_and_counted_as_a_crash(
    opened, tmp_path, monkeypatch
):
    Launcher(monkeypatch, "", "record('attempt'); record('done')")
    (tmp_path / "control").mkdir()
    ledger.append(tmp_path / "ledger.jsonl", "attempt", attempt=1, step=0, token="t")
    rank = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, processes.RUN_VARIABLE: processes.mark(tmp_path), "RANK": "0"},
    )
    assert supervise(opened, tmp_path, []) == 0
    rank.wait(5)
    assert kinds(tmp_path) == ["attempt", "crash", "attempt", "done"]


@pytest.mark.parametrize(
    ("script", "moment"),
    [
        ("record('attempt'); time.sleep(10); record('outlived')", "attempt 1: "),
        ("record('attempt')", "attempt 1 failed"),
    ],
)
def test_a_supervisor_that_stood_still_leaves_the_run_to_one_that_took_it_over_elsewhere(
    script, moment, opened, tmp_path, monkeypatch
):
    Launcher(monkeypatch, script)
    config, found = RunConfig(folder=str(tmp_path)), []
    saving = tmp_path / "checkpoints" / "step-00000200.t.partial"

    def state():
        return control.read_control_file(tmp_path), kinds(tmp_path), saving.exists()

    def listen(text):
        if moment in text:
            while not kinds(tmp_path):
                time.sleep(0.05)
            with monkeypatch.context() as elsewhere:  # it sees neither the lock nor the processes
                elsewhere.setattr(run_folder, "lock", lambda *_: contextlib.ExitStack())
                elsewhere.setattr(jobs, "find", lambda *_: None)
                elsewhere.setattr(processes, "end_all", lambda *_: None)
                opened(config, write=[].append)._take_over()
            saving.mkdir(parents=True)
            found.append(state())

    first = opened(config, write=listen, poll_seconds=0.05)
    for act in (first.run, lambda: first._record("gave-up")):
        with pytest.raises(ValueError, match="another supervisor has taken this run over"):
            act()
    assert found == [state()]
    assert not processes.members(tmp_path)


def test_a_launch_waits_for_room_on_the_disk_and_says_how_much_is_missing_where(
    opened, tmp_path, monkeypatch
):
    Launcher(monkeypatch, "record('attempt', step=100); record('done')")
    output = []
    ledger.append(tmp_path / "ledger.jsonl", "commit", attempt=1, step=100)
    folder = tmp_path / "checkpoints" / "step-00000100"
    folder.mkdir(parents=True)
    (folder / "weights.pt").write_bytes(b"w" * (needed := 20_000_000))
    left = folder.with_name("step-00000200.t.partial")
    left.mkdir()
    told = tmp_path / "told"
    monkeypatch.setattr(
        supervisor.shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=needed if told.exists() else 10),
    )
    notify = NotifyConfig(["sh", "-c", f"cat >> {told}"])
    config = RunConfig(folder=str(tmp_path), notify=notify)
    assert opened(config, write=output.append, poll_seconds=0.05).run() == 0
    events = [json.loads(line)["event"] for line in told.read_text().splitlines()]
    assert events == ["waiting", "done"]
    waited = [text for text in output if "waiting for room" in text]
    assert waited == [
        f"[supervisor] {tmp_path}: has 10 bytes free and needs {needed:,}; waiting for room\n"
    ]
    assert not left.exists()


def test_a_refusal_before_the_first_attempt_on_a_full_disk_is_tried_again(
    opened, tmp_path, monkeypatch
):
    full = tmp_path / "full"
    refused = f"open({str(full)!r}, 'w'); raise SystemExit(2)"
    Launcher(monkeypatch, refused, "record('attempt'); record('done')")
    monkeypatch.setattr(
        supervisor.shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=0 if full.exists() else 1 << 40),
    )

    def listen(text):
        if "waiting for room" in text:
            full.unlink()

    assert opened(RunConfig(folder=str(tmp_path)), write=listen, poll_seconds=0.05).run() == 0
    assert kinds(tmp_path) == ["crash", "attempt", "done"]


@pytest.mark.parametrize("name", ["control.json", "ledger.jsonl"])
def test_what_the_disk_refuses_for_a_while_ends_the_processes_and_is_a_crash(
    opened, tmp_path, monkeypatch, name
):
    """No launcher may be left running, and no attempt without a record of its end."""
    output, left = [], [0]
    Launcher(
        monkeypatch,
        "record('attempt'); (run / 'begun').touch(); time.sleep(60)",
        "record('attempt'); record('done')",
    )

    def refusing(action):
        def act(path, *arguments, **keywords):
            if path.name == name and left[0]:
                left[0] -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return action(path, *arguments, **keywords)

        return act

    def find_problem(self, job, watch, deadline):
        if job.control_file.attempt > 1 or not (tmp_path / "begun").exists():
            return None
        left[0] = 4
        return Problem("hang", "the test says so")

    def listen(text):
        output.append(text)
        if "trying again" in text:
            assert processes.members(tmp_path) == []

    monkeypatch.setattr(files, "AtomicFile", refusing(files.AtomicFile))
    monkeypatch.setattr(ledger, "append", refusing(ledger.append))
    monkeypatch.setattr(supervisor.Supervisor, "_problem", find_problem)
    config = RunConfig(folder=str(tmp_path))
    assert opened(config, write=listen, poll_seconds=0.05).run() == 0
    assert kinds(tmp_path) == ["attempt", "crash", "attempt", "done"]
    assert sum("trying again" in text for text in output) == 1


def test_a_disk_that_fails_for_good_ends_the_supervisor_with_a_message_and_no_process(
    opened, tmp_path, monkeypatch
):
    def fails(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "ledger.jsonl")

    monkeypatch.setattr(supervisor, "_DISK_SECONDS", 0.3)
    monkeypatch.setattr(ledger, "append", fails)
    Launcher(monkeypatch, "raise SystemExit(1)")
    output = []
    assert supervise(opened, tmp_path, output) == EXIT_FAILED
    assert "stopped: [Errno 5] Input/output error: 'ledger.jsonl'" in output[-1]
    assert processes.members(tmp_path) == []


def test_a_finished_run_with_a_damaged_last_checkpoint_continues_from_the_one_before(
    opened, tmp_path, monkeypatch
):
    """A finished run without damage is not launched again."""
    from pretrain.records import checkpoints

    def write(step):
        commit_checkpoint(
            tmp_path, step, lambda folder: (folder / "weights.pt").write_bytes(b"weights")
        )

    path, output = tmp_path / "ledger.jsonl", []
    ledger.append(path, "attempt", attempt=1, token="t", step=0, ranks=2, seed=1, host="here")
    for step in (5, 10):
        write(step)
        ledger.append(path, "commit", attempt=1, step=step)
    ledger.append(path, "done", attempt=1, step=STEPS)
    launcher = Launcher(
        monkeypatch,
        "",
        "record('attempt', step=5); record('commit', step=10); record('done')",
    )
    assert supervise(opened, tmp_path, output) == 0
    assert launcher.started == 0
    weights = checkpoints.folder_of(tmp_path, 10) / "weights.pt"
    weights.write_bytes(b"weighty")
    assert supervise(opened, tmp_path, output) == 0
    assert kinds(tmp_path)[-5:] == ["done", "reject", "attempt", "commit", "done"]
    assert f"checkpoint of step 10 rejected: {weights}: is not what was written" in "".join(output)


def test_a_run_that_is_trained_without_a_supervisor_is_refused_and_goes_on(
    opened, tmp_path, monkeypatch
):
    def refuse(run, name=run_folder.LOCK):  # as from a login node, where the lock is free
        if name == run_folder.LOCK:
            raise ValueError("elsewhere")

    Launcher(monkeypatch, "record('attempt'); record('done')")
    with run_folder.lock(tmp_path), pytest.raises(ValueError, match="being trained by another"):
        supervise(opened, tmp_path, [])
    control.write(tmp_path, healthy := control.ControlFile("t", 0, control.RUN))
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "check_not_elsewhere", refuse)
        with pytest.raises(ValueError, match="elsewhere"):
            supervise(opened, tmp_path, [])
    assert control.read_control_file(tmp_path) == healthy
    assert supervise(opened, tmp_path, []) == 0


def test_a_run_that_is_done_while_it_is_asked_to_stop_succeeds(opened, tmp_path):
    started = opened(RunConfig(folder=str(tmp_path)), write=[].append)
    started._stop_requests.count = 1
    facts = {"step": 0, "hosts": ["here"], "host": "here", "ranks": 1, "seed": 1}
    for number, code in ((1, EXIT_PREEMPTED), (2, None)):
        ledger.append(started.ledger, "attempt", attempt=number, **facts)
        if code is None:
            ledger.append(started.ledger, "done", attempt=number, step=STEPS)
        control_file = control.ControlFile("t", number, control.STOP)
        job = SimpleNamespace(control_file=control_file, log=tmp_path / "log", code=lambda: 0)
        assert started._conclude(job, None) == code
    assert started.run() == 0


def test_a_run_s_folder_that_is_gone_is_not_made_anew(opened, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(supervisor, "_DISK_SECONDS", 0.0)
    output = []
    started = supervisor.Supervisor(RunConfig(folder=str(run)), write=output.append)
    run.rename(tmp_path / "moved")
    assert started.run() == EXIT_FAILED
    assert f"is gone: it was moved or deleted, or its disk is not mounted: '{run}'" in output[0]
    assert not run.exists()


def test_a_dry_run_of_a_finished_run_says_so_and_changes_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger.append(path, "done", step=STEPS)
    before = path.read_bytes()
    config = RunConfig(folder=str(tmp_path))
    assert supervisor.forecast(config) == "next: nothing, the run is finished\n"
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == before


def test_it_uses_little_memory_and_no_torch(tmp_path):
    """Measured in a process of its own while it watches an attempt."""
    code = f"""
import sys, psutil
sys.path.insert(0, {str(ROOT)!r})
HEAD = {HEAD!r}
from pretrain.config.run import RunConfig
from pretrain.checks import recipe as recipe_checks, resume as resume_checks
from pretrain.records import report
from pretrain.supervision import agent, launch, supervisor
script = HEAD.format(run={str(tmp_path)!r}) + "record('attempt'); time.sleep(1); record('done')"
launch.command = lambda *a: [sys.executable, "-c", script]
def measured(self, job, watch=supervisor.Supervisor._watch):
    problem = watch(self, job)
    print("MB", psutil.Process().memory_info().rss / 1e6)
    return problem
supervisor.Supervisor._watch = measured
assert supervisor.Supervisor(RunConfig(folder={str(tmp_path)!r})).run() == 0
print("heavy:", sorted({{"torch", "deepspeed", "matplotlib"}} & {{*sys.modules}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "heavy: []" in done.stdout
    megabytes = float(done.stdout.split("MB ")[1].split()[0])
    assert megabytes < 100, megabytes

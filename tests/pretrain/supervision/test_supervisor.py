"""The supervisor; small scripts replace the launcher."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from data_prep.common import files
from data_prep.common.exit_codes import EXIT_FAILED, EXIT_PREEMPTED
from pretrain.config.run import RunConfig
from pretrain.config.sections import NotifyConfig, SupervisionConfig
from pretrain.processes import processes
from pretrain.records import checkpoints, control, failures, heartbeat, ledger, metrics, progress
from pretrain.records import folder as run_folder
from pretrain.records.segments import Course, Source
from pretrain.supervision import launch, supervisor
from pretrain.supervision.decide import Problem
from tests.pretrain.builders import commit_checkpoint, failing, step_record
from tests.running import ROOT, python

STEPS = RunConfig().training.steps
HEAD = """
import os, signal, sys, time
from pathlib import Path
from pretrain.records import ledger
from pretrain.records import control
from pretrain.records import failures, heartbeat
run, token = Path({run!r}), os.environ["ZEROCLAP_ATTEMPT"]
def wait_until_shown(text, times):
    while run.with_name("shown").read_text().count(text) < times:
        time.sleep(0.05)
def record(kind, **fields):
    number = control.read_control_file(run).attempt
    defaults = {{"token": token, "step": 0, "attempt": number, "ranks": 2, "seed": 1}}
    defaults |= {{"host": "here", "hosts": ["here"] * 2}}
    if kind == "done":
        defaults["step"] = STEPS
    ledger.append(run / "ledger.jsonl", kind, **{{**defaults, **fields}})
""".replace("STEPS", str(STEPS))
ENDS_WELL = "record('attempt'); record('done')"


class Stage:
    """A run whose launcher is a short Python script for each attempt, and what is printed."""

    def __init__(self, run, monkeypatch):
        self.run, self.ledger, self.output = run, run / ledger.FILE_NAME, []
        self.opened, self.scripts, self.started = [], (), 0
        self.told = run.with_name("told")
        self.listen = lambda text: None
        run.mkdir()
        run.with_name("shown").touch()
        monkeypatch.setattr(launch, "command", self.command)
        monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.05)
        monkeypatch.setattr(progress.ProgressPrinter, "_write", lambda _, text: self.write(text))

    def command(self, run, control_file, node=0):
        self.started = control_file.attempt
        script = self.scripts[min(control_file.attempt, len(self.scripts)) - 1]
        return [sys.executable, "-c", HEAD.format(run=str(run)) + script]

    def write(self, text):
        self.output.append(text)
        self.run.with_name("shown").write_text(self.text)
        self.listen(text)

    def open(self, **settings):
        """A supervisor whose lock is released after the test."""
        config = RunConfig(**{"folder": str(self.run), **settings})
        self.opened.append(supervisor.Supervisor(config))
        return self.opened[-1]

    def supervise(self, *scripts, **limits):
        """Run a supervisor, the last script in every later attempt; returns its exit code."""
        self.scripts, self.output = scripts, []
        supervision = SupervisionConfig(**{"max_retries": 2, **limits})
        notify = NotifyConfig(["sh", "-c", f"cat >> {self.told}; exit 3"])
        return self.open(supervision=supervision, notify=notify).run()

    @property
    def text(self):
        return "".join(self.output)

    @property
    def events(self):
        """What `notify.command` was told."""
        return [json.loads(line) for line in self.told.read_text().splitlines()]

    @property
    def records(self):
        return ledger.read_ledger(self.ledger)

    @property
    def kinds(self):
        return [record["kind"] for record in self.records]


@pytest.fixture
def stage(tmp_path, monkeypatch):
    made = Stage(tmp_path / "run", monkeypatch)
    yield made
    for one in made.opened:
        one._lock.close()


def test_a_second_supervisor_of_a_run_is_refused(stage, tmp_path):
    first = stage.open()
    with pytest.raises(ValueError, match=f"in use by another supervisor .process {os.getpid()}"):
        stage.open()
    stage.open(folder=str(tmp_path / "other"))
    first._lock.close()
    stage.open()


def test_exit_code_0_without_a_finished_run_is_a_crash(stage):
    """The exit code of the launcher can be wrong; only the ledger counts."""
    code = stage.supervise(
        "record('attempt'); print('last lines of the log')",
        "record('attempt'); record('commit', step=5); record('done'); raise SystemExit(9)",
    )
    assert (code, stage.started) == (0, 2)
    assert "attempt 1 failed: the launcher ended with code 0 before the run was done" in stage.text
    assert "last lines of the log" in stage.text
    assert "finished" in stage.text


def test_a_fork_that_the_launcher_refuses_is_tried_once_by_each_supervisor(stage):
    """That is no crash; the attempts before the fork are the source's."""
    for kind in ("attempt", "commit", "segment"):
        ledger.append(stage.ledger, kind, step=4, attempt=1, why="fork", run="a")
    for number in (2, 3):  # numbers go on
        assert stage.supervise("print('error: no such thing'); raise SystemExit(2)") == 2
        assert stage.started == number
        assert "no such thing" in stage.text
    assert stage.kinds == ["attempt", "commit", "segment"]


FAILS = """
def fail(rank, code, error, unexpected):
    os.environ["RANK"] = str(rank)
    try:
        raise error
    except Exception as caught:
        failures.report(run, code, caught, unexpected)
closed = RuntimeError("gloo: Connection closed by peer")
"""


def test_a_recipe_that_a_rank_refuses_is_not_tried_again_whatever_the_launcher_reports(stage):
    """A launcher may exit with 1 whatever the exit codes of its ranks."""
    refused = "fail(1, 2, ValueError('model.size: no such size'), False); raise SystemExit(1)"
    assert stage.supervise(FAILS + refused) == 2
    assert (stage.started, stage.kinds) == (1, [])
    assert re.search(r"error: rank 1 on \S+: model.size: no such size", stage.text)


def test_the_reason_is_the_first_error_and_not_a_lost_connection(stage):
    fails = (
        FAILS + "record('attempt'); print('the gloo', 'traceback of rank 0')\n"
        "fail(0, 1, closed, True); fail(1, 1, KeyError('wrong'), True); raise SystemExit(1)"
    )
    lost = FAILS + "record('attempt'); fail(0, 1, closed, True); raise SystemExit(247)"
    assert stage.supervise(fails, lost, ENDS_WELL) == 0
    reasons = [record["reason"] for record in stage.records if record["kind"] == "crash"]
    assert re.fullmatch(r"rank 1 on \S+: KeyError: 'wrong'", reasons[0])
    assert reasons[1].startswith("rank 1 ended without a message; the launcher ended with code 247")
    assert "Traceback" in stage.text
    assert "the gloo traceback" not in stage.text


def test_an_error_without_a_supervisor_is_read_by_the_next_one(stage, monkeypatch):
    control.write(stage.run, control.ControlFile("t", 1, control.RUN))
    ledger.append(stage.ledger, "attempt", attempt=1, step=0, token="t")
    monkeypatch.setenv(control.TOKEN_VARIABLE, "t")
    monkeypatch.setenv("RANK", "1")
    failures.report(stage.run, 1, ValueError("no such file"))
    monkeypatch.delenv(control.TOKEN_VARIABLE)
    assert stage.supervise("", ENDS_WELL) == 0
    assert stage.records[1]["reason"].endswith(": no such file")


def line_of(step):
    return json.dumps(metrics.line_of(step_record(step)))


def test_progress_is_printed_once_for_a_step_and_an_adopted_launcher_has_no_exit_code(
    stage, monkeypatch
):
    script = (
        f"record('attempt'); (run / 'metrics.jsonl').write_text({line_of(7)!r} + chr(10))\n"
        "time.sleep(1.5)"
    )
    monkeypatch.setattr(launch.Job, "code", lambda self: None)
    monkeypatch.setattr(progress, "_SECONDS", 0.1)
    assert stage.supervise(script, ENDS_WELL) == 0
    assert re.findall(r"step +(\d+)/", stage.text) == ["8"]
    assert "failed: the launcher ended before the run was done" in stage.text


def test_the_last_step_is_printed_at_once_and_before_the_end_of_the_run(stage):
    script = (
        "record('attempt')\nwith (run / 'metrics.jsonl').open('a') as file:\n"
        f"    for times, line in enumerate({[line_of(7), line_of(STEPS - 1)]!r}, start=1):\n"
        "        file.write(line + chr(10)); file.flush(); wait_until_shown('] step', times)\n"
        "record('done')"
    )
    assert stage.supervise(script) == 0
    told = [text.split()[1] for text in stage.output if text.split()[1] in ("step", "done:")]
    assert told == ["step", "step", "done:"]


def test_a_launcher_that_fails_at_every_start_is_given_up_and_told_with_the_end_of_its_log(stage):
    assert stage.supervise("raise ImportError('libfoo.so.1: no such file')") == 1
    assert stage.started == 3
    assert "3 attempts failed" in stage.records[-1]["reason"]
    assert stage.text.count("ImportError: libfoo.so.1") == 3
    assert [event["event"] for event in stage.events] == ["gave-up"]
    assert stage.text.count("WARNING: notify.command: ") == 1


def test_each_validation_is_printed_with_the_best_one(stage):
    line = {"attempt": 1, "perplexity": 20.0, "targets": 9, "subsets": {}}
    script = "record('attempt')\nwith (run / 'validation.jsonl').open('a') as file:\n" + "".join(
        f"    file.write({json.dumps({**line, 'step': step, 'loss': loss})!r} + chr(10))\n"
        f"    file.flush(); wait_until_shown('validation after {step} ', 1)\n"
        for step, loss in ((100, 3.0), (200, 3.1))
    )
    assert stage.supervise(script + "record('done')") == 0
    assert [text for text in stage.output if text.startswith("[supervisor] validation")] == [
        "[supervisor] validation after 100 steps: loss 3.0000, perplexity 20.00\n",
        "[supervisor] validation after 200 steps: loss 3.1000, perplexity 20.00 "
        "(best 20.00 after 100)\n",
    ]


def test_a_recipe_that_was_accepted_once_is_tried_again(stage):
    """A disk may have been full or unavailable."""
    first = "record('attempt'); raise SystemExit(1)"
    assert stage.supervise(first, "raise SystemExit(2)", ENDS_WELL) == 0
    assert stage.kinds == ["attempt", "crash", "crash", "attempt", "done"]
    logs = [f"attempt-{number:03d}.log" for number in (1, 2, 3)]  # one for each launch
    assert sorted(path.name for path in (stage.run / "logs").iterdir()) == logs


def test_a_silent_attempt_is_ended_and_launched_again(stage, monkeypatch):
    hang = "record('attempt'); heartbeat.Heartbeat(run, token).beat('save', 7); time.sleep(60)"
    monkeypatch.setattr(heartbeat, "_SAVE_FACTOR", 0.1)
    assert stage.supervise(hang, ENDS_WELL, init_seconds=10.0) == 0
    assert stage.kinds == ["attempt", "hang", "attempt", "done"]
    assert stage.records[1]["reason"] == "no heartbeat for 1 s in stage save, step 7"


def test_a_rank_that_is_stopped_during_the_start_up_is_a_hang(stage):
    script = (
        "record('attempt'); os.environ['RANK'] = '1'\n"
        "stop = 'import os, signal; os.kill(os.getpid(), signal.SIGSTOP)'\n"
        "os.execv(sys.executable, [sys.executable, '-c', stop])"
    )
    assert stage.supervise(script, ENDS_WELL, hang_seconds=1.0) == 0
    assert stage.kinds == ["attempt", "hang", "attempt", "done"]
    reason = r"rank 1 \(pid \d+\) is stopped, as by SIGSTOP"
    assert re.fullmatch(reason, stage.records[1]["reason"])


def test_a_spike_is_rolled_back_and_told_as_is_the_end(stage):
    code = stage.supervise(
        "record('segment', why='start', step=0, seed=1)\n"
        "record('attempt'); record('commit', step=100)\n"
        "record('spike', onset=250, step=260, loss=9.0, baseline=3.0, channel='fast')\n"
        "raise SystemExit(75)",
        "record('attempt', step=100); record('done')",
    )
    assert code == 0
    assert stage.kinds[1:] == ["attempt", "commit", "spike", "segment", "attempt", "done"]
    assert stage.records[4]["onset"] == 250
    assert "LOSS SPIKE" in stage.text
    rolled_back = "rolled back to the checkpoint of step 100, continuing with seed 2"
    assert rolled_back in stage.text
    assert [event["event"] for event in stage.events] == ["rollback", "done"]
    assert stage.events[0]["text"].startswith(f"run: {rolled_back}")


SIGNAL = "os.kill(os.getppid(), {number:d})\n"
WAIT_FOR_REQUEST = (
    "while not control.stop_requested(run, token): time.sleep(0.05)\n"
    "record('commit', step=5)\n"
    "record('preempted', step=5, reason='requested'); raise SystemExit(76)"
)


def test_a_request_to_a_rank_stops_the_supervisor_as_well(stage):
    stops = "record('attempt'); record('preempted', reason='x'); raise SystemExit(76)"
    assert stage.supervise(stops) == EXIT_PREEMPTED


def test_it_stops_without_saving_after_the_time_limit_or_a_second_request(stage, monkeypatch):
    monkeypatch.setattr(control, "_SAME_REQUEST_SECONDS", 0.1)
    signal_once = SIGNAL.format(number=signal.SIGTERM)
    once = f"record('attempt'); {signal_once}time.sleep(60)"
    twice = f"record('attempt'); {signal_once}time.sleep(0.5); {signal_once}time.sleep(60)"
    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "_SAVE_SECONDS", 0.5)
        assert stage.supervise(once) == EXIT_PREEMPTED
    assert stage.supervise(twice) == EXIT_PREEMPTED
    assert stage.kinds == ["attempt", "preempted"] * 2
    assert processes.members(stage.run) == []


def test_ctrl_c_saves_before_it_stops(stage):
    interrupts = SIGNAL.format(number=signal.SIGINT)
    assert stage.supervise(f"record('attempt'); {interrupts}{WAIT_FOR_REQUEST}") == EXIT_PREEMPTED
    assert "finishes its current step and saves, which may take up to 240 s" in stage.text
    assert stage.kinds == ["attempt", "commit", "preempted"]
    assert processes.members(stage.run) == []


def test_a_new_supervisor_adopts_an_attempt_that_still_runs(stage):
    """Its supervisor was killed; no step of the attempt is lost."""
    stage.scripts = [f"record('attempt')\n{WAIT_FOR_REQUEST}"]
    control_file = control.ControlFile("t", 1, control.RUN)
    control.write(stage.run, control_file)
    command = launch.command(stage.run, control_file)
    environment = launch.environment(stage.run, control_file)
    child = subprocess.Popen(command, env=environment, start_new_session=True, cwd=ROOT)
    threading.Thread(target=child.wait, daemon=True).start()  # as init does

    def listen(text):
        if "attempt 1 still runs; watching it" in text:
            os.kill(os.getpid(), signal.SIGUSR1)

    stage.listen = listen
    assert stage.open().run() == EXIT_PREEMPTED
    assert len(stage.output) > 1
    assert stage.kinds == ["attempt", "commit", "preempted"]


def test_the_ranks_that_a_killed_supervisor_left_are_ended_and_counted_as_a_crash(stage):
    ledger.append(stage.ledger, "attempt", attempt=1, step=0, token="t")
    rank = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, processes.RUN_VARIABLE: processes.mark(stage.run), "RANK": "0"},
    )
    assert stage.supervise("", ENDS_WELL) == 0
    rank.wait(5)
    assert stage.kinds == ["attempt", "crash", "attempt", "done"]


@pytest.mark.parametrize(
    ("script", "moment"),
    [
        ("record('attempt'); time.sleep(10); record('outlived')", "attempt 1: "),
        ("record('attempt')", "attempt 1 failed"),
    ],
)
def test_a_supervisor_that_stood_still_leaves_the_run_to_one_that_took_it_over_elsewhere(
    script, moment, stage, monkeypatch
):
    found = []
    saving = stage.run / "checkpoints" / "step-00000200.t.partial"

    def state():
        return control.read_control_file(stage.run), stage.kinds, saving.exists()

    def listen(text):
        if moment in text:
            stage.listen = lambda text: None
            while not stage.kinds:
                time.sleep(0.05)
            with monkeypatch.context() as elsewhere:  # it sees neither the lock nor the processes
                elsewhere.setattr(run_folder, "lock", lambda *_: contextlib.ExitStack())
                elsewhere.setattr(launch, "find", lambda *_: None)
                elsewhere.setattr(processes, "end_all", lambda *_: None)
                stage.open()._take_over()
            saving.mkdir(parents=True)
            found.append(state())

    stage.scripts, stage.listen = [script], listen
    first = stage.open()
    for act in (first.run, lambda: first._record("gave-up")):
        with pytest.raises(ValueError, match="another supervisor has taken this run over"):
            act()
    assert found == [state()]
    assert not processes.members(stage.run)


@pytest.fixture
def disk(monkeypatch):
    """`disk(free)` makes the disk have as many bytes as a function says."""
    return lambda free: monkeypatch.setattr(
        supervisor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free())
    )


def test_a_launch_waits_for_room_on_the_disk_and_says_how_much_is_missing_where(stage, disk):
    ledger.append(stage.ledger, "commit", attempt=1, step=100)
    folder = stage.run / "checkpoints" / "step-00000100"
    folder.mkdir(parents=True)
    (folder / "weights.pt").write_bytes(b"w" * (needed := 20_000_000))
    left = folder.with_name("step-00000200.t.partial")
    left.mkdir()
    disk(lambda: needed if stage.told.exists() else 10)
    assert stage.supervise("record('attempt', step=100); record('done')") == 0
    assert [event["event"] for event in stage.events] == ["waiting", "done"]
    assert [text for text in stage.output if "waiting for room" in text] == [
        f"[supervisor] {stage.run}: has 10 bytes free and needs {needed:,}; waiting for room\n"
    ]
    assert not left.exists()


def test_a_refusal_before_the_first_attempt_on_a_full_disk_is_tried_again(stage, disk, tmp_path):
    full = tmp_path / "full"
    disk(lambda: 0 if full.exists() else 1 << 40)
    stage.listen = lambda text: full.unlink() if "waiting for room" in text else None
    assert stage.supervise(f"open({str(full)!r}, 'w'); raise SystemExit(2)", ENDS_WELL) == 0
    assert stage.kinds == ["crash", "attempt", "done"]


@pytest.mark.parametrize(
    ("name", "number"), [("control.json", errno.EIO), ("ledger.jsonl", errno.ENOSPC)]
)
def test_what_the_disk_refuses_for_a_while_ends_the_processes_and_is_a_crash(
    stage, monkeypatch, name, number
):
    """No launcher may be left running, and no attempt without a record of its end."""
    left = []

    def find_problem(self, job, watch):
        if job.control_file.attempt > 1 or not (stage.run / "begun").exists():
            return None
        left[:] = [number] * 4
        return Problem("hang", "the test says so")

    def listen(text):
        if "trying again" in text:
            assert processes.members(stage.run) == []

    for module, action in ((files, "AtomicFile"), (ledger, "append")):
        monkeypatch.setattr(module, action, failing(getattr(module, action), left, name))
    monkeypatch.setattr(supervisor.Supervisor, "_problem", find_problem)
    stage.listen = listen
    begins = "record('attempt'); (run / 'begun').touch(); time.sleep(60)"
    assert stage.supervise(begins, ENDS_WELL) == 0
    assert stage.kinds == ["attempt", "crash", "attempt", "done"]
    assert sum("trying again" in text for text in stage.output) == 1


def test_a_disk_that_fails_for_good_ends_the_supervisor_with_a_message_and_no_process(
    stage, monkeypatch
):
    monkeypatch.setattr(supervisor, "_DISK_SECONDS", 0.3)
    monkeypatch.setattr(ledger, "append", failing(ledger.append, [errno.EIO] * 100))
    assert stage.supervise("raise SystemExit(1)") == EXIT_FAILED
    assert f"stopped: [Errno 5] Input/output error: '{stage.ledger}'" in stage.output[-1]
    assert processes.members(stage.run) == []


def test_a_finished_run_with_a_damaged_last_checkpoint_continues_from_the_one_before(stage):
    """A finished run without damage is not launched again."""
    ledger.append(
        stage.ledger, "attempt", attempt=1, token="t", step=0, ranks=2, seed=1, host="here"
    )
    for step in (5, 10):
        commit_checkpoint(
            stage.run, step, lambda folder: (folder / "weights.pt").write_bytes(b"weights")
        )
        ledger.append(stage.ledger, "commit", attempt=1, step=step)
    ledger.append(stage.ledger, "done", attempt=1, step=STEPS)
    again = "record('attempt', step=5); record('commit', step=10); record('done')"
    assert (stage.supervise(again), stage.started) == (0, 0)
    weights = checkpoints.folder_of(stage.run, 10) / "weights.pt"
    weights.write_bytes(b"weighty")
    assert stage.supervise(again) == 0
    assert stage.kinds[-5:] == ["done", "reject", "attempt", "commit", "done"]
    assert f"checkpoint of step 10 rejected: {weights}: is not what was written" in stage.text


def test_a_run_that_is_trained_without_a_supervisor_is_refused_and_goes_on(stage, monkeypatch):
    def refuse(run, name=run_folder.LOCK):  # as from a login node, where the lock is free
        if name == run_folder.LOCK:
            raise ValueError("elsewhere")

    with run_folder.lock(stage.run), pytest.raises(ValueError, match="being trained by another"):
        stage.supervise(ENDS_WELL)
    control.write(stage.run, healthy := control.ControlFile("t", 0, control.RUN))
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "check_not_elsewhere", refuse)
        patch.setattr(processes, "KILL_SECONDS", 0.0)
        with pytest.raises(ValueError, match="elsewhere"):
            stage.supervise(ENDS_WELL)
    assert control.read_control_file(stage.run) == healthy
    assert stage.supervise(ENDS_WELL) == 0


def test_a_killed_rank_that_has_yet_to_free_its_memory_is_waited_for(stage):
    held = f"held = folder.lock(Path({str(stage.run)!r})); print(1, flush=True)"
    code = f"from pathlib import Path; from pretrain.records import folder; {held}"
    code += "; from tests.running import exit_but_for; exit_but_for(1)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline() == b"1\n"
        assert stage.supervise(ENDS_WELL) == 0


def test_a_run_that_is_done_while_it_is_asked_to_stop_succeeds(stage):
    started = stage.open()
    started._stop_requests.count = 1
    facts = {"step": 0, "hosts": ["here"], "host": "here", "ranks": 1, "seed": 1}
    for number, code in ((1, EXIT_PREEMPTED), (2, None)):
        ledger.append(stage.ledger, "attempt", attempt=number, **facts)
        if code is None:
            ledger.append(stage.ledger, "done", attempt=number, step=STEPS)
        control_file = control.ControlFile("t", number, control.STOP)
        job = SimpleNamespace(control_file=control_file, log=stage.run / "log", code=lambda: 0)
        assert started._conclude(job, None) == code
    assert started.run() == 0


def test_a_run_s_folder_that_is_gone_is_not_made_anew(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_DISK_SECONDS", 0.0)
    started = stage.open()
    stage.run.rename(tmp_path / "moved")
    assert started.run() == EXIT_FAILED
    gone = f"is gone: it was moved or deleted, or its disk is not mounted: '{stage.run}'"
    assert gone in stage.output[0]
    assert not stage.run.exists()


def test_a_dry_run_says_what_comes_next_and_changes_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    config = RunConfig(folder=str(tmp_path), supervision=SupervisionConfig(max_retries=0))
    for kind, fields, forecast in (
        ("crash", {"reason": "no memory"}, "give up: 1 attempt failed without a new checkpoint"),
        ("segment", {"why": "start", "step": 0, "seed": 1}, "launch an attempt\nfrom step 0: "),
        ("spike", {"onset": 5, "step": 9, "channel": "fast"}, "roll back to step 0, with seed 2\n"),
        ("done", {"step": STEPS}, "nothing, the run is finished\n"),
    ):
        ledger.append(path, kind, **fields)
        before = path.read_bytes()
        course = Course(config, config.segments, {})
        assert supervisor.forecast(course).startswith(f"next: {forecast}")
        assert [*tmp_path.iterdir()] == [path]
        assert path.read_bytes() == before
    course = dataclasses.replace(course, why=ledger.USER, source=Source(20))
    assert supervisor.forecast(course).startswith("next: launch an attempt\nfrom step 20: ")
    with run_folder.lock(tmp_path):  # as seen from a machine without its processes
        assert supervisor.forecast(course).startswith(f"next: nothing here, process {os.getpid()} ")


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
    printed = python("-c", code)
    assert "heavy: []" in printed
    megabytes = float(printed.split("MB ")[1].split()[0])
    assert megabytes < 100, megabytes

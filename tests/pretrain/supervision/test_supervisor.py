"""What the supervisor does, with small scripts in place of the launcher."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data_prep import files
from pretrain.config.run import RunConfig, SupervisionConfig
from pretrain.exit_codes import EXIT_PREEMPTED
from pretrain.run import ledger, metrics
from pretrain.supervision import control as orders
from pretrain.supervision import failures, jobs, launch, processes, supervisor
from pretrain.supervision.watch import Complaint

ROOT = Path(__file__).parents[3]


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


HEAD = """
import os, signal, sys, time
from pathlib import Path
from pretrain.run import ledger
from pretrain.supervision import control as orders
from pretrain.supervision import failures, heartbeat
run, token = Path({run!r}), os.environ["ZEROCLAP_ATTEMPT"]
def tell(kind, **fields):
    usual = {{"token": token, "step": 0, "attempt": 1, "ranks": 2, "seed": 1, "host": "here"}}
    ledger.append(run / "ledger.jsonl", kind, **{{**usual, **fields}})
"""


class Launcher:
    """Stands in for the `deepspeed` program: a short Python script an attempt."""

    def __init__(self, monkeypatch, *scripts):
        self.scripts, self.started = list(scripts), 0
        monkeypatch.setattr(launch, "command", self.command)

    def command(self, config, run, order, node=0):
        self.started = order.attempt
        script = self.scripts[min(order.attempt, len(self.scripts)) - 1]
        return [sys.executable, "-c", HEAD.format(run=str(run)) + script]


def supervise(opened, folder, said, **supervision):
    limits = {"max_crashes": 2, "grace_seconds": 2.0, **supervision}
    config = RunConfig(folder=str(folder), supervision=SupervisionConfig(**limits))
    return opened(config, write=said.append, poll_seconds=0.05).run()


def told(folder):
    return [record["kind"] for record in ledger.read(folder / "ledger.jsonl")]


def test_exit_code_0_without_a_finished_run_is_a_crash(opened, tmp_path, monkeypatch):
    """The launcher's code can lie: only the ledger counts."""
    said = []
    launcher = Launcher(
        monkeypatch,
        "tell('attempt'); print('the last words')",
        "tell('attempt'); tell('commit', step=5); tell('done', step=5); raise SystemExit(9)",
    )
    assert supervise(opened, tmp_path, said) == 0
    assert launcher.started == 2
    words = "".join(said)
    assert "attempt 1 failed: the launcher ended with code 0 and the run is not done" in words
    assert "the last words" in words
    assert "finished" in words


def test_what_the_user_wrote_wrongly_is_not_tried_again(opened, tmp_path, monkeypatch):
    said = []
    launcher = Launcher(monkeypatch, "print('error: no such thing'); raise SystemExit(2)")
    assert supervise(opened, tmp_path, said) == 2
    assert launcher.started == 1
    assert "no such thing" in "".join(said)


FAILS = """
def fail(rank, code, error, unexpected):
    os.environ["RANK"] = str(rank)
    try:
        raise error
    except Exception as caught:
        failures.report(run, code, caught, unexpected)
closed = RuntimeError("gloo: Connection closed by peer")
"""


def test_a_recipe_that_a_rank_refuses_ends_the_supervisor_whatever_its_launcher_says(
    opened, tmp_path, monkeypatch
):
    """torchrun ends with 1 whatever its ranks end with."""
    said = []
    refused = "fail(1, 2, ValueError('model.size: no such size'), False); raise SystemExit(1)"
    launcher = Launcher(monkeypatch, FAILS + refused)
    assert supervise(opened, tmp_path, said) == 2
    assert launcher.started == 1
    assert told(tmp_path) == []
    assert re.search(r"error: rank 1 on \S+: model.size: no such size", "".join(said))


def test_the_reason_is_the_first_error_and_not_the_connection_that_it_cost_others(
    opened, tmp_path, monkeypatch
):
    said = []
    fails = (
        FAILS + "tell('attempt'); print('the gloo', 'traceback of rank 0')\n"
        "fail(0, 1, closed, True); fail(1, 1, KeyError('wrong'), True); raise SystemExit(1)"
    )
    lost = FAILS + "tell('attempt', attempt=2); fail(0, 1, closed, True); raise SystemExit(247)"
    Launcher(monkeypatch, fails, lost, "tell('attempt', attempt=3); tell('done')")
    assert supervise(opened, tmp_path, said) == 0
    reasons = [r["reason"] for r in ledger.read(tmp_path / "ledger.jsonl") if r["kind"] == "crash"]
    assert re.fullmatch(r"rank 1 on \S+: KeyError: 'wrong'", reasons[0])
    assert reasons[1].startswith("rank 1 ended without a message; the launcher ended with code 247")
    words = "".join(said)
    assert "Traceback" in words
    assert "the gloo traceback" not in words


def test_an_error_that_nobody_watched_is_read_by_the_next_supervisor(opened, tmp_path, monkeypatch):
    orders.give(tmp_path, orders.Order("t", 1, orders.RUN))
    ledger.append(tmp_path / "ledger.jsonl", "attempt", attempt=1, step=0, token="t")
    monkeypatch.setenv(orders.TOKEN_VARIABLE, "t")
    monkeypatch.setenv("RANK", "1")
    failures.report(tmp_path, 1, ValueError("no such file"))
    monkeypatch.delenv(orders.TOKEN_VARIABLE)
    Launcher(monkeypatch, "", "tell('attempt'); tell('done')")
    assert supervise(opened, tmp_path, []) == 0
    assert ledger.read(tmp_path / "ledger.jsonl")[1]["reason"].endswith(": no such file")


def test_progress_is_told_once_a_step_and_an_adopted_launcher_has_no_code(
    opened, tmp_path, monkeypatch
):
    line = json.dumps({**dict.fromkeys(metrics.NEEDED[metrics.METRICS], 1), "step": 7})
    script = (
        f"tell('attempt'); (run / 'metrics.jsonl').write_text({line!r} + chr(10)); time.sleep(1.5)"
    )
    Launcher(monkeypatch, script, "tell('attempt'); tell('done')")
    monkeypatch.setattr(jobs.Job, "code", lambda self: None)
    said = []
    config = RunConfig(folder=str(tmp_path))
    one = opened(config, write=said.append, poll_seconds=0.05, progress_seconds=0.1)
    assert one.run() == 0
    assert re.findall(r"step +(\d+)/", "".join(said)) == ["8"]
    assert "failed: the launcher ended and the run is not done" in "".join(said)


def test_what_was_right_at_first_and_is_refused_later_is_tried_again(opened, tmp_path, monkeypatch):
    """A disk was full, or away."""
    Launcher(monkeypatch, "tell('attempt'); raise SystemExit(1)", FAILS_ONCE)
    assert supervise(opened, tmp_path, []) == 0
    assert told(tmp_path) == ["attempt", "crash", "crash", "attempt", "done"]
    logs = [f"attempt-{number:03d}.log" for number in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == logs, "one a launch"


FAILS_ONCE = """
if not (run / "tried").exists():
    (run / "tried").touch()
    raise SystemExit(2)
tell('attempt')
tell('done')
"""


def test_it_gives_up_when_attempts_keep_failing_and_leaves_its_reason(
    opened, tmp_path, monkeypatch
):
    said = []
    launcher = Launcher(monkeypatch, *["tell('attempt'); raise SystemExit(7)"] * 5)
    assert supervise(opened, tmp_path, said) == 1
    assert launcher.started == 3
    last = ledger.read(tmp_path / "ledger.jsonl")[-1]
    assert last["kind"] == "gave-up"
    assert "code 7" in last["reason"]


def test_an_attempt_that_falls_silent_is_ended_and_launched_again(opened, tmp_path, monkeypatch):
    said = []
    hang = "tell('attempt'); heartbeat.Heartbeat(run, token).beat('step', 7); time.sleep(60)"
    Launcher(monkeypatch, hang, "tell('attempt'); tell('done')")
    assert supervise(opened, tmp_path, said, hang_seconds=1.0) == 0
    assert told(tmp_path) == ["attempt", "hang", "attempt", "done"]
    reason = ledger.read(tmp_path / "ledger.jsonl")[1]["reason"]
    assert reason == "nothing was heard of it for 1 s in phase step, step 7"


def test_a_rank_that_is_stopped_in_the_start_up_is_a_hang(opened, tmp_path, monkeypatch):
    said = []
    stop = "os.environ['RANK'] = '1'; os.execv(sys.executable, [sys.executable, '-c', STOP])"
    stop = (
        f"STOP = 'import os, signal; os.kill(os.getpid(), signal.SIGSTOP)'; tell('attempt'); {stop}"
    )
    Launcher(monkeypatch, stop, "tell('attempt'); tell('done')")
    assert supervise(opened, tmp_path, said, hang_seconds=1.0) == 0
    assert told(tmp_path) == ["attempt", "hang", "attempt", "done"]
    hang = ledger.read(tmp_path / "ledger.jsonl")[1]
    assert "rank 1 (pid" in hang["reason"]
    assert hang["reason"].endswith("has been stopped for 1 s")


def test_a_spike_is_told_and_rolled_back(opened, tmp_path, monkeypatch):
    said = []
    Launcher(
        monkeypatch,
        "tell('attempt'); tell('commit', step=100)\n"
        "tell('spike', onset=250, step=260, loss=9.0, baseline=3.0, channel='fast')\n"
        "raise SystemExit(75)",
        "tell('attempt', step=100); tell('done', step=300)",
    )
    assert supervise(opened, tmp_path, said) == 0
    words = "".join(said)
    assert "LOSS SPIKE" in words
    assert "rolled back to the checkpoint of step 100, going on with seed 2" in words
    assert told(tmp_path) == ["attempt", "commit", "spike", "rollback", "attempt", "done"]
    assert ledger.read(tmp_path / "ledger.jsonl")[3]["onset"] == 250


SIGNAL = "os.kill(os.getppid(), {number:d})\n"
WAIT_FOR_REQUEST = (
    "while not orders.stop_requested(run, token): time.sleep(0.05)\n"
    "tell('commit', step=5); tell('preempted', step=5, reason='asked'); raise SystemExit(76)"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_lets_the_ranks_save_and_the_supervisor_leave(
    opened, tmp_path, monkeypatch, number
):
    asks = f"tell('attempt'); {SIGNAL.format(number=number)}{WAIT_FOR_REQUEST}"
    Launcher(monkeypatch, asks, "tell('attempt', step=5); tell('done')")
    said = []
    assert supervise(opened, tmp_path, said) == EXIT_PREEMPTED
    assert told(tmp_path) == ["attempt", "commit", "preempted"]
    assert "asked to leave: attempt 1 is to save" in "".join(said)
    assert supervise(opened, tmp_path, said) == 0
    assert told(tmp_path)[3:] == ["attempt", "done"]


def test_a_rank_that_was_asked_to_leave_takes_the_supervisor_with_it(opened, tmp_path, monkeypatch):
    Launcher(monkeypatch, "tell('attempt'); tell('preempted', reason='x'); raise SystemExit(76)")
    assert supervise(opened, tmp_path, []) == EXIT_PREEMPTED


def test_without_time_to_save_and_when_asked_twice_it_leaves_all_the_same(
    opened, tmp_path, monkeypatch
):
    signal_once = SIGNAL.format(number=signal.SIGTERM)
    once = f"tell('attempt'); {signal_once}time.sleep(60)"
    twice = f"tell('attempt'); {signal_once}time.sleep(0.5); {signal_once}time.sleep(60)"
    Launcher(monkeypatch, once, twice)
    assert supervise(opened, tmp_path, [], preemption_seconds=0.5) == EXIT_PREEMPTED
    assert supervise(opened, tmp_path, []) == EXIT_PREEMPTED
    assert told(tmp_path) == ["attempt", "preempted"] * 2
    assert processes.members(tmp_path) == []


def test_ctrl_c_leaves_nothing_behind_and_is_no_crash(opened, tmp_path, monkeypatch):
    interrupts = f"tell('attempt'); {SIGNAL.format(number=signal.SIGINT)}time.sleep(60)"
    Launcher(monkeypatch, interrupts)
    with pytest.raises(KeyboardInterrupt):
        supervise(opened, tmp_path, [])
    assert told(tmp_path) == ["attempt", "interrupted"]
    assert processes.members(tmp_path) == []


def test_a_new_supervisor_watches_an_attempt_that_still_runs(opened, tmp_path, monkeypatch):
    """Its supervisor was killed: nothing of the attempt is lost."""
    Launcher(monkeypatch, f"tell('attempt')\n{WAIT_FOR_REQUEST}")
    order = orders.Order("t", 1, orders.RUN)
    orders.give(tmp_path, order)
    command = launch.command(None, tmp_path, order)
    environment = launch.environment(os.environ, tmp_path, order)
    child = subprocess.Popen(command, env=environment, start_new_session=True, cwd=ROOT)
    threading.Thread(target=child.wait, daemon=True).start()  # as init would
    said = []

    def hear(words):
        said.append(words)
        if "attempt 1 still runs; watching it" in words:
            os.kill(os.getpid(), signal.SIGUSR1)

    config = RunConfig(folder=str(tmp_path))
    assert opened(config, write=hear, poll_seconds=0.05).run() == EXIT_PREEMPTED
    assert len(said) > 1
    assert told(tmp_path) == ["attempt", "commit", "preempted"]


def test_what_a_killed_supervisor_left_in_pieces_is_ended_and_counted(
    opened, tmp_path, monkeypatch
):
    Launcher(monkeypatch, "", "tell('attempt'); tell('done')")
    (tmp_path / "control").mkdir()
    ledger.append(tmp_path / "ledger.jsonl", "attempt", attempt=1, step=0, token="t")
    rank = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, processes.RUN_VARIABLE: processes.mark(tmp_path), "RANK": "0"},
    )
    assert supervise(opened, tmp_path, []) == 0
    rank.wait(5)
    assert told(tmp_path) == ["attempt", "crash", "attempt", "done"]


@pytest.fixture
def refusing(monkeypatch):
    """`refusing(name, times)`: the disk is full so often when a file is to be written."""
    left = {}

    def open_atomically(path):
        if left.get(path.name, 0):
            left[path.name] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return atomic_file(path)

    def append(path, kind, **fields):
        if left.get(path.name, 0):
            left[path.name] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return true_append(path, kind, **fields)

    atomic_file, true_append = files.AtomicFile, ledger.append
    monkeypatch.setattr(files, "AtomicFile", open_atomically)
    monkeypatch.setattr(ledger, "append", append)
    monkeypatch.setattr(supervisor, "_LEAVING_SECONDS", 0.3)
    return left.__setitem__


FULL = "No space left on device: '{}'; trying again for up to 600 s"


def test_a_full_disk_is_waited_for_after_the_processes_are_ended_and_then_all_is_told(
    opened, tmp_path, monkeypatch, refusing
):
    """The supervisor must not leave its launcher behind, nor the ledger without its end."""
    said = []
    Launcher(
        monkeypatch,
        "tell('attempt'); (run / 'begun').touch(); time.sleep(60)",
        "tell('attempt'); tell('done')",
    )

    def hear(words):
        said.append(words)
        if "trying again" in words:
            assert processes.members(tmp_path) == []

    def complain(self, watch, order, deadline):
        if order.attempt > 1 or not (tmp_path / "begun").exists():
            return None
        for name in ("order.json", "ledger.jsonl"):
            refusing(name, 4)
        return Complaint("hang", "of the test")

    monkeypatch.setattr(supervisor.Supervisor, "_complain", complain)
    config = RunConfig(folder=str(tmp_path), supervision=SupervisionConfig(grace_seconds=2.0))
    assert opened(config, write=hear, poll_seconds=0.05).run() == 0
    assert told(tmp_path) == ["attempt", "hang", "attempt", "done"]
    words = "".join(said)
    for name in ("control/order.json", "ledger.jsonl"):
        assert words.count(FULL.format(tmp_path / name)) == 1
    assert orders.read(tmp_path).state == orders.STOP


def test_a_disk_that_stays_full_ends_the_supervisor_with_words_and_no_process(
    opened, tmp_path, monkeypatch, refusing
):
    monkeypatch.setattr(supervisor, "_DISK_SECONDS", 0.3)
    Launcher(monkeypatch, "tell('attempt')", "tell('attempt'); tell('done')")
    said = []

    def hear(words):
        said.append(words)
        if "attempt 1:" in words:
            refusing("ledger.jsonl", 10_000)

    config = RunConfig(folder=str(tmp_path))
    assert opened(config, write=hear, poll_seconds=0.05).run() == supervisor.EXIT_GAVE_UP
    assert f"stopped: [Errno 28] No space left on device: '{tmp_path}/ledger.jsonl'" in said[-1]
    assert processes.members(tmp_path) == []
    refusing("ledger.jsonl", 0)
    assert supervise(opened, tmp_path, []) == 0
    assert told(tmp_path) == ["attempt", "crash", "attempt", "done"]


def test_a_request_to_leave_is_heeded_on_a_disk_that_stays_full(
    opened, tmp_path, monkeypatch, refusing
):
    asks = f"tell('attempt'); {SIGNAL.format(number=signal.SIGTERM)}{WAIT_FOR_REQUEST}"
    Launcher(monkeypatch, asks.replace("tell('preempted', step=5, reason='asked'); ", ""))

    def hear(words):
        if "asked to leave" in words:
            refusing("ledger.jsonl", 10_000)
            refusing("order.json", 10_000)

    config = RunConfig(folder=str(tmp_path))
    assert opened(config, write=hear, poll_seconds=0.05).run() == EXIT_PREEMPTED
    assert processes.members(tmp_path) == []


def test_a_new_run_on_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: .*supervisor.lock"):
        supervisor.Supervisor(RunConfig(folder=str(tmp_path / "run")))


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_trained_again_from_the_one_before(
    opened, tmp_path, monkeypatch
):
    """And is finished when nothing is wrong, without a launch."""
    from pretrain.run import checkpoints

    def write(step):
        checkpoints.save(
            tmp_path,
            step,
            {},
            write=lambda folder: (folder / "weights.pt").write_bytes(b"weights"),
            gather=lambda mine: [mine],
            rank=0,
        )

    path, said = tmp_path / "ledger.jsonl", []
    ledger.append(path, "attempt", attempt=1, token="t", step=0, ranks=2, seed=1, host="here")
    for step in (5, 10):
        write(step)
        ledger.append(path, "commit", attempt=1, step=step)
    ledger.append(path, "done", attempt=1, step=10)
    launcher = Launcher(
        monkeypatch, "", "tell('attempt', step=5); tell('commit', step=10); tell('done', step=10)"
    )
    assert supervise(opened, tmp_path, said) == 0
    assert launcher.started == 0
    weights = checkpoints.folder_of(tmp_path, 10) / "weights.pt"
    weights.write_bytes(b"weighty")
    assert supervise(opened, tmp_path, said) == 0
    assert told(tmp_path)[-5:] == ["done", "reject", "attempt", "commit", "done"]
    assert f"checkpoint of step 10 rejected: {weights}: is not what was written" in "".join(said)


def test_a_run_that_somebody_trains_by_hand_is_left_alone(opened, tmp_path, monkeypatch):
    from pretrain.run import folder as run_folder

    Launcher(monkeypatch, "tell('attempt'); tell('done')")
    with run_folder.lock(tmp_path), pytest.raises(ValueError, match="being trained by another"):
        supervise(opened, tmp_path, [])
    assert supervise(opened, tmp_path, []) == 0


def test_a_stale_build_lock_is_deleted_before_a_launch(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    Launcher(
        monkeypatch, f"assert not os.path.exists({str(lock)!r}); tell('attempt'); tell('done')"
    )
    said = []
    assert supervise(opened, tmp_path / "run", said) == 0
    assert f"{lock}: deleted" in "".join(said)


def test_a_dry_run_tells_the_decision_and_the_command_and_does_nothing(tmp_path):
    config = RunConfig(folder=str(tmp_path / "run"))
    words = supervisor.forecast(config)
    assert "next: Launch" in words
    assert "pretrain.train" in words
    assert not (tmp_path / "run").exists()
    ledger_path = tmp_path / "run" / "ledger.jsonl"
    ledger_path.parent.mkdir()
    ledger.append(ledger_path, "done", step=3)
    before = ledger_path.read_bytes()
    assert supervisor.forecast(config) == "next: Finished()\n"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ledger.jsonl"]
    assert ledger_path.read_bytes() == before


def test_it_needs_no_torch_and_little_memory(tmp_path):
    """In a process of its own, while it watches."""
    code = f"""
import sys, psutil
sys.path.insert(0, {str(ROOT)!r})
HEAD = {HEAD!r}
from pretrain.config import preflight
from pretrain.run import report
from pretrain.supervision import agent, launch, supervisor
from pretrain.config.run import RunConfig
script = HEAD.format(run={str(tmp_path)!r}) + "tell('attempt'); time.sleep(1); tell('done')"
launch.command = lambda *a: [sys.executable, "-c", script]
most = 0
def look(self, job, order, wait=supervisor.Supervisor._wait):
    reason = wait(self, job, order)
    print("MB", psutil.Process().memory_info().rss / 1e6)
    return reason
supervisor.Supervisor._wait = look
assert supervisor.Supervisor(RunConfig(folder={str(tmp_path)!r})).run() == 0
print("heavy:", sorted({{"torch", "deepspeed", "matplotlib"}} & {{*sys.modules}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "heavy: []" in done.stdout
    megabytes = float(done.stdout.split("MB ")[1].split()[0])
    assert megabytes < 100, megabytes

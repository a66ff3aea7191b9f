"""The command `zeroclap supervise`."""

import base64
import contextlib
import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from data_prep.common import files
from data_prep.common.exit_codes import EXIT_PREEMPTED
from finetune import zeroclap as command_line
from pretrain.checks import capacity
from pretrain.checks.resume import check_run
from pretrain.processes import gpus, processes
from pretrain.records import checkpoints, folder, ledger, segments
from pretrain.supervision import launch, nodes
from pretrain.supervision import run as supervised_run
from tests.pretrain.builders import failing
from tests.pretrain.supervision.test_supervisor import HEAD, ROOT, WAIT_FOR_REQUEST


@pytest.fixture
def supervise(recipe, tmp_path, capsys):
    def run(*arguments):
        code = command_line.main(
            ["supervise", str(recipe.path), f"folder={tmp_path / 'run'}", *arguments]
        )
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_dry_run_prints_the_decision_and_the_command_and_changes_nothing(supervise, tmp_path):
    code, output, _ = supervise("--dry-run")
    assert code == 0
    assert output.startswith("train: ")
    assert "\nvalid: " in output.partition("next: launch")[0]
    assert "next: launch an attempt\n" in output
    assert "from step 0: " in output
    (encoded,) = re.findall(r"--world_info=(\S+)", output)  # the nodes and their GPU numbers
    assert json.loads(base64.urlsafe_b64decode(encoded)) == {"node-0": [0, 1]}
    assert "--module pretrain.train" in output
    assert not (tmp_path / "run").exists()


def test_the_agent_of_another_node_may_start_before_the_supervisor(supervise, tmp_path):
    (tmp_path / "run" / "control").mkdir(parents=True)
    assert supervise("--dry-run")[0] == 0


@pytest.mark.parametrize("cause", ["no such corpus", "Read-only file system", "1 usable GPU"])
def test_a_node_that_is_refused_tells_node_0_why(supervise, tmp_path, monkeypatch, cause):
    words = ["--nodes", "2", "--node-rank", "1", "supervision.node_wait_seconds=0.5"]
    if cause == "no such corpus":
        cause = str(tmp_path / "nowhere")
        words.append(f"data.corpus={cause}")
    elif cause == "1 usable GPU":
        monkeypatch.setattr(gpus, "visible_gpus", lambda *_: ["3"])
    else:
        monkeypatch.setattr(files, "lock", failing(files.lock, [errno.EROFS]))
    sign = folder.sign_of(tmp_path / "run", folder.SUPERVISOR_LOCK)
    sign.parent.mkdir(parents=True)  # node 0 does
    with contextlib.closing(nodes.Listener("127.0.0.1")) as listener:
        files.replace_json(sign, listener.endpoint)
        code, _, error = supervise(*words)
        (report,) = listener.accept()
    assert (code, cause in error) == (2, True)
    assert (report["node"], report["state"]) == (1, nodes.REFUSED)
    assert report["problem"].startswith("is refused: ")
    assert cause in report["problem"]


def test_the_global_batch_is_divided_among_the_ranks_of_all_nodes(supervise):
    code, _, error = supervise("supervision.processes_per_node=1", "--dry-run", "--nodes", "5")
    assert code == 2
    assert "x 5 ranks" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "2", "--node-rank", "2"), "--node-rank: 2 is not accepted"),
        (("supervision.hostfile=nowhere",), "nowhere: no such file"),
        (("notify.command=[no-such-program]", "--dry-run"), "there is no program no-such-program"),
    ],
)
def test_a_run_that_cannot_be_launched_is_refused_with_a_way_out(
    supervise, tmp_path, arguments, message
):
    code, _, error = supervise(*arguments)
    assert code == 2
    assert message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [[], ["--dry-run"], ["--nodes", "2", "--node-rank", "1"]])
def test_more_ranks_than_gpus_are_refused_before_the_run_folder_is_made(
    supervise, tmp_path, monkeypatch, arguments
):
    monkeypatch.setattr(gpus, "visible_gpus", lambda *_: ["3"])
    code, _, error = supervise(*arguments, "supervision.node_wait_seconds=0.1")
    assert code == 2
    assert "supervision.processes_per_node: 2 ranks on a machine with 1 usable GPU " in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("device", "code"), [("cpu", 2), ("cuda", 0)])
def test_the_time_on_a_cpu_counts_only_where_ranks_use_it(supervise, monkeypatch, device, code):
    monkeypatch.setenv("DS_ACCELERATOR", device)  # on ROCm, no GPU is visible
    monkeypatch.setattr(capacity, "_MOST_DAYS", 0.0)
    assert supervise("--dry-run", "training.deepspeed=zero1_bf16")[0] == code


IN_A_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which is inherited
os.login_tty(int(sys.argv[1]))
from finetune import zeroclap as command_line
from pretrain.supervision import launch
launch.command = lambda *_, **__: [sys.executable, "-c", sys.argv[2]]
sys.exit(command_line.main(["supervise", *sys.argv[3:]]))
"""
ATTEMPT = """
import json, shutil
from pretrain.checks.resume import check_run
from pretrain.config.load import load
from pretrain.records import segments
segments.begin(check_run(load(str(run / "supervised.yaml"))))
shutil.copy(run / "supervised.yaml", run / "run.yaml")
from pretrain.records import metrics
from tests.pretrain.builders import step_record
line = metrics.line_of(step_record(0))
(run / "metrics.jsonl").write_text(json.dumps(line) + chr(10))
record("attempt")
"""


def test_when_its_terminal_closes_the_ranks_save_and_the_exit_code_is_76(recipe, tmp_path):
    """What it prints after that cannot be written."""
    run = tmp_path / "run"
    script = HEAD.format(run=str(run)) + ATTEMPT + WAIT_FOR_REQUEST
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, str(theirs), script]
    child = subprocess.Popen(
        [*command, str(recipe.path), f"folder={run}"], cwd=ROOT, pass_fds=[theirs]
    )
    os.close(theirs)
    try:
        with open(ours, "rb", buffering=0) as terminal:
            output = b""
            while b"attempt 1 began" not in output:
                output += terminal.read(1000)
        assert child.wait(60) == EXIT_PREEMPTED
    finally:
        child.kill()
        child.wait()
        processes.end_all(run, 0.0)
    assert [r["kind"] for r in ledger.read_ledger(run / ledger.FILE_NAME)][2:] == [
        "commit",
        "preempted",
    ]
    assert "attempt 1 stopped by request" in (run / "report.md").read_text()


def test_a_signal_that_arrives_as_the_report_is_written_changes_nothing(
    supervise, tmp_path, monkeypatch
):
    script = HEAD.format(run=str(tmp_path / "run")) + ATTEMPT + "record('preempted')"
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", script])

    def write_report(run):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
        return "written"

    monkeypatch.setattr(supervised_run, "write_report", write_report)
    code, output, _ = supervise()
    assert code == EXIT_PREEMPTED
    assert output.partition("report: written")[2].splitlines()[-1].startswith("next: zeroclap")


def test_a_run_that_is_stopped_before_its_first_step_has_no_report_and_says_what_is_next(
    supervise, tmp_path, monkeypatch
):
    script = HEAD.format(run=str(tmp_path / "run")) + ATTEMPT + "record('preempted')"
    script += f"\nopen({str(tmp_path / 'run' / 'metrics.jsonl')!r}, 'w')"
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", script])
    code, output, error = supervise()
    assert code == EXIT_PREEMPTED
    assert "metrics.jsonl: has no steps to draw" in error
    assert output.splitlines()[-1].startswith("next: zeroclap supervise")


def test_a_finished_run_asks_no_other_machine(supervise, recipe, tmp_path, monkeypatch):
    run, hosts = tmp_path / "run", tmp_path / "hosts"
    hosts.write_text("localhost slots=1\nelsewhere slots=1\n")
    config = recipe.load(run)
    segments.begin(check_run(config))
    ledger.append(run / ledger.FILE_NAME, "done", attempt=1, step=config.training.steps)

    def connect(*arguments):
        raise ValueError("elsewhere was asked")

    monkeypatch.setattr(supervised_run, "connect", connect)
    code, output, _ = supervise(f"supervision.hostfile={hosts}")
    assert (code, "finished" in output) == (0, True)
    again = "--from=5", "optimizer.learning_rate=1e-3", "supervision.node_wait_seconds=1"
    assert "elsewhere was asked" in supervise(f"supervision.hostfile={hosts}", *again)[2]


def test_an_edited_deepspeed_file_is_refused_before_a_launch(supervise, recipe, tmp_path):
    run = tmp_path / "run"
    segments.begin(check_run(recipe.load(run)))
    for kind, facts in (("attempt", {"token": "t"}), ("commit", {"ranks": 2, "manifest": ""})):
        ledger.append(run / ledger.FILE_NAME, kind, attempt=1, step=5, **facts)
    manifest = checkpoints.folder_of(run, 5) / checkpoints.MANIFEST
    manifest.parent.mkdir(parents=True)
    refused = "differs from that of the checkpoint of step 5: zero_opt"
    for text, said in (('{"deepspeed": {"zero_optimization": {"stage": 3}}}', refused), ("{", "")):
        manifest.write_text(text)  # the ranks look for one that is whole
        code, _, error = supervise("--dry-run")
        assert (code, said in error) == (2 if said else 0, True), error


def test_another_recipe_is_not_recorded_while_another_supervisor_has_the_run(
    supervise, recipe, tmp_path
):
    run = tmp_path / "run"
    segments.begin(check_run(recipe.load(run)))
    before = (run / ledger.FILE_NAME).read_bytes()
    with folder.lock(run, folder.SUPERVISOR_LOCK):  # its next attempt only starts now
        code, _, error = supervise("--from", "5", "optimizer.learning_rate=1e-3")
    assert (code, "is in use by another supervisor" in error) == (2, True)
    assert (run / ledger.FILE_NAME).read_bytes() == before

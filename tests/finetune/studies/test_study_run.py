"""A whole study through its command: killed and continued, its report and pictures."""

import csv
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from finetune.studies import job
from tests.running import wait_until

COMMAND = [sys.executable, "-m", "finetune.zeroclap", "study"]
PATIENCE = 600
FINETUNE = """
finetune:
  tasks: [CoLA]
  settings: {epochs: 1, max_train_examples: 32, batch_size: 16}
  factors:
    pooling: {mean: {pooling: mean}}
"""


def run(folder, *words):
    command = [*COMMAND, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_study_that_is_stopped_and_killed_goes_on_without_doing_anything_twice(
    study_file, easy_glue, tmp_path
):
    path = tmp_path / "study.yaml"
    path.write_text(study_file.read_text() + FINETUNE)
    output = tmp_path / "output"
    words = [str(path), "--toy", "--seeds", "1", "--jobs", "2"]
    words += ["--output", str(output), "--data", str(easy_glue)]

    def start_until(pattern, number):
        """Send a signal when a file is there; return the exit code and what was printed."""
        with (tmp_path / "printed").open("w+") as log:
            study = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, stdout=log, stderr=log)
            wait_until(
                lambda: [*output.glob(pattern)] or study.poll() is not None, seconds=PATIENCE
            )
            assert study.poll() is None, (tmp_path / "printed").read_text()
            study.send_signal(number)
            return study.wait(PATIENCE), (tmp_path / "printed").read_text()

    code, text = start_until("*/run/metrics.jsonl", signal.SIGINT)
    assert code == 130, text
    assert "Traceback" not in text
    assert (output / "report.md").exists()
    # Processes that end meanwhile, and zombies of others, have no command line.
    lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    assert [line for line in lines if str(output) in " ".join(line)] == []
    start_until("*/evaluate.done", signal.SIGKILL)
    before = {path: path.stat().st_mtime_ns for path in output.glob("*/*.done")}
    words[-1] = str(shutil.copytree(easy_glue, tmp_path / "moved"))
    code, text, error = run(tmp_path, *words)
    assert code == 0, error
    assert {path: path.stat().st_mtime_ns for path in before} == before
    folders = sorted(path.parent for path in output.glob(f"*/{job.JOB}"))
    assert len(folders) == 2
    for folder in folders:
        log = (folder / job.LOG).read_text()
        # A run that was killed in its export makes the model anew.
        exports = log.count("$ zeroclap export")
        assert exports == 1 or folder / "export.done" not in before, log
        assert job.stages_left(folder) == []
    rows = list(csv.DictReader((output / "report.csv").read_text().splitlines()))
    assert {row["arm"] for row in rows if row["part"] == "pretraining"} == {
        "learned, some",
        "ALiBi, some",
    }
    refused = [row for row in rows if row["figure"] == "perplexity, 128 tokens"]
    assert {row["arm"] for row in refused} == {"ALiBi, some"}  # learned positions end at 64
    assert {row["arm"] for row in rows if row["figure"] == "CoLA"} == {
        "learned, some, mean",
        "ALiBi, some, mean",
    }
    assert "ALiBi, some − learned, some" in text
    assert "Confounded" not in text
    for name in ("curves.png", "curves.svg", "lengths.png", "report.tex", "report.md"):
        assert (output / name).stat().st_size > 0
    # A run that fails is named, and the others are reported.
    (failing,) = (folder for folder in folders if folder.name.startswith("ALiBi"))
    (failing / "evaluate.done").unlink()
    shutil.rmtree(failing / "model")
    code, text, error = run(tmp_path, *words)
    assert code == 1, (text, error)
    assert "runs to do: 1, finished before: 1" in text
    assert f"error: {failing.name}: failed, ended with code 2; see {failing}/log.txt" in error
    assert "learned, some" in text
    # Scores on other data would stand in one table with those of before.
    (tmp_path / "moved/CoLA/dev.tsv").write_bytes((easy_glue / "CoLA/train.tsv").read_bytes())
    code, text, error = run(tmp_path, *words)
    assert (code, "was begun with other data of tasks; name another --output" in error) == (2, True)

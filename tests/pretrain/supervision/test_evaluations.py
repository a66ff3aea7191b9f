"""Evaluations on tasks while a run goes on; small scripts replace export and fine-tuning."""

import json
import sys
import time
from pathlib import Path

import pytest

from pretrain import __main__ as command_line
from pretrain.config.run import RunConfig
from pretrain.config.sections import EvaluationConfig, ScheduleConfig, TrainingConfig
from pretrain.records import ledger, metrics, status, tasks
from pretrain.supervision import evaluations

EVALUATION = EvaluationConfig(["CoLA"], data="GLUE", interval=10)
SCORE = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1]) / "named" / "CoLA"
folder.mkdir(parents=True)
scores = {"epoch": 2, "matthews": 0.5}
(folder / "result.json").write_text(json.dumps({"task": "CoLA", "best": scores}))
"""


class Run:
    """A run whose ledger a test writes."""

    def __init__(self, folder, monkeypatch, script):
        training = TrainingConfig(steps=45, checkpoint_interval=5)
        schedule = ScheduleConfig(warmup_steps=1)
        self.config = RunConfig(
            folder=str(folder), training=training, schedule=schedule, evaluation=EVALUATION
        )
        self.folder, self.said, self.script, self.begun = folder, [], script, []
        monkeypatch.setattr(evaluations, "_finetuning", self.finetuning)
        folder.mkdir()

    def finetuning(self, config, model, output):
        self.begun.append(int(output.name.split("-")[1]))
        assert not model.exists()
        return [[sys.executable, "-c", self.script, str(output)]]

    def commit(self, step, manifest=""):
        ledger.append(
            self.folder / "ledger.jsonl", "commit", step=step, manifest=manifest or f"{step:08d}"
        )

    def open(self):
        return evaluations.Evaluations(self.config, self.said.append)

    def finish(self, one):
        one.finish(lambda: False, 0.01)

    @property
    def steps(self):
        records = ledger.read_ledger(self.folder / "ledger.jsonl")
        return [line["step"] for line in tasks.surviving_scores(self.folder, records)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    export = "from pathlib import Path; import sys; Path(sys.argv[1]).mkdir()"
    monkeypatch.setattr(
        evaluations, "_export", lambda run, step, model: [sys.executable, "-c", export, str(model)]
    )
    return Run(tmp_path / "run", monkeypatch, SCORE)


def test_due_checkpoints_are_evaluated_once_the_last_one_too(run):
    one = run.open()
    for step in (5, 10, 15, 45):
        run.commit(step)
        run.finish(one)
    assert run.steps == [10, 45]
    run.finish(run.open())
    assert run.begun == [10, 45]
    (first, _) = metrics.read_metrics(run.folder / metrics.TASKS)
    assert first["scores"] == {"matthews": 0.5}
    assert not list(run.folder.glob("evaluation/*/model"))


def test_a_checkpoint_that_comes_meanwhile_has_its_turn_unless_a_newer_one_came(run):
    run.script = "import time; time.sleep(0.3)\n" + SCORE
    one = run.open()
    for step in (10, 20, 30):
        run.commit(step)
        assert one.look()
    run.finish(one)
    assert run.begun == [10, 30]


def test_a_failure_is_a_warning_that_names_the_log_and_is_not_repeated(run):
    run.script = "raise SystemExit('no memory')"
    one = run.open()
    run.commit(10)
    run.finish(one)
    run.finish(one)
    (warning,) = [said for said in run.said if said.startswith("WARNING")]
    assert "no memory" in warning
    (log,) = run.folder.glob("evaluation/*/log.txt")
    assert str(log) in warning
    assert run.begun == [10]
    run.script = SCORE
    run.finish(run.open())
    assert run.steps == [10]


def test_a_ledger_that_cannot_be_read_is_not_said_of_the_last_checkpoint(run):
    one = run.open()
    run.commit(10)
    run.finish(one)
    with (run.folder / "ledger.jsonl").open("a") as file:
        file.write("{}\n")
    assert not one.look()
    assert "WARNING: no evaluation: " in run.said[-1]
    assert not one.look()
    assert sum(said.startswith("WARNING") for said in run.said) == 1


def test_scores_of_a_checkpoint_that_a_rollback_undid_do_not_count(run):
    one = run.open()
    run.commit(10, "a" * 8)
    run.finish(one)
    ledger.append(run.folder / "ledger.jsonl", "attempt", step=5, attempt=1)
    assert run.steps == []
    run.commit(10, "b" * 8)
    run.finish(one)
    assert run.steps == [10]
    assert run.begun == [10, 10]


def test_a_process_ends_with_its_supervisor(run):
    run.script = "import time; time.sleep(60)"
    run.commit(10)
    one = run.open()
    assert one.look()
    child, started = one._child, time.monotonic()
    one.finish(lambda: True, 0.01)
    one.close()
    assert child.poll() is not None
    assert time.monotonic() - started < 10
    assert any("waiting for the evaluation of step 10" in said for said in run.said)


def own_task(folder: Path) -> Path:
    lines = [f"the {word} number {n},{word}" for n in range(40) for word in ("red", "blue")]
    (folder / "colours.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    return folder / "colours.csv"


TASKS = ["training.steps=20", "evaluation.interval=10", "evaluation.settings=[epochs=1]"]


@pytest.mark.long
def test_a_run_is_evaluated_and_has_the_losses_of_one_that_is_not(recipe, tmp_path, capsys):
    file = own_task(tmp_path)
    words = {"plain": TASKS[:1], "scored": [*TASKS, f"evaluation.tasks=[{file}]"]}
    for name, overrides in words.items():
        arguments = [str(recipe.path), f"folder={tmp_path / name}", *overrides]
        assert command_line.main(["supervise", *arguments]) == 0
    said = capsys.readouterr().out
    assert "waiting for the evaluation of step" in said
    losses = [
        [line["loss"] for line in metrics.read_metrics(tmp_path / name / metrics.METRICS)]
        for name in words
    ]
    assert losses[0] == losses[1]
    seen = status.view(tmp_path / "scored")
    assert [line["task"] for line in seen.tasks if line["step"] == 20] == ["colours"]
    assert 0 <= seen.tasks[-1]["scores"]["accuracy"] <= 1
    assert "tasks after 20 steps: colours: " in status.describe_run(seen)
    assert "| 20 | colours | " in (tmp_path / "scored" / "report.md").read_text()
    assert json.loads(json.dumps(status.facts(seen)["tasks"]))[-1]["step"] == 20


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.tasks=[CoLA]"], "evaluation.data: is not set"),
        (["evaluation.tasks=[CoLA]", "evaluation.data=GLUE", "evaluation.interval=7"], "multiple"),
        (["evaluation.device=gpu"], "cuda:N"),
        (["evaluation.tasks=[a/x.csv, b/x.csv]"], "same name"),
    ],
)
def test_a_recipe_that_cannot_be_evaluated_is_refused(recipe, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        recipe.load(tmp_path / "run", *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "message"),
    [("CoLO", "did you mean CoLA"), ("CoLA", "train.tsv"), ("missing.csv", "missing.csv")],
)
def test_an_unknown_task_and_missing_data_are_refused_before_the_start(
    recipe, tmp_path, capsys, task, message
):
    words = [*TASKS, f"evaluation.tasks=[{task}]", f"evaluation.data={tmp_path}"]
    run = tmp_path / "run"
    assert command_line.main(["supervise", str(recipe.path), f"folder={run}", *words]) == 2
    assert message in capsys.readouterr().err
    assert not run.exists()

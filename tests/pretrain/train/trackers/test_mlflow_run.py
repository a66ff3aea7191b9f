"""MLflow, in a database of its own: what it shows is read back."""

import sys

import pytest

from pretrain.train.trackers.mlflow_run import MlflowRun
from pretrain.train.trackers.table import Shown

pytestmark = pytest.mark.filterwarnings("ignore")


def test_each_attempt_is_a_run_with_its_curves_and_no_texts(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    said, folder = [], tmp_path / "mine"
    folder.mkdir()
    for attempt, first in ((1, 0), (2, 2)):
        one = MlflowRun(Shown(folder, {"training": {"steps": 9}}, attempt, first, said.append))
        one.text(first, "it began")
        for step in range(first, first + 3):
            one.scalars(step, {"train/loss": step / 2, "validation perplexity/a:b": 3.0})
        one.close()
    assert said == []
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mine")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["mine, attempt 1", "mine, attempt 2"]
    second = runs["mine, attempt 2"]
    found = client.get_metric_history(second.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in found] == [(2, 1.0), (3, 1.5), (4, 2.0)]
    assert second.data.metrics["validation perplexity/a_b"] == 3.0
    assert not any("it began" in each for run in runs.values() for each in run.data.tags.values())
    assert second.info.status == "FINISHED"


def test_what_fails_is_said_once_and_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)  # importing it fails
    said = []
    one = MlflowRun(Shown(tmp_path, {}, 1, 0, said.append))
    one.scalars(0, {"train/loss": 1.0})
    one.text(0, "a text")
    one.sync(0)
    one.close()
    (text,) = said
    assert text.startswith("WARNING: MLflow shows no curves of this attempt: ")

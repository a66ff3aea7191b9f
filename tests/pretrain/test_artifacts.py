"""Law 10: what earlier versions wrote is still read, resumed, audited, exported and evaluated."""

import contextlib
import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
import yaml

from data_prep.__main__ import main as data_prep
from data_prep.manifest import load_manifest
from finetune.__main__ import main as finetune
from finetune.config import PLAN, read_plan
from pretrain import train
from pretrain.__main__ import main as pretrain
from pretrain.config import load as recipes
from pretrain.inference import model_folder
from pretrain.run import checkpoints, ledger, metrics

ARTIFACTS = Path(__file__).parents[1] / "artifacts"
VERSIONS = sorted(path.name for path in ARTIFACTS.iterdir() if path.is_dir())
OTHER_CPU = 1e-4
"""Relative difference of losses that other processors may cause."""


@pytest.fixture(scope="module", params=VERSIONS)
def artifacts(request, tmp_path_factory):
    """A copy of one version's folder."""
    folder = tmp_path_factory.mktemp("artifacts") / request.param
    return Path(shutil.copytree(ARTIFACTS / request.param, folder))


@pytest.fixture(scope="module")
def resumed(artifacts, run_ranks):
    """The run's folder after it was resumed and finished."""
    run = shutil.copytree(artifacts / "run", artifacts / "resumed")

    def work():
        overrides = [f"folder={run}", f"data.corpus={artifacts / 'corpus'}"]
        with contextlib.redirect_stdout(io.StringIO()):
            return train.main([str(run / "run.yaml"), *overrides])

    assert run_ranks(1, work) == [0]
    return run


def test_there_are_artifacts_of_the_first_version():
    assert "v1" in VERSIONS


def test_artifacts_stay_small():
    assert sum(path.stat().st_size for path in ARTIFACTS.rglob("*") if path.is_file()) < 400_000


def test_the_corpus_verifies(artifacts):
    assert load_manifest(artifacts / "corpus").totals["train"].documents == 108
    assert data_prep(["verify", str(artifacts / "corpus")]) == 0


def test_the_recipe_of_a_run_is_upgraded(artifacts):
    config = recipes.load(str(artifacts / "run" / "run.yaml"))
    assert config.supervision.processes_per_node == 1
    assert config.training.seed == 3
    assert config.model.overrides["hidden_size"] == 8
    assert config.data.minimum_share_of_tokens == 0.0


def test_a_run_resumes_with_the_losses_that_its_own_version_had(artifacts, resumed):
    expected = json.loads((artifacts / "resumed_losses.json").read_text())
    lines = [line for line in metrics.read(resumed / metrics.METRICS) if line["attempt"] == 2]
    losses = {str(line["step"]): line["loss"] for line in lines}
    assert losses == {step: pytest.approx(loss, rel=OTHER_CPU) for step, loss in expected.items()}


def test_a_resumed_run_is_audited(resumed, capsys):
    assert pretrain(["audit", str(resumed)]) == 0
    assert "2 attempts" in capsys.readouterr().out


def test_a_resumed_run_and_its_checkpoints_are_of_this_version(resumed):
    recipe = recipes.load(str(resumed / "run.yaml"))
    state = ledger.run_state(ledger.read(resumed / ledger.FILE_NAME), recipe.training.seed)
    manifest = checkpoints.read_manifest(checkpoints.folder_of(resumed, state.checkpoints[-1]))
    assert manifest["format_version"] == checkpoints.FORMAT_VERSION
    assert manifest["recipe"] == recipes.to_dict(recipe)


def test_status_and_report_describe_an_earlier_run(artifacts, tmp_path, capsys):
    run = shutil.copytree(artifacts / "run", tmp_path / "run")
    assert pretrain(["status", str(run)]) == 0
    assert pretrain(["report", str(run)]) == 0
    assert "36" in capsys.readouterr().out


def test_a_checkpoint_exports_as_the_same_model(artifacts, tmp_path):
    assert model_folder.export(artifacts / "run", tmp_path / "model") == 36
    then, now = model_folder.load(artifacts / "model"), model_folder.load(tmp_path / "model")
    assert now.model.config == then.model.config
    assert now.packing == then.packing == "best-fit"
    weights = then.model.state_dict()
    assert all(
        bool((value == weights[name]).all()) for name, value in now.model.state_dict().items()
    )


def test_a_model_folder_evaluates_to_the_same_loss(artifacts, tmp_path):
    corpus, written = str(artifacts / "corpus"), tmp_path / "evaluated.json"
    arguments = ["--data", corpus, "--json", str(written), "--device", "cpu"]
    assert pretrain(["evaluate", str(artifacts / "model"), *arguments]) == 0
    (expected,) = json.loads((artifacts / "evaluated.json").read_text())
    (found,) = json.loads(written.read_text())
    assert found["total"]["targets"] == expected["total"]["masked_tokens"]
    assert found["total"]["loss"] == pytest.approx(expected["total"]["loss"], rel=OTHER_CPU)


def test_a_model_folder_with_a_head_predicts_the_same(artifacts, tmp_path):
    arguments = [str(artifacts / "finetuned"), str(artifacts / "sentences.txt")]
    output = tmp_path / "predicted.txt"
    assert finetune(["predict", *arguments, "--output", str(output), "--device", "cpu"]) == 0

    def parsed(path):
        rows = [line.split("\t") for line in path.read_text().splitlines()]
        return [(label, pytest.approx(float(share), abs=2e-4)) for label, share in rows]

    found = [line.split("\t")[:2] for line in output.read_text().splitlines()]
    assert [(label, float(share)) for label, share in found] == parsed(artifacts / "predicted.txt")


def test_a_fine_tuning_plan_is_read(artifacts, tmp_path):
    shutil.copy(artifacts / "finetuned-run.json", tmp_path / PLAN)
    plan = read_plan(tmp_path)
    assert (plan.task, plan.config.epochs, plan.config.learning_rate) == ("CoLA", 2, 1e-3)
    assert dataclasses.replace(plan).differences(plan) == []


READERS = {
    "corpus/manifest.json": lambda path: load_manifest(path.parent),
    "model/model.json": lambda path: model_folder.load(path.parent),
    "run/checkpoints/step-00000036/MANIFEST.json": lambda path: checkpoints.read_manifest(
        path.parent
    ),
    "run/ledger.jsonl": ledger.read,
    "run/run.yaml": lambda path: recipes.load(str(path)),
}


@pytest.mark.parametrize(
    ("file", "key"),
    [
        *((file, "format_version") for file in READERS),
        ("model/model.json", "format"),
        ("run/checkpoints/step-00000036/MANIFEST.json", "format"),
    ],
)
def test_an_artifact_of_a_later_version_is_refused_by_name(artifacts, file, key, tmp_path):
    path = Path(shutil.copytree(artifacts, tmp_path / "copy")) / file
    text = path.read_text()
    first, end, rest = text.partition("\n") if path.suffix == ".jsonl" else (text, "", "")
    values = yaml.safe_load(first) if path.suffix == ".yaml" else json.loads(first)
    path.write_text(json.dumps({**values, key: 99}) + end + rest)
    with pytest.raises(ValueError, match="format version 99 was written by a later") as caught:
        READERS[file](path)
    assert str(path) in str(caught.value)

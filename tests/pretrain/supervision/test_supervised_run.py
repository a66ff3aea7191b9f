"""A run with the real `deepspeed` launcher: spike, rollback, new seed, end; then its model."""

import json

import pytest

from finetune import zeroclap as command_line
from pretrain.config import load as recipes
from pretrain.convert.model_folder import load_model
from pretrain.records import checkpoints, ledger, metrics
from tests.data_prep.common.test_children import hostile_folder

pytestmark = pytest.mark.slow
# The gradients of a fresh causal model grow for a dozen steps, which is no spike. The demo's model,
# a masked one, spikes too.
WORDS = ["fault.random_labels=[22, 34]", "model.variant=causal-alibi", "objective.name=causal-lm"]
WORDS += ["spike.window=48"]


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    """A run in a working directory whose files have the names of what the ranks import."""
    folder = tmp_path_factory.mktemp("supervised") / "run"
    arguments = [str(recipe.path), f"folder={folder}", *WORDS]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(hostile_folder(folder.parent / "hostile"))
        assert command_line.main(["supervise", *arguments]) == 0
    return folder


@pytest.fixture(scope="module")
def records(run):
    return ledger.read_ledger(run / ledger.FILE_NAME)


@pytest.fixture(scope="module")
def state(records):
    return ledger.run_state(records)


def kinds(records):
    return [record["kind"] for record in records]


def test_it_spiked_during_the_fault_rolled_back_to_before_it_and_finished(records, state):
    recorded = kinds(records)
    assert recorded[:2] == ["segment", "attempt"]
    assert recorded.count("spike") == 1
    assert recorded.count("attempt") == 2
    assert "crash" not in recorded
    assert recorded[-1] == "done"
    (spike,), (rollback,) = state.spikes, state.rollbacks
    assert 22 <= spike["onset"] <= 25
    assert spike["step"] < 34
    assert rollback["step"] <= spike["onset"] - 4
    assert rollback["seed"] == 2
    assert state.seeds_by_step == [(0, 1), (rollback["step"], 2)]


def test_its_metrics_have_each_surviving_step_once_with_the_seed_in_use(run, state):
    lines = metrics.read_metrics(run / metrics.METRICS)
    kept = metrics.surviving(lines)
    assert [line["step"] for line in kept] == list(range(40))
    assert len(lines) > 40
    resumed = state.rollbacks[0]["step"]
    assert [line["seed"] for line in kept] == [1] * resumed + [2] * (40 - resumed)
    assert kept[-1]["loss"] < kept[0]["loss"]
    abandoned = [line for line in lines if line["attempt"] == 1 and line["step"] >= 22]
    assert max(line["loss"] for line in abandoned) > kept[21]["loss"]


def test_a_resume_with_a_new_seed_is_continuous(records):
    assert not {"discontinuity", "save-failed", "reject"} & {*kinds(records)}


def test_its_checkpoints_are_those_of_the_ledger_and_complete(run, state):
    assert state.checkpoints[-1] == 40
    assert {25, 30, 35, 40} <= {*state.checkpoints}
    found = sorted((run / "checkpoints").glob("step-*"))
    assert found == [checkpoints.folder_of(run, step) for step in state.checkpoints]
    for folder in found:
        checkpoints.read_manifest(folder)
    assert not (run / "checkpoints" / "latest").exists()


def test_the_run_folder_describes_the_run(run):
    assert recipes.load(str(run / "run.yaml")).folder == str(run)
    settings = json.loads((run / "deepspeed.json").read_text())
    assert settings["train_batch_size"] == 8
    ranks = recipes.load(str(run / "run.yaml")).supervision.processes_per_node
    assert settings["gradient_accumulation_steps"] == 4 // ranks
    assert json.loads((run / "environment.json").read_text())["versions"]["deepspeed"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    validation = metrics.surviving(metrics.read_metrics(run / metrics.VALIDATION))
    assert [line["step"] for line in validation] == [20, 40]
    assert validation[1]["perplexity"] < validation[0]["perplexity"]


def test_its_tensorboard_run_has_each_step_once(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(run / "tensorboard"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == list(range(40))


def test_its_ledger_proves_that_every_block_was_used_once(run, capsys):
    assert command_line.main(["audit", str(run)]) == 0
    output = capsys.readouterr().out
    assert "2 attempts: each began at step 0 or at a checkpoint that was committed" in output
    assert "40 steps survive, each once: 320 blocks" in output
    assert output.endswith("sound\n")


def test_its_status_and_its_report_describe_what_happened(run, capsys):
    assert command_line.main(["status", str(run)]) == 0
    output = capsys.readouterr().out
    assert "finished: 40 of 40 steps in 2 attempts" in output
    assert "LOSS SPIKE confirmed" in output
    report = (run / "report.md").read_text()
    assert "rolled back to" in report
    assert "![training and validation loss](loss.png)" in report


def test_supervising_a_finished_run_again_changes_nothing(run, recipe, records, capsys):
    assert command_line.main(["supervise", str(recipe.path), f"folder={run}", *WORDS]) == 0
    assert "finished" in capsys.readouterr().out
    assert ledger.read_ledger(run / ledger.FILE_NAME) == records


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("exported") / "model"
    assert command_line.main(["export", str(run), "--output", str(output)]) == 0
    return output


def test_an_older_checkpoint_can_be_exported_by_its_step(run, exported, tmp_path, capsys):
    options = ["--output", str(tmp_path / "older"), "--step", "35"]
    assert command_line.main(["export", str(run), *options]) == 0
    assert "after 35 steps" in capsys.readouterr().out
    loaded = load_model(tmp_path / "older")
    assert loaded.contents.provenance["step"] == 35
    recorded = recipes.to_dict(recipes.load(str(run / "run.yaml")))
    assert loaded.contents.provenance["recipe"]["model"] == recorded["model"]
    newest = load_model(exported).model.state_dict()
    assert any(not newest[n].equal(t) for n, t in loaded.model.state_dict().items())


def test_an_export_that_is_impossible_is_refused_with_what_is_possible(
    run, exported, tmp_path, capsys
):
    def refused(*arguments):
        assert command_line.main(["export", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    missing = refused(run, "--output", tmp_path / "a", "--step", 7)
    assert "has no checkpoint of step 7; --step may be 5, 10, 15, 20, 25, 30, 35, 40" in missing
    assert "is not the folder of a run" in refused(tmp_path, "--output", tmp_path / "a")
    assert "is not empty" in refused(run, "--output", exported)
    (tmp_path / "file").write_text("")
    assert "file" in refused(run, "--output", tmp_path / "file")

"""The runs in a folder, beside each other."""

import json

import pytest

from pretrain import __main__ as command_line
from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.config.sections import ScheduleConfig, TrainingConfig
from tests.pretrain.histories import SEED, History


@pytest.fixture
def folder(tmp_path):
    """A folder of a finished run, one that has not begun, and something else."""
    for name, steps in (("b-done", 5), ("a-new", 0)):
        history = History()
        if steps:
            history.begin()
            history.train(steps)
            history.add("done", attempt=1, step=steps)
        history.write(tmp_path / name)
        training = TrainingConfig(steps=max(steps, 1), seed=SEED)
        schedule = ScheduleConfig(warmup_steps=0)
        config = RunConfig(folder=str(tmp_path / name), training=training, schedule=schedule)
        recipes.dump(config, tmp_path / name / "run.yaml")
    (tmp_path / "notes").mkdir()
    return tmp_path


def shown(capsys, *words):
    assert command_line.main(["status", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_folder_of_runs_is_a_table_with_a_line_for_each(folder, capsys):
    head, *lines = shown(capsys, folder).splitlines()
    assert head.split() == [
        *("run", "state", "steps", "loss", "validation", "tokens/s", "rollbacks", "left")
    ]
    assert [line.split() for line in lines] == [
        ["a-new", "stopped", "0", "of", "1", "-", "-", "-", "0", "-"],
        ["b-done", "finished", "5", "of", "5", "5.0000", "-", "200", "0", "-"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_the_json_of_a_folder_is_a_list_of_what_each_run_gives(folder, capsys):
    both = json.loads(shown(capsys, folder, "--json"))
    alone = [json.loads(shown(capsys, folder / n, "--json")) for n in ("a-new", "b-done")]
    assert both == alone


def test_a_run_that_cannot_be_read_does_not_hide_the_others(folder, capsys):
    ledger = folder / "a-new" / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace("created", "changed", 1) * 2)
    *_, done, broken = shown(capsys, folder).splitlines()
    assert done.startswith("b-done")
    assert broken.startswith(f"{ledger}: line ")
    assert json.loads(shown(capsys, folder, "--json"))[0]["error"] == broken


def test_a_run_with_runs_in_its_folder_is_a_run(folder, capsys):
    (folder / "b-done" / "branch").mkdir()
    (folder / "b-done" / "branch" / "run.yaml").write_text("{}")
    assert shown(capsys, folder / "b-done").startswith(f"{folder / 'b-done'}: baseline base")

"""What `diff` says of two runs."""

import dataclasses
import json

from data_prep.common import files
from finetune import zeroclap as command_line
from pretrain.config import load as recipes
from pretrain.config.sections import OptimizerConfig
from pretrain.records import metrics
from tests.pretrain.histories import History, recipe


def make_run(folder, *, history=None, loss=5.0, validation=4.0, accelerator="cpu", **sections):
    """A run of six steps whose loss is 5 in the first three and `loss` in the others."""
    history = history or History()
    history.begin(steps=6)
    for line in history.lines[3:]:
        line["loss"] = loss
    history.measure(3, 4.5)
    history.measure(6, validation)
    history.write(folder)
    found = {"versions": {"torch": "2.13"}, "accelerator": accelerator, "started": str(folder)}
    (folder / "environment.json").write_text(json.dumps(found))
    config = dataclasses.replace(history.recipes[-1], folder=str(folder), **sections)
    recipes.dump(config, folder / "run.yaml")
    return str(folder)


def shown(capsys, *runs):
    assert command_line.main(["diff", *runs]) == 0
    return capsys.readouterr().out


def cells(text):
    """The two values of each row, by its name, for values without two spaces in a row."""
    rows = [line[2:].split("  ") for line in text.splitlines() if line.startswith("  ")]
    parts = [[part.strip() for part in row if part.strip()] for row in rows]
    return {row[0]: tuple(row[1:]) for row in parts if len(row) == 3}


def test_runs_that_differ_in_their_folders_alone_are_the_same(tmp_path, capsys):
    text = shown(capsys, make_run(tmp_path / "a"), make_run(tmp_path / "b"))
    assert text.endswith("nothing differs\n")


def test_each_kind_of_difference_is_shown_with_both_values(tmp_path, capsys):
    totals = {"web": 50, "books": 20}
    one = make_run(tmp_path / "a", history=History(totals=totals, weights=[(0, [3, 1])]))
    history = History(totals=totals, weights=[(0, [1, 1])], corpus="f" * 64)
    history.versions["zeroclap"] = "3c4d"
    *others, last = history.recipes[-1].phases
    other = make_run(
        tmp_path / "b",
        history=history,
        loss=4.75,
        validation=4.625,
        accelerator="H100",
        optimizer=OptimizerConfig(learning_rate=1e-3),
        phases=[*others, dataclasses.replace(last, objective={"probability": 0.15})],
    )
    found = cells(shown(capsys, one, other))
    assert found == {
        "optimizer.learning_rate": ("0.0006", "0.001"),
        "data.corpora.web.weight": ("3.0", "1.0"),
        **{f"phases.{n}.data.corpora.web.weight": ("3", "1") for n in (1, 2, 3)},
        "phases.3.objective.probability": ("-", "0.15"),
        "web, digest": ("0" * 16, "f" * 16),
        "books, digest": ("0" * 16, "f" * 16),
        "web, share of a batch": ("75.0%", "50.0%"),
        "books, share of a batch": ("25.0%", "50.0%"),
        "zeroclap": ("1a2b", "3c4d"),
        "accelerator": ("cpu", "H100"),
        "last validation loss": ("4.0000 after 6", "4.6250 after 6"),
        "best validation loss": ("4.0000 after 6", "4.5000 after 3"),
        "training loss, step 3 (the first that differs)": ("5.0", "4.75"),
        "training loss, step 5": ("5.0", "4.75"),  # all digits: the fifth may be what differs
        "validation loss after 6": ("4.0", "4.625"),
    }


def test_a_single_step_that_differs_is_named_once(tmp_path, capsys):
    one, other = (make_run(tmp_path / name) for name in "ab")
    file = tmp_path / "b" / metrics.METRICS
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[4]["loss"] = 4.0
    file.write_bytes(files.json_lines(lines))
    found = cells(shown(capsys, one, other))
    assert found == {"training loss, step 4 (the first that differs)": ("5.0", "4.0")}


def test_measurements_without_an_id_are_compared(tmp_path, capsys):
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    file = tmp_path / "a" / metrics.VALIDATION
    file.write_text(file.read_text().replace(', "validation_id": "m"', ""))
    assert cells(shown(capsys, one, other)) == {"validation id": ("-", "m")}


def test_a_run_that_has_not_begun_is_compared_by_its_settings(tmp_path, capsys):
    (tmp_path / "new").mkdir()
    recipes.dump(recipe([(0, 6)]), tmp_path / "new" / "supervised.yaml")
    found = cells(shown(capsys, make_run(tmp_path / "a"), str(tmp_path / "new")))
    assert found["steps"] == ("6", "0")
    assert found["last validation loss"] == ("4.0000 after 6", "-")


def test_an_environment_of_another_form_is_named(tmp_path, capsys):
    runs = [make_run(tmp_path / name) for name in "ab"]
    (path := tmp_path / "b" / "environment.json").write_text('{"versions": 5}')
    assert command_line.main(["diff", *runs]) == 2
    assert f"{path}: is damaged: " in capsys.readouterr().err

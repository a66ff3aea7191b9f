"""A task of the user's own: what its files hold is found, checked, divided and trained on."""

import dataclasses
import json
import math
import random
from collections import Counter

import pytest

from finetune import custom_task, examples, runs
from finetune.custom_task import Request, describe
from tests.finetune.conftest import QUICK, sentence, train_on


@pytest.fixture
def table(tmp_path):
    """`table(rows, name)`: a JSON Lines file of (text, label) rows."""

    def write(rows, name="train"):
        path = tmp_path / f"{name}.jsonl"
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    return write


def labelled(*labels):
    return [(f"text {number}", label) for number, label in enumerate(labels)]


EQUAL_NUMBERS = tuple(f"{1:0{n}}" for n in range(9, 0, -1))
"""In another order in each process, if a set's order decided."""


@pytest.mark.parametrize(
    ("labels", "kind", "names"),
    [
        (("good", "bad", "good"), "classification", ("bad", "good")),
        ((10, 9, 9), "classification", ("9", "10")),
        ((True, False, True), "classification", ("false", "true")),
        ((1.5, 2, -7), "regression", ()),
        (("--5", "5", "--5"), "classification", ("--5", "5")),
        (("1,2", "a", "a"), "classification", ("1,2", "a")),
        ((10**400, 5, 5), "classification", ("5", str(10**400))),
        (2 * EQUAL_NUMBERS, "classification", EQUAL_NUMBERS),
    ],
)
def test_the_kind_is_what_the_labels_look_like(table, labels, kind, names):
    found = describe(Request("own", table(labelled(*labels)), dev_share=0.3))
    assert (found.task.kind, found.task.labels) == (kind, names)
    assert "by its labels" in found.summary[0]


@pytest.mark.parametrize("name", ["", "..", "a/b", "-a", "CoLA"])
def test_the_name_is_that_of_a_folder_and_of_no_task_of_glue(table, name):
    """Runs in a deeper folder were not found again; a report set CoLA beside published scores."""
    with pytest.raises(ValueError, match="--name"):
        describe(Request(name, table(labelled("a", "b"))))


def test_numbers_are_learned_in_units_of_the_largest(table):
    found = describe(Request("own", table(labelled(0.5, -10, 5)), dev_share=0.3))
    assert found.task.scale == 10
    labels = sorted(e.label for split in found.splits.values() for e in split)
    assert labels == [-1, 0.05, 0.5]


def test_a_share_of_train_is_dev_without_equal_texts_or_lost_classes(table):
    draw = random.Random(1)
    rows = [(draw.choice("abcdefghij") + str(draw.randrange(9)), "x") for _ in range(200)]
    rows += [("single", "rare"), ("other", "y"), ("another", "y")]
    found = describe(Request("own", table(rows), dev_share=0.2))
    train, dev = found.splits["train"], found.splits["dev"]
    assert len(train) + len(dev) == len(rows)
    assert 35 <= len(dev) <= 60
    assert not {e.texts for e in train} & {e.texts for e in dev}
    assert {e.label for e in train} == {0, 1, 2}
    again = describe(Request("own", table(rows[::-1]), dev_share=0.2))
    assert {e.texts for e in again.splits["dev"]} == {e.texts for e in dev}
    assert "WARNING: labels with at most one training example: rare" in "\n".join(found.summary)


def test_dev_has_the_same_share_of_every_class(table):
    labels = ["a"] * 60 + ["b"] * 20 + ["c"] * 10 + ["d"] * 8 + ["e", "f"]
    found = describe(Request("own", table(labelled(*labels)), dev_share=0.2))
    sizes = Counter(e.label for e in found.splits["dev"])
    assert [sizes[label] for label in range(6)] == [12, 4, 2, 2, 0, 0]
    most = describe(Request("own", table(labelled(*labels)), dev_share=0.9))
    assert {e.label for e in most.splits["train"]} == {*range(6)}
    often = describe(Request("own", table(labelled(*"ab" * 50) + [("often", "a")] * 100)))
    assert len(often.splits["dev"]) == 20
    assert often.summary[0].endswith(" (dev is 10% of them)")


def test_texts_of_dev_that_train_has_are_counted(table):
    dev = table([("text 0", "b"), ("new", "a")], "dev")
    found = describe(Request("own", table(labelled("a", "b")), dev=dev))
    assert found.summary[-1].endswith("WARNING: 1 texts of dev are in train as well")


@pytest.mark.parametrize(
    ("rows", "request_", "message"),
    [
        (labelled("a", ""), {}, "line 2: column 'label' is empty"),
        ([("", "a"), ("x", "b")], {}, "line 1: column 'text' is empty"),
        (labelled("a", "a"), {}, "every example has the label 'a'"),
        (labelled("a", "b"), {"texts": ("review",)}, "no column 'review'; it has text, label"),
        (labelled("a", "b"), {"texts": ("text",) * 3}, "--text: 'text text text' .* one column"),
        (labelled("1", "x"), {"kind": "regression"}, "line 2: column 'label': 'x' is not a number"),
        (labelled("a", ["b"]), {}, r"line 2: column 'label': \['b'\] is not one label"),
        (labelled("a", "b"), {"dev_share": 1.0}, "--dev-share: 1.0"),
        ([(5, "a"), ("x", "b")], {}, "line 1: 5 is not text"),
        (labelled(1.0, math.nan, 0.0), {}, "line 2: column 'label' is empty"),
        (labelled("1", "nan", "0"), {}, "line 2: column 'label': 'nan' is not a number"),
        (labelled(5, math.inf), {}, "line 2: column 'label': inf is not a number"),
        (labelled("4", "3,5"), {}, "line 2: column 'label': '3,5' is not a number; write it as"),
        (labelled("a", "b\ud800"), {}, r"line 2: .*'\\ud800'.*surrogates"),
        ([("a\udfff", "a"), ("x", "b")], {}, "line 1: .*surrogates"),
        (labelled(*range(1001)), {}, "has 1,001 different labels; for numbers write --kind regres"),
        (labelled("a", "b"), {"dev": "dev.csv"}, "dev.csv: line 2: label 'c' is not .*has a, b"),
        (labelled("a", "b"), {"test": "mark.csv"}, "mark.csv: line 2: has no column 'label'"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_line(
    table, tmp_path, monkeypatch, rows, request_, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dev.csv").write_text("text,label\nx,c\n")
    (tmp_path / "mark.csv").write_text("text,mark\nx,a\n")
    with pytest.raises(ValueError, match=message):
        describe(Request("own", table(rows), **request_))


def test_examples_are_read_as_they_were_written(table, tmp_path):
    own = describe(Request("own", table(labelled("a", "b", "b")), dev_share=0.3))
    data = custom_task.write(tmp_path / "data", own)
    for split, found in own.splits.items():
        assert examples.read_split(own.task, str(data), split).examples == found
    other = dataclasses.replace(own, splits={**own.splits, "dev": own.splits["train"]})
    assert custom_task.write(tmp_path / "data", other) != data  # which stays


def test_a_task_is_learned_scored_and_predicted(run_ranks, tiny_model, tmp_path, table):
    from finetune import predict

    draw = random.Random(0)
    names = {
        split: table(
            [(sentence(draw, 2 * (n % 2)), ("not", "a wug")[n % 2]) for n in range(count)], split
        )
        for split, count in (("train", 200), ("dev", 40))
    }
    own = describe(Request("mine", test=names["dev"], **names))
    data = str(custom_task.write(tmp_path / "data", own))
    (plan,), _ = runs.plan_runs(
        tiny_model, lambda: data, [own.task], ["pretrained"], [1], [*QUICK, "epochs=6"]
    )
    folder = tmp_path / plan.name
    (result,) = train_on(run_ranks, 1, plan, folder)
    assert runs.read_plan(folder) == plan
    assert not result["best"]["collapsed"]
    assert result["dev_examples"] == 40
    assert result["best"]["accuracy"] > 0.8 > result["constant"]["accuracy"]
    assert result["best"]["accuracy_test"] == result["best"]["accuracy"]  # the same examples
    dev = own.splits["dev"]
    (tmp_path / "new.tsv").write_text("".join(f"{e.texts[0]}\n" for e in dev))
    lines = predict.predict(folder / "model", tmp_path / "new.tsv").splitlines()
    right = sum(
        line.split("\t")[0] == own.task.labels[e.label] for line, e in zip(lines, dev, strict=True)
    )
    assert right / len(dev) == result["best"]["accuracy"]

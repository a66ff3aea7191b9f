"""Prediction: labels of new text, and files for the benchmark's server."""

import dataclasses
import json
import shutil
import sys
import zipfile

import numpy as np
import pytest

from finetune import classifiers, predict, tasks
from finetune.examples import Example
from finetune.protocols import PROTOCOLS
from finetune.runs import read_plan
from finetune.zeroclap import main
from pretrain.convert.model_folder import build, load_model
from pretrain.convert.reading import read_folder
from pretrain.convert.writing import save_model
from pretrain.model.classification import ClassificationHead
from tests.finetune.conftest import QUICK, plans, result_like, train_on, write_tsv
from tests.pretrain.convert.contents import random_contents


@pytest.fixture(scope="module")
def trained(run_ranks, tiny_model, easy_glue, tmp_path_factory):
    """Train on CoLA and STS-B, one seed each."""
    output = tmp_path_factory.mktemp("runs")
    for plan in plans(tiny_model, easy_glue, *QUICK, "epochs=6", names=["CoLA", "STS-B"]):
        (result,) = train_on(run_ranks, 1, plan, output / plan.name)
        (output / plan.name / "result.json").write_text(json.dumps(result))
    return output


@pytest.fixture
def predicted(trained, tmp_path, capsys):
    """`predicted(task, text)`: the exit code, the lines of columns and the error of `predict`."""

    def run(task, text, *options):
        (tmp_path / "new.TSV").write_bytes(text.encode())
        model = str(trained / f"{task}-pretrained-seed1" / "model")
        code = main(["predict", model, str(tmp_path / "new.TSV"), *options])
        shown = capsys.readouterr()
        return code, [line.split("\t") for line in shown.out.splitlines()], shown.err

    return run


def test_each_line_gets_a_label_and_its_probability(predicted):
    text = f"\ufeffthe old dog sees a wug\r\nthe small bird runs near\r\n{'dog ' * 600}\n"
    _, (*lines, _), error = predicted("CoLA", text, "--device", "cpu")
    assert error == "warning: 1 of 3 inputs of CoLA are above max_tokens, and were cut\n"
    assert [label for label, _, _ in lines] == ["0", "1"]
    assert all(0.5 <= float(probability) <= 1 for _, probability, _ in lines)
    assert [text for *_, text in lines] == ["the old dog sees a wug", "the small bird runs near"]


def test_a_regression_gives_numbers_in_the_benchmark_s_units(predicted, tmp_path):
    text = "the dog runs\ta wug sees the wug\nthe dog runs\tthe old cat sees a bird\n"
    assert predicted("STS-B", text, "--output", str(tmp_path / "answers")) == (0, [], "")
    first, second = (line.split("\t") for line in (tmp_path / "answers").read_text().splitlines())
    assert second[1:] == ["the dog runs", "the old cat sees a bird"]
    assert float(second[0]) < 2 < 3 < float(first[0])


def test_a_label_with_a_tab_or_a_line_end_is_one_column():
    task = tasks.Task("own", "classification", texts=(), labels=("a", "very\tgood\n \rtext"))
    assert predict._as_text(task, np.array([0.0, 0.0625])) == ("very good text", "0.5156")


def test_a_model_answers_its_own_task_and_not_that_of_the_model_it_started_from(tiny_model):
    task = tasks.TASKS["CoLA"]
    own = tasks.Task("own", texts=("question", "answer"), labels=("art", "law"))
    before = {"task": "own", "custom_task": dataclasses.asdict(own)}
    record = {"task": "CoLA", "custom_task": None, "pretrained": before}
    head = classifiers.head_config(PROTOCOLS["default"].config(task), task)
    made = random_contents("zero-clap", read_folder(tiny_model).vocabulary, head, record)
    assert predict._task_of(build(tiny_model, made)) == task


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", (), "new.TSV: is empty"),
        ("one\n\nthree\n", (), "new.TSV: line 2: has 1 tab-separated texts, of 0 characters; it"),
        ("sentence\none\n", (), "new.TSV: line 1: is a header, not a text"),
        ("one\ntwo\tthree\n", (), "line 2: has 2 tab-separated texts, of 8 characters; it must ha"),
        ("one\n", ("--device", "cuda"), "--device cuda: this machine has cpu"),
        ("one\n", ("--output", "new.TSV"), "new.TSV: exists; choose a new name"),
        ("one\n", ("--output", "."), ".: exists; choose a new name"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    predicted, tmp_path, monkeypatch, text, options, message
):
    monkeypatch.chdir(tmp_path)
    code, lines, error = predicted("CoLA", text, *options)
    assert (code, lines, error.count("\n")) == (2, [], 1)
    assert message in error
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("new.TSV", text)]


def test_answers_are_without_dropout_and_of_the_model_s_segments(segment_model, monkeypatch):
    def seen(model, encoded, device):
        return model.training, "segment_ids" in encoded.collate([0]).arrays

    monkeypatch.setattr(predict, "logits_of", seen)
    loaded, task = load_model(segment_model), tasks.TASKS["RTE"]
    config = classifiers.head_config(PROTOCOLS["default"].config(task), task)
    head = ClassificationHead(loaded.model.config.hidden_size, config)
    loaded = dataclasses.replace(loaded, classifier=head)
    assert predict._logits(loaded, task, [Example(("a", "b"))], "cpu") == (False, True)


def test_a_submission_without_its_device_or_kept_models_and_a_model_without_a_head_are_refused(
    trained, tiny_model, tmp_path, capsys
):
    for name in ("new.TSV", "new.ndjson"):
        (tmp_path / name).write_text("one\n")
    model = trained / "CoLA-pretrained-seed1" / "model"
    output = ["--output", str(tmp_path / "submission")]
    for words, message in (
        (["submit", str(trained), *output, "--device", "cuda"], "--device cuda: this machine has"),
        (["submit", str(tmp_path), *output], "has no finished run of `"),
        (["submit", str(tmp_path / "gone"), *output], "gone: no such folder"),
        (["glue-report", str(tmp_path / "gone")], "gone: no such folder"),
        (["predict", str(tiny_model), str(tmp_path / "new.TSV")], "has no classification head"),
        (["predict", str(model), f"{tmp_path}/new.ndjson"], "new.ndjson: is a table; `predict`"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "submission").exists()


@pytest.mark.parametrize(
    ("task", "row"), [("CoLA", "the old dog sees a wug"), ("STS-B", "the dog runs\ta wug sees it")]
)
def test_transformers_gives_the_same_answers(task, row, trained, predicted, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # remote code is found by an entry in it
    transformers = pytest.importorskip("transformers")
    _, ((answer, *rest),), _ = predicted(task, f"{row}\n")
    folder = trained / f"{task}-pretrained-seed1" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    logits = model(**tokenizer(*row.split("\t"), return_tensors="pt")).logits[0].detach()
    if task == "CoLA":
        label = int(logits.argmax())
        assert (answer, model.config.id2label[label]) == (str(label), str(label))
        assert float(rest[0]) == pytest.approx(float(logits.softmax(-1)[label]), abs=1e-4)
    else:
        assert float(answer) == pytest.approx(float(logits[0]), abs=1e-4)


@pytest.fixture(scope="module")
def runs_of_every_task(trained, tiny_model, tmp_path_factory):
    """Make runs of all tasks: the trained ones, and for the others models with random heads."""
    output, data = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("data")
    shutil.copytree(trained, output, dirs_exist_ok=True)
    vocabulary = read_folder(tiny_model).vocabulary
    plan = read_plan(output / "CoLA-pretrained-seed1")
    for task in tasks.TASKS.values():
        run = output / f"{task.name}-pretrained-seed1"
        if run.is_dir():
            continue
        head = classifiers.head_config(PROTOCOLS["default"].config(task), task)
        made = random_contents("zero-clap", vocabulary, head, {"task": task.name})
        save_model(run / "model", made)
        planned = dataclasses.replace(plan, task=task.name, data=str(data))
        result = result_like(task.name) | {"plan": dataclasses.asdict(planned)}
        (run / "result.json").write_text(json.dumps(result))
        for split in task.test:
            texts = ("the old dog",) * len(task.texts)
            write_tsv(data, task.name, split, [task.texts, texts])
    worse = shutil.copytree(output / "CoLA-pretrained-seed1", output / "CoLA-pretrained-seed2")
    result = json.loads((worse / "result.json").read_text())
    result["best"]["matthews"], result["last"]["matthews"] = -1.0, 2.0  # the best epoch's is kept
    (worse / "result.json").write_text(json.dumps(result))
    return output


def test_a_submission_is_a_zip_file_of_every_test_set_in_the_server_s_format(
    runs_of_every_task, tmp_path, capsys
):
    output = tmp_path / "submission"
    assert main(["submit", str(runs_of_every_task), "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == str(output / "submission.zip")
    assert "predictions of CoLA-pretrained-seed1" in shown  # the best
    names = {name or task.name for task in tasks.TASKS.values() for name in task.test.values()}
    with zipfile.ZipFile(output / "submission.zip") as archive:
        assert sorted(archive.namelist()) == sorted(f"{name}.tsv" for name in names)
        for name in archive.namelist():
            assert archive.read(name) == (output / name).read_bytes()
    assert (output / "CoLA.tsv").read_text() == "index\tprediction\n0\t0\n1\t1\n"
    head, first, second = (output / "STS-B.tsv").read_text().splitlines()
    assert first.split("\t")[0] == "0"
    assert 5 >= float(first.split("\t")[1]) > float(second.split("\t")[1]) >= 0
    assert {path.name for path in output.iterdir()} == {*archive.namelist(), "submission.zip"}
    with pytest.raises(ValueError, match="submission: is not empty; choose a new folder"):
        predict.submit(runs_of_every_task, output)


def test_all_that_a_submission_lacks_is_named_before_anything_is_predicted(
    runs_of_every_task, tmp_path, monkeypatch
):
    runs = shutil.copytree(runs_of_every_task, tmp_path / "runs")
    shutil.rmtree(runs / "RTE-pretrained-seed1" / "model")
    shutil.rmtree(runs / "WNLI-pretrained-seed1")
    path = runs / "CoLA-pretrained-seed1" / "result.json"
    result = json.loads(path.read_text())
    result["plan"]["data"] = str(tmp_path)
    path.write_text(json.dumps(result))
    monkeypatch.setattr(predict, "_logits", pytest.fail)
    with pytest.raises(
        ValueError, match=r"no run with a kept model of RTE, WNLI; .*CoLA: has no test\.tsv"
    ):
        predict.submit(runs, tmp_path / "submission")
    assert not (tmp_path / "submission").exists()


def test_submissions_use_the_benchmark_s_labels():
    logits = np.array([[0, 1, 0], [2, 1, 0]], dtype=np.float32)
    content = predict.submission(tasks.TASKS["MNLI"], logits)
    assert content == "index\tprediction\n0\tneutral\n1\tentailment\n"
    numbers = np.array([[-0.5], [2.5], [6.0]], dtype=np.float32)
    content = predict.submission(tasks.TASKS["STS-B"], numbers)
    assert content == "index\tprediction\n0\t0.000\n1\t2.500\n2\t5.000\n"

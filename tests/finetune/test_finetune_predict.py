"""Prediction: labels of new text, and files for the benchmark's server."""

import dataclasses
import json
import shutil
import sys
import zipfile

import numpy as np
import pytest

from finetune import predict, runs, tasks
from finetune.__main__ import main
from finetune.protocols import PROTOCOLS


@pytest.fixture(scope="module")
def trained(run_ranks, tiny_model, easy_glue, tmp_path_factory):
    """Train on CoLA and STS-B, one seed each."""
    from finetune import train

    output = tmp_path_factory.mktemp("runs")
    settings = ["epochs=10", "learning_rate=1e-2", "pooling=mean", "dropout=0"]
    data = str(easy_glue)
    for plan in runs.plan_runs(
        tiny_model, data, tasks.find(["CoLA", "STS-B"]), ["pretrained"], [1], settings
    ):
        plan.write(output / plan.name)
        (result,) = run_ranks(1, lambda plan=plan: train.train(plan, output / plan.name))
        (output / plan.name / "result.json").write_text(json.dumps(result))
    return output


def write(path, text):
    path.write_bytes(text.encode())
    return path


def test_each_line_gets_a_label_and_its_probability(trained, tmp_path, capsys):
    file = write(
        tmp_path / "new.tsv", "\ufeffthe old dog sees a wug\r\nthe small bird runs near\r\n"
    )
    assert main(["predict", str(trained / "CoLA-pretrained-seed1" / "model"), str(file)]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [label for label, _, _ in lines] == ["0", "1"]
    assert all(0.5 <= float(probability) <= 1 for _, probability, _ in lines)
    assert [text for *_, text in lines] == ["the old dog sees a wug", "the small bird runs near"]


def test_a_device_that_does_not_exist_is_refused(trained, tmp_path, capsys):
    file = write(tmp_path / "new.tsv", "one\n")
    model = str(trained / "CoLA-pretrained-seed1" / "model")
    output = ["--output", str(tmp_path / "submission")]
    assert main(["predict", model, str(file), "--device", "cpu"]) == 0
    for arguments in (["predict", model, str(file)], ["submit", str(trained), *output]):
        assert main([*arguments, "--device", "cuda"]) == 2
        assert "error: --device cuda: this machine has cpu" in capsys.readouterr().err
    assert not (tmp_path / "submission").exists()


def test_a_regression_gives_numbers_in_the_benchmark_s_units(trained, tmp_path):
    file = write(
        tmp_path / "new.tsv",
        "the dog runs\ta wug sees the wug\nthe dog runs\tthe old cat sees a bird\n",
    )
    output = tmp_path / "answers.txt"
    model = str(trained / "STS-B-pretrained-seed1" / "model")
    assert main(["predict", model, str(file), "--output", str(output)]) == 0
    lines = [line.split("\t") for line in output.read_text().splitlines()]
    assert lines[1][1:] == ["the dog runs", "the old cat sees a bird"]
    values = [float(line[0]) for line in lines]
    assert values[1] < 2 < 3 < values[0]


@pytest.mark.parametrize(
    ("task", "row"), [("CoLA", "the old dog sees a wug"), ("STS-B", "the dog runs\ta wug sees it")]
)
def test_transformers_gives_the_same_answers(task, row, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # remote code is found by an entry in it
    transformers = pytest.importorskip("transformers")
    folder = trained / f"{task}-pretrained-seed1" / "model"
    answer, *rest = predict.predict(folder, write(tmp_path / "new.tsv", f"{row}\n")).split("\t")
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("one\n\nthree\n", "line 2: has 1 tab-separated texts, of 0 characters; it must have 1"),
        ("one\ntwo\tthree\n", "line 2: has 2 tab-separated texts, of 8 characters; it must have 1"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(trained, tmp_path, capsys, text, message):
    file = write(tmp_path / "new.tsv", text)
    assert main(["predict", str(trained / "CoLA-pretrained-seed1" / "model"), str(file)]) == 2
    error = capsys.readouterr().err
    assert f"{file}: {message}" in error
    assert error.count("\n") == 1


def test_a_model_without_a_head_is_refused(tiny_model, tmp_path):
    file = write(tmp_path / "new.tsv", "one\n")
    with pytest.raises(ValueError, match="has no classification head, so it predicts no"):
        predict.predict(tiny_model, file)


@pytest.fixture(scope="module")
def runs_of_every_task(trained, tiny_model, tmp_path_factory):
    """Make runs of all tasks: the trained ones, and for the others models with random heads."""
    from finetune import classifiers
    from pretrain.convert.contents import CLASSIFIER
    from pretrain.convert.reading import read_folder
    from pretrain.convert.writing import save_model
    from pretrain.model.heads import ClassificationHead

    output, data = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("data")
    shutil.copytree(trained, output, dirs_exist_ok=True)
    model = read_folder(tiny_model)
    for task in tasks.TASKS.values():
        run = output / f"{task.name}-pretrained-seed1"
        if run.is_dir():
            continue
        config = classifiers.head_config(PROTOCOLS["default"].config(task), task)
        head = ClassificationHead(model.config.hidden_size, config).state_dict(prefix=CLASSIFIER)
        weights = {name: w for name, w in model.weights.items() if not name.startswith("head.")}
        changes = {"weights": weights | head, "classifier": config}
        changes |= {"provenance": {"task": task.name}}
        save_model(run / "model", dataclasses.replace(model, **changes))
        best = dict.fromkeys(task.score_names, 0.5)
        result = {"task": task.name, "weights": "pretrained", "plan": {"data": str(data)}}
        result |= {"best": best, "last": best, "epochs": [best]}
        (run / "result.json").write_text(json.dumps(result))
        for split in task.test:
            path = data / task.name / f"{split}.tsv"
            path.parent.mkdir(exist_ok=True)
            rows = ["\t".join(task.texts), "\t".join(["the old dog"] * len(task.texts))]
            path.write_text("".join(f"{row}\n" for row in rows))
    return output


def test_a_submission_is_a_zip_file_of_every_test_set_in_the_server_s_format(
    runs_of_every_task, tmp_path, capsys
):
    output = tmp_path / "submission"
    assert main(["submit", str(runs_of_every_task), "--output", str(output)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(output / "submission.zip")
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


def test_all_that_a_submission_lacks_is_named_before_anything_is_predicted(
    runs_of_every_task, tmp_path, monkeypatch
):
    runs = tmp_path / "runs"
    shutil.copytree(runs_of_every_task, runs)
    shutil.rmtree(runs / "RTE-pretrained-seed1" / "model")
    shutil.rmtree(runs / "WNLI-pretrained-seed1")
    path = runs / "CoLA-pretrained-seed1" / "result.json"
    result = json.loads(path.read_text())
    result["plan"]["data"] = str(tmp_path)
    path.write_text(json.dumps(result))
    monkeypatch.setattr(predict, "_outputs", pytest.fail)
    with pytest.raises(
        ValueError,
        match=r"CoLA: has no test\.tsv.*no run of RTE .*no run of WNLI",
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


def test_a_folder_without_kept_models_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run of CoLA with a kept model; no run of SST-2"):
        predict.submit(tmp_path, tmp_path / "submission")

"""Runs: planned, refused, done through DeepSpeed beside each other, failed and continued."""

import contextlib
import dataclasses
import fcntl
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.common import files
from data_prep.common.files import write_json
from finetune import runs
from finetune.runs import PLAN, read_plan
from finetune.zeroclap import main
from pretrain.convert.model_folder import load_model
from pretrain.processes import gpus
from tests.finetune.conftest import plans, result_like, train_on
from tests.hub import hub_of
from tests.running import ROOT

NAME = "CoLA-pretrained-seed1"
QUICK = ["epochs=6", "learning_rate=1e-2", "pooling=mean", "dropout=0", "attention_dropout=0.1"]


def names_of(planned):
    return [plan.name for plan in planned]


@pytest.fixture(scope="module")
def finished(tiny_model, easy_glue, tmp_path_factory):
    """Run one seed with the command; the run is a process of its own."""
    output, printed = tmp_path_factory.mktemp("runs"), io.StringIO()
    words = f"glue {tiny_model} --data {easy_glue} --tasks CoLA --seeds 1 --output {output}"
    with contextlib.redirect_stdout(printed):
        assert main([*words.split(), "--jobs", "2", *QUICK]) == 0
    return output, printed.getvalue()


def result_of(output, name):
    return json.loads((output / name / "result.json").read_text())


def test_runs_learn_and_write_their_results(finished):
    output, printed = finished
    result = result_of(output, NAME)
    assert result["constant"]["accuracy"] == pytest.approx(0.7)
    assert result["best"]["accuracy"] > 0.9
    assert [epoch["epoch"] for epoch in result["epochs"]] == [1, 2, 3, 4, 5, 6]
    assert result["best"]["matthews"] == max(e["matthews"] for e in result["epochs"])
    assert result["last"] == result["epochs"][-1]
    assert len((output / NAME / "metrics.jsonl").read_text().splitlines()) == result["steps"] == 60
    assert result["tokens_per_second"] > 0
    assert "[1/1] CoLA-pretrained-seed" in printed
    assert "tokens/s" in printed
    assert "| pretrained | 1 | 0 |" in printed


def test_the_kept_model_has_the_task_s_head_and_the_encoder_s_config(finished, tiny_model):
    folder = finished[0] / NAME
    loaded = load_model(folder / "model")
    assert loaded.classifier.config.labels == ("0", "1")
    assert loaded.model.config == load_model(tiny_model).model.config
    assert not loaded.contents.has_head
    assert [path.name for path in folder.iterdir() if path.name[0] == "."] == []


def test_seeds_run_one_after_the_other_and_the_longest_run_first(tiny_model, easy_glue):
    found = plans(tiny_model, easy_glue, seeds=(7, 2), names=("CoLA", "STS-B", "RTE"))
    assert [plan.seed for plan in found] == [7] * 3 + [2] * 3
    assert [plan.task for plan in found[:3]] == [plan.task for plan in found[3:]]
    work = [plan.work for plan in found[:3]]
    assert work == sorted(work, reverse=True)
    assert found[-1].task == "CoLA"  # one sentence rather than two


@pytest.mark.slow
def test_the_same_plan_gives_the_same_scores_and_another_seed_others(run_ranks, finished, tmp_path):
    output, *_ = finished
    plan = read_plan(output / NAME)
    both = [plan, dataclasses.replace(plan, seed=2)]
    again, other = (
        train_on(run_ranks, 1, each, tmp_path / each.name)[0]["epochs"] for each in both
    )
    assert again == result_of(output, NAME)["epochs"]
    assert other != again


@pytest.fixture
def without_model(finished, tmp_path):
    """Copy the folder of a finished run, without the model that it was to keep."""
    output = shutil.copytree(finished[0], tmp_path / "runs")
    shutil.rmtree(output / NAME / "model")  # as --no-models leaves it
    return output


def test_only_what_is_not_finished_is_run_and_its_plan_may_change(
    finished, without_model, tiny_model, easy_glue
):
    """A run whose model is wanted and missing is not finished."""
    wanted = plans(tiny_model, easy_glue, *QUICK)
    assert runs.prepare(finished[0], wanted) == []
    assert names_of(runs.prepare(without_model, wanted)) == [NAME]
    without = plans(tiny_model, easy_glue, *QUICK, seeds=(1, 2), save_models=False)
    assert names_of(runs.prepare(without_model, without)) == ["CoLA-pretrained-seed2"]
    changed = plans(tiny_model, easy_glue, *QUICK, seeds=(2,))
    assert runs.prepare(without_model, changed) == changed
    assert read_plan(without_model / changed[0].name) == changed[0]


def test_runs_that_are_not_comparable_do_not_share_a_folder(without_model, tiny_model, easy_glue):
    (plan,) = plans(tiny_model, easy_glue, *QUICK)
    moved = dataclasses.replace(plan, seed=4, weights="random", model="x", data="y")
    assert plan.differences(moved) == []
    other = dataclasses.replace(plan, model_sha256="c" * 64)
    other_hash = f"{plan.model_sha256[:12]}, now {'c' * 12}"
    assert plan.differences(other) == [f"model: {other_hash}"]
    longer = plans(tiny_model, easy_glue, *QUICK[1:], "epochs=7", seeds=(9,))
    of_roberta = plans(tiny_model, easy_glue, names=["RTE"], protocol="roberta", seeds=())
    for refused, message in [
        (longer, "epochs: 6, now 7"),
        (of_roberta, "protocol: default, now roberta"),
        ([dataclasses.replace(other, task="RTE", seed=9)], f"{NAME}: not .*\\(model: {other_hash}"),
    ]:
        with pytest.raises(ValueError, match=message):
            runs.prepare(without_model, refused)
        assert len(refused) in (1, 5)  # as many as the protocol has
        assert not (without_model / refused[0].name).exists()


@pytest.mark.parametrize(
    ("program", "cause", "how"),
    [
        ("sys.exit('OSError: no room')", "OSError: no room", "ended with code 1"),
        ("", "ended with code 0", "ended with code 0"),
    ],
)
def test_a_repeated_run_that_leaves_no_model_has_failed_and_keeps_its_earlier_scores(
    without_model, monkeypatch, capsys, program, cause, how
):
    """Its earlier result does not make it a success, and its failure does not stop the next one."""
    before, plan = result_of(without_model, NAME), read_plan(without_model / NAME)
    started = []

    def start(output, plan, *_):
        started.append(plan.name)
        with (output / plan.name / "log.txt").open("w") as log:
            return subprocess.Popen([sys.executable, "-c", f"import sys; {program}"], stderr=log)

    monkeypatch.setattr("finetune.starting._start", start)
    arguments = ["glue", plan.model, "--data", plan.data, "--tasks", "CoLA", "--seeds", "1,3"]
    assert main([*arguments, "--jobs", "1", "--output", str(without_model), *QUICK]) == 1
    assert started == [NAME, "CoLA-pretrained-seed3"]
    shown = capsys.readouterr()
    assert "runs to do: 2, finished before: 0" in shown.out
    assert re.search(rf"\[1/2, 0:00:\d\d left\] {NAME}: failed, {how}; see ", shown.out)
    assert f"[2/2] {started[1]}: failed, {how}; " in shown.out
    assert f"runs that failed: 2: {', '.join(started)}: {cause}\n" in shown.err
    assert result_of(without_model, NAME) == before


def test_pretrained_and_random_weights_differ_in_the_encoder_only(tiny_model, easy_glue):
    from finetune import classifiers

    loaded = load_model(tiny_model)
    both = plans(tiny_model, easy_glue, weights=("pretrained", "random"))
    pretrained, random = (classifiers.build(loaded, plan).state_dict() for plan in both)
    again = classifiers.build(loaded, both[1]).state_dict()
    for name, tensor in pretrained.items():
        if name.startswith("encoder."):
            assert tensor.equal(loaded.model.state_dict()[name])
        else:
            assert tensor.equal(random[name])
        assert random[name].equal(again[name])
    name = "encoder.embeddings.tokens.weight"
    assert not pretrained[name].equal(random[name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["epocs=3"], "did you mean 'epochs'"),
        (["learning_rate=.inf"], "learning_rate: inf is not accepted; it must be a finite number"),
        (["--tasks", "coal"], "unknown task 'coal' (did you mean CoLA?)"),
        (["--device", "cuda:4"], "--device cuda:4: this machine has cpu, cuda:0, cuda:1, cuda:2, "),
        (["--world-size", "5"], "--world-size: 5 ranks on a machine with 4 usable GPUs"),
        (["deepspeed=zero9"], "zero9"),
        (["deepspeed=zero1_fp16"], "deepspeed: zero1_fp16 computes in fp16, which torch does not"),
        (["start_from=MNIL"], "unknown task 'MNIL' (did you mean MNLI?)"),
        (["start_from=all"], "start_from 'all': name one task"),
        (["start_from=MNLI"], "CoLA starts from the model of MNLI (start_from)"),
        (["--data", "nowhere"], "--data nowhere: no such folder; hub is accepted"),
        (["--tasks", "SST-2,CoLA,MRPC"], "data hub would do as well); GLUE/MRPC: has no train.tsv"),
        (["--tasks", "SST-2,CoLA,MRPC"], "GLUE/mrpc or --data hub would do"),
    ],
)
def test_bad_requests_are_refused_before_anything_starts(
    tiny_model, easy_glue, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr(gpus, "visible_gpus", lambda environ=None: list("0123"))
    monkeypatch.setattr("finetune.starting.visible_gpus", list)
    monkeypatch.setattr("pretrain.checks.recipe.cpu_has_fp16", bool)
    output = tmp_path / "runs"
    usual = {"--data": str(easy_glue), "--tasks": "CoLA", "--output": str(output)}
    base = [word for pair in usual.items() if pair[0] not in arguments for word in pair]
    assert main(["glue", str(tiny_model), *base, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("zeroclap glue: error: ")
    assert error.count("\n") == 1
    assert message in error.replace(str(easy_glue), "GLUE")
    assert not output.exists()


def test_a_refused_setting_leaves_no_folder_of_the_examples(tiny_model, tmp_path, capsys):
    output, table = tmp_path / "runs", tmp_path / "own.csv"
    table.write_text("text,label\n" + "".join(f"{n} words,{n % 2}\n" for n in range(20)))
    call = ["finetune", str(tiny_model), "--train", str(table), "--output", str(output)]
    assert main([*call, "pooling=bogus"]) == 2
    assert "pooling: 'bogus' is not accepted" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("command", ["glue --data GLUE --tasks CoLA", "finetune --train own.csv"])
def test_a_folder_that_something_else_fills_is_refused_and_not_changed(
    tiny_model, tmp_path, capsys, command
):
    (tmp_path / "data").mkdir()
    name, *words = command.split()
    assert main([name, str(tiny_model), *words, "--output", str(tmp_path)]) == 2
    assert f"{tmp_path}: is not empty; choose a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_folder_whose_first_plan_was_being_written_as_the_process_was_killed_goes_on(tmp_path):
    (tmp_path / "CoLA-pretrained-seed1").mkdir()
    files._partial(tmp_path / "CoLA-pretrained-seed1" / PLAN).touch()
    runs.check_output(tmp_path)


def test_a_model_that_cannot_be_fine_tuned_is_refused_before_any_run(
    tiny_model, easy_glue, tmp_path
):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "causal": True}))
    assert plans(folder, easy_glue, "pooling=mean")
    with pytest.raises(ValueError, match="pooling: 'first' is not accepted; it must be 'mean'"):
        plans(folder, easy_glue)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no vocabulary"):
        plans(folder, easy_glue, "pooling=mean")


def test_two_processes_do_not_work_on_one_run(tmp_path, tiny_model, easy_glue, capsys):
    from finetune import train

    (name,) = names_of(runs.prepare(tmp_path, plans(tiny_model, easy_glue)))
    with (tmp_path / name / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert train.main(tmp_path / name) == 2
    assert "another process is working" in capsys.readouterr().err


def test_a_run_that_begins_again_keeps_nothing_of_an_interrupted_one(
    tiny_model, easy_glue, tmp_path, monkeypatch
):
    """That may have had other settings, and was ended after it had written its model."""
    from finetune import train

    (plan,) = plans(tiny_model, easy_glue, save_models=False)
    finish(tmp_path, plan, tiny_model)
    (tmp_path / plan.name / "result.json").unlink()
    monkeypatch.setattr(train, "train", lambda plan, folder: {})
    assert train.main(tmp_path / plan.name) == 0
    assert {path.name for path in (tmp_path / plan.name).iterdir()} == {PLAN, "lock", "result.json"}


def test_a_command_with_other_settings_during_a_run_does_not_take_its_result(
    tiny_model, easy_glue, tmp_path, monkeypatch
):
    from finetune import train

    (plan,) = plans(tiny_model, easy_glue, save_models=False)
    other = plans(tiny_model, easy_glue, "epochs=9", save_models=False)
    monkeypatch.setattr(train, "train", lambda plan, folder: runs.prepare(tmp_path, other) and {})
    runs.prepare(tmp_path, [plan])
    assert train.main(tmp_path / plan.name) == 0
    assert runs.prepare(tmp_path, [plan]) == []
    with pytest.raises(ValueError, match="not comparable"):
        runs.prepare(tmp_path, other)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_ended_ends_its_runs_and_resumes_when_called_again(
    number, tiny_model, easy_glue, tmp_path
):
    seeds = "1,2" if number == signal.SIGTERM else "2"
    words = f"-m finetune.zeroclap glue {tiny_model} --data {easy_glue} --tasks CoLA --jobs 1"
    words += f" --seeds {seeds} --output {tmp_path}"
    call = [sys.executable, *words.split(), *QUICK[1:], "epochs=12"]
    first = subprocess.Popen(call, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "CoLA-pretrained-seed2"
    while not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").read_text():
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.05)
    first.send_signal(number)
    error = first.communicate(timeout=60)[1]
    with (run / "lock").open("a") as lock:
        wait = fcntl.LOCK_NB if number == signal.SIGTERM else 0  # else the run ends soon
        fcntl.flock(lock, fcntl.LOCK_EX | wait)
    assert not (run / "result.json").exists()
    if number == signal.SIGTERM:
        assert error.endswith("stopped\n")
        assert first.returncode == 130
        again = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "runs to do: 1, finished before: 1" in again.stdout
        assert result_of(tmp_path, run.name)["steps"] == 120


def finish(output, plan, model, collapsed=False):
    """Write a run's folder as if it had been done."""
    plan.write(output / plan.name)
    shutil.copytree(model, output / plan.name / "model")
    write_json(output / plan.name / "result.json", result_like(plan.task, plan.seed, collapsed))


def test_a_run_starts_from_the_model_of_another_task_s_first_run_that_did_not_collapse(
    run_ranks, tiny_model, easy_glue, tmp_path, monkeypatch
):
    import torch

    from pretrain.convert.reading import read_folder
    from pretrain.convert.writing import save_model

    output, other = tmp_path / "runs", tmp_path / "other"
    contents = read_folder(tiny_model)
    doubled = {name: 2 * tensor for name, tensor in contents.weights.items()}
    save_model(other, dataclasses.replace(contents, weights=doubled))
    settings = ["start_from=cola", "learning_rate=1e-12", "epochs=1", "pooling=mean"]
    cola = plans(tiny_model, easy_glue, *settings, seeds=(1, 2, 3))
    assert runs.prepare(output, cola) == cola  # from the model itself
    (rte,) = plans(tiny_model, easy_glue, *settings, names=["RTE"])
    with pytest.raises(ValueError, match="RTE starts from the model of CoLA .* run CoLA first"):
        runs.prepare(output, [rte])
    finish(output, cola[0], tiny_model, collapsed=True)
    finish(output, cola[1], other)
    finish(output, cola[2], tiny_model)
    read, load = [], runs.load_model
    monkeypatch.setattr(runs, "load_model", lambda folder: read.append(folder) or load(folder))
    waiting, other_seed = runs.prepare(output, [*cola, rte, dataclasses.replace(rte, seed=2)])
    assert waiting.start_sha256 == other_seed.start_sha256
    assert read == [output / cola[1].name / "model"]
    assert (waiting.task, waiting.start) == ("RTE", cola[1].name)
    assert read_plan(output / rte.name) == waiting
    (random,) = plans(tiny_model, easy_glue, *settings, names=["RTE"], weights=["random"])
    assert runs.prepare(output, [random]) == [random]  # from nothing
    train_on(run_ranks, 1, waiting, output / rte.name)
    name = "encoder.embeddings.tokens.weight"
    began, kept, usual = (
        load_model(folder).model.state_dict()[name]
        for folder in (other, output / rte.name / "model", tiny_model)
    )
    assert torch.allclose(began, kept, atol=1e-6)
    assert not torch.allclose(usual, kept, atol=1e-3)


def test_a_plan_of_another_version_an_invalid_one_and_none_are_refused(
    tiny_model, easy_glue, tmp_path
):
    with pytest.raises(ValueError, match="not the folder of a run"):
        read_plan(tmp_path)
    (plan,) = plans(tiny_model, easy_glue)
    plan.write(tmp_path)
    values = json.loads((tmp_path / PLAN).read_text())
    for changed, message in [
        ({**values, "judge": "strict"}, "unknown key 'judge'"),
        ({**values, "config": {**values["config"], "freeze": 3}}, "unknown key 'config.freeze'"),
        ({"task": "CoLA"}, "missing"),
    ]:
        (tmp_path / PLAN).write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=rf"run\.json: not a plan that .*{message}"):
            read_plan(tmp_path)


def test_a_model_of_the_hub_is_fetched_and_recorded_by_its_folder(
    tiny_model, easy_glue, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "hub" / "someone" / "tiny")
    with hub_of(tmp_path / "hub"):
        (plan,) = plans(Path("someone/tiny"), easy_glue)
    (here,) = plans(tiny_model, easy_glue)
    assert plan.model_sha256 == here.model_sha256
    assert Path(plan.model, "config.json").is_file()

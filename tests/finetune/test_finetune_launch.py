"""From one command to many processes: real runs through DeepSpeed, and what goes wrong."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from finetune import launch
from finetune.__main__ import main
from finetune.config import read_plan

ROOT = Path(__file__).parents[2]
QUICK = ["epochs=6", "learning_rate=1e-2", "pooling=mean", "dropout=0", "attention_dropout=0.1"]


def plans(model, data, *overrides, seeds=(1,), weights=("pretrained",)):
    return launch.plan_runs(model, data, ["CoLA"], weights, seeds, overrides)


@pytest.fixture
def in_root(monkeypatch):
    """The runs' processes find the packages where pytest was started, or here."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def finished(tiny_model, easy_glue, tmp_path_factory):
    """Two seeds of one command, through the command line."""
    output = tmp_path_factory.mktemp("runs")
    words = ["glue", str(tiny_model), "--data", str(easy_glue), "--tasks", "CoLA"]
    words += ["--seeds", "1,2", "--output", str(output), "--jobs", "2", "--save-models"]
    done = subprocess.run(
        [sys.executable, "-m", "finetune", *words, *QUICK],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output, words, done.stdout


def result_of(output, name):
    return json.loads((output / name / "result.json").read_text())


def test_runs_learn_and_leave_their_results(finished):
    output, _, printed = finished
    for seed in (1, 2):
        result = result_of(output, f"CoLA-pretrained-seed{seed}")
        assert result["majority"]["accuracy"] == pytest.approx(0.7)
        assert result["best"]["accuracy"] > 0.9
        assert [epoch["epoch"] for epoch in result["epochs"]] == [1, 2, 3, 4, 5, 6]
        assert result["best"]["accuracy"] == max(e["accuracy"] for e in result["epochs"])
        assert result["last"] == result["epochs"][-1]
        steps = (output / f"CoLA-pretrained-seed{seed}" / "metrics.jsonl").read_text().splitlines()
        assert len(steps) == result["steps"] == 60
        assert result["tokens_per_second"] > 0
    assert len((output / "results.jsonl").read_text().splitlines()) == 2
    assert "[2/2] CoLA-pretrained-seed" in printed
    assert "| pretrained | 2 |" in printed


def test_a_kept_model_gives_the_scores_that_were_reported(finished, tiny_model, easy_glue):
    import torch

    from finetune import glue
    from pretrain import model_folder
    from pretrain.model.classifier import Classifier

    output, *_ = finished
    examples = glue.find("CoLA").read(easy_glue, "dev")
    base = model_folder.load(tiny_model).model
    for seed in (1, 2):
        folder = output / f"CoLA-pretrained-seed{seed}"
        loaded = model_folder.load(folder / "model")
        head = loaded.classification_heads["CoLA"]
        assert head.config.labels == ("0", "1")
        classifier = Classifier(loaded.model.encoder, head)
        right = 0
        for example in examples:
            (ids,) = loaded.tokenizer.encode_batch([example.sentence])
            with torch.no_grad():
                logits = classifier(torch.tensor([[0, *ids.tolist(), 2]]), None)
            right += int(logits.argmax()) == example.label
        assert right / len(examples) == result_of(output, folder.name)["last"]["accuracy"]
        assert loaded.model.config == base.config
        assert torch.equal(loaded.model.head.beta, base.head.beta)
        assert sorted(path.name for path in folder.iterdir() if path.name[0] == ".") == []


def test_a_run_whose_model_is_wanted_but_gone_is_done_again(
    finished, tmp_path, tiny_model, easy_glue
):
    output = tmp_path / "runs"
    shutil.copytree(finished[0], output)
    shutil.rmtree(output / "CoLA-pretrained-seed2" / "model")
    wanted = launch.plan_runs(
        tiny_model, easy_glue, ["CoLA"], ["pretrained"], (1, 2), QUICK, save_models=True
    )
    assert launch.prepare(output, wanted) == ["CoLA-pretrained-seed2"]
    without = plans(tiny_model, easy_glue, *QUICK, seeds=(1, 2))
    assert launch.prepare(output, without) == []


def test_the_same_run_gives_the_same_scores_and_another_seed_others(finished, tmp_path, in_root):
    output, *_ = finished
    names = ["CoLA-pretrained-seed1", "CoLA-pretrained-seed2"]
    for name in names:
        read_plan(output / name).write(tmp_path / name)
    assert launch.run_all(tmp_path, names, 2, print) == []  # two at once: as many threads as there
    again = [result_of(tmp_path, name)["epochs"] for name in names]
    assert again == [result_of(output, name)["epochs"] for name in names]
    assert again[0] != again[1]


def test_what_is_done_is_not_done_again(finished, tmp_path, tiny_model, easy_glue):
    output = tmp_path / "runs"
    shutil.copytree(finished[0], output)
    (output / "CoLA-pretrained-seed2" / "result.json").unlink()
    waiting = launch.prepare(output, plans(tiny_model, easy_glue, *QUICK, seeds=(1, 2, 3)))
    assert waiting == ["CoLA-pretrained-seed2", "CoLA-pretrained-seed3"]


def test_runs_that_could_not_be_compared_do_not_share_a_folder(finished, tiny_model, easy_glue):
    output, *_ = finished
    other = plans(tiny_model, easy_glue, *QUICK[1:], "epochs=7", seeds=(9,), weights=("random",))
    with pytest.raises(ValueError, match="epochs: 6, now 7"):
        launch.prepare(output, other)
    assert not (output / "CoLA-random-seed9").exists()


def test_a_plan_that_was_never_done_may_change(tmp_path, tiny_model, easy_glue):
    for epochs in (6, 7):
        new = plans(tiny_model, easy_glue, f"epochs={epochs}")
        (name,) = launch.prepare(tmp_path, new)
        assert read_plan(tmp_path / name) == new[0]


def test_a_run_that_fails_is_named_with_its_log_and_keeps_no_other_from_its_end(
    tiny_model, easy_glue, tmp_path, in_root
):
    wanted = plans(tiny_model, easy_glue, *QUICK[1:], "epochs=1", seeds=(1, 2))
    names = launch.prepare(tmp_path, wanted)
    broken = tmp_path / names[0] / "run.json"
    broken.write_text(broken.read_text().replace(str(easy_glue), str(tmp_path / "nowhere")))
    said = []
    assert launch.run_all(tmp_path, names, 1, said.append) == [names[0]]
    assert f"{names[0]}: failed with exit code 2" in said[0]
    assert "nowhere/CoLA/train.tsv: no such file" in said[0]
    assert (tmp_path / names[1] / "result.json").is_file()


def test_pretrained_and_random_weights_differ_in_the_encoder_alone(tiny_model, easy_glue, in_root):
    from finetune import train
    from pretrain import model_folder
    from pretrain.model.config import ClassificationConfig

    loaded, head = model_folder.load(tiny_model), ClassificationConfig(2)
    both = plans(tiny_model, easy_glue, weights=("pretrained", "random"))
    pretrained, random = (train.build(loaded, plan, head).state_dict() for plan in both)
    again = train.build(loaded, both[1], head).state_dict()
    for name, tensor in pretrained.items():
        if name.startswith("encoder."):
            assert tensor.equal(loaded.model.state_dict()[name])
        else:
            assert tensor.equal(random[name])
        assert random[name].equal(again[name])
    name = "encoder.embeddings.tokens.weight"
    assert not pretrained[name].equal(random[name])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["epocs=3"], 2, "did you mean 'epochs'"),
        (["--tasks", "COLA"], 2, "task 'COLA'; accepted: CoLA"),
        (["--jobs", "-1"], 2, "--jobs -1: accepted"),
        (["--data", "nowhere"], 2, "nowhere/CoLA/train.tsv: no such file"),
    ],
)
def test_bad_requests_are_refused_before_anything_starts(
    tiny_model, easy_glue, tmp_path, capsys, words, code, said
):
    output = tmp_path / "runs"
    base = ["glue", str(tiny_model), "--data", str(easy_glue), "--tasks", "CoLA"]
    assert main([*base, "--output", str(output), *words]) == code
    error = capsys.readouterr().err
    assert error.startswith("finetune glue: error: ")
    assert error.count("\n") == 1
    assert said in error
    assert not output.exists()


@pytest.mark.parametrize("seeds", ["1,1", "a", "", "-1"])
def test_seeds_are_different_whole_numbers(seeds, capsys):
    with pytest.raises(SystemExit):
        main(["glue", "m", "--data", "d", "--tasks", "CoLA", "--output", "o", f"--seeds={seeds}"])
    assert "different whole numbers" in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_refused(tmp_path, easy_glue):
    with pytest.raises(ValueError, match=r"is no model folder, it has no model\.json"):
        plans(tmp_path, easy_glue)


def test_two_processes_do_not_work_on_one_run(tmp_path, tiny_model, easy_glue, capsys):
    import fcntl

    from finetune import train

    (name,) = launch.prepare(tmp_path, plans(tiny_model, easy_glue))
    with (tmp_path / name / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert train.main([str(tmp_path / name)]) == 2
    assert "another process is at work" in capsys.readouterr().err


def test_help_needs_nothing_heavy():
    code = (
        "import sys\n"
        "from finetune.__main__ import main\n"
        "try: main(['glue', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'deepspeed'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("present", "allowed", "expected"),
    [(0, None, []), (2, None, ["0", "1"]), (2, "1", ["1"]), (2, "", []), (0, "0", [])],
)
def test_visible_gpus(monkeypatch, present, allowed, expected):
    devices = [Path(f"/dev/nvidia{n}") for n in range(present)]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(devices))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert launch.visible_gpus() == expected

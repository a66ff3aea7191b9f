"""Pretraining through the supervisor, and its folders."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.__main__ import main
from finetune.birthplaces import corpus, demo
from finetune.birthplaces.models import Choice
from finetune.birthplaces.pretraining import run_folder
from pretrain.config.load import dump
from pretrain.models import model_folder


def folder_of(choice, output="a/p.params", seed=1, **rates):
    architecture = choice.config().architecture(256)
    return run_folder("pretrain", "run", architecture, Path(output), seed, **rates)


def test_the_folder_of_a_run_names_what_is_trained():
    rates = {"pretrain_rate": 6e-3, "finetune_rate": 6e-4}
    folder = folder_of(Choice("perceiver", 64), seed=2, **rates)
    assert folder.parent.name == "run_perceiver_64_pt_lr_0.006000_ft_lr_0.000600_seed_2"
    assert folder.parent.parent == Path("expt/pretrain")
    assert folder.name.startswith("p.params-")
    assert folder_of(Choice("vanilla")).parent.name == "run_vanilla_seed_1"
    assert folder_of(Choice("vanilla", None, "rotary")).parent.name == "run_vanilla_rotary_seed_1"


def test_outputs_of_the_same_name_in_different_folders_have_different_runs(tmp_path):
    first = folder_of(Choice("vanilla"), "a/p.params")
    assert first != folder_of(Choice("vanilla"), "b/p.params")
    assert first == folder_of(Choice("vanilla"), Path("a/p.params").resolve())


def test_an_earlier_run_with_other_settings_is_named_with_what_differs(
    task, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    architecture = Choice("vanilla").config().architecture(256)
    folder = run_folder("pretrain", "run", architecture, Path("model"), 1, pretrain_rate=6e-3)
    earlier = ["training.steps=30", "optimizer.learning_rate=6e-3", "batch.global_batch_size=32"]
    texts = corpus.documents(task.text)
    read = corpus.folder_of(task.text.stem, texts, Path("expt/corpora")) / "corpus"
    earlier += ["batch.micro_batch_size=32", f"data.corpus={read}"]
    dump(Choice("vanilla").config(earlier), folder / "run.yaml")
    words = f"pretrain vanilla {task.text} --writing_params_path model --epochs 64"
    more = "batch.global_batch_size=64 batch.micro_batch_size=32"
    assert main(["birthplaces", *shlex.split(f"{words} {more}")]) == 2
    error = capsys.readouterr().err
    assert f"{folder}: an earlier run for the same output had other settings:" in error
    for change in ("batch.global_batch_size: 32, now 64", "--epochs training.steps: 30, now 60"):
        assert change in error
    assert "give the earlier ones, another --tb_expt_name, or delete that folder" in error
    other = tmp_path / task.text.name
    other.write_text(task.text.read_text() + "One more line.\n")
    words = words.replace(str(task.text), str(other))
    assert main(["birthplaces", *shlex.split(f"{words} {more}")]) == 2
    assert f"{folder}: an earlier run for the same output read {read.parent}; {other} is" in (
        capsys.readouterr().err
    )
    assert [path.name for path in Path("expt").iterdir()] == ["pretrain"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{text} --epochs 0", "--epochs 0: accepted: 1 or more"),
        ("{text} --pretrain_lr 0", "--pretrain_lr 0.0: accepted: above 0 and below 1"),
        (f"{{text}} --seed {2**63}", f"--seed {2**63}: accepted: from 0 to below 2^63"),
        ("{text} --writing_params_path empty.txt/a", "empty.txt is not a folder"),
        ("{text} --tb_expt_name a/b", "--tb_expt_name 'a/b': must be a name"),
        ("{text} data.packing=complete", "--epochs would not be how often every line"),
        ("{text} phases=[1]", "'phases=[1]': cannot be changed"),
        ("{text} --writing_params_path {folder}", "exists; choose a new name"),
        ("/nowhere.txt", "/nowhere.txt: no such file"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_made(
    task, tmp_path, capsys, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    words = words.format(text=task.text, folder=task.folder)
    if "--writing" not in words:
        words += " --writing_params_path model"
    assert main(shlex.split(f"birthplaces pretrain vanilla {words}")) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"empty.txt"}


@pytest.mark.slow
def test_a_supervised_run_becomes_a_model_folder(task, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(
        f"birthplaces pretrain perceiver {task.text} --bottleneck_dim 16 --epochs 8 "
        "--tb_expt_name 'try #2: a' --position rotary --writing_params_path model model.size=tiny "
        "batch.global_batch_size=16 batch.micro_batch_size=8"
    )
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "documents: 60, epochs: 8, steps: 30" in shown
    folder = "try #2: a_perceiver_16_rotary_pt_lr_0.006000_seed_1"
    assert f"model: the model of expt/pretrain/{folder}" in shown
    loaded = model_folder.load_model(tmp_path / "model")
    assert loaded.model.config.latents == 16
    assert loaded.objective.name == "span-corruption"
    for line in (
        f"finetune perceiver {task.text} --reading_params_path model --epochs 2 "
        f"--writing_params_path answers --finetune_corpus_path {task.train}",
        f"evaluate perceiver {task.text} --reading_params_path answers "
        f"--eval_corpus_path {task.dev} --outputs_path predictions",
    ):
        command = [sys.executable, "-m", "finetune", "birthplaces", *shlex.split(line)]
        environment = {**os.environ, "PYTHONPATH": str(Path(demo.__file__).parents[2])}
        subprocess.run(command, check=True, env=environment)
    (folder,) = Path("expt/finetune").iterdir()
    rates = "pt_lr_0.006000_ft_lr_0.000600"
    assert folder.name == f"run_perceiver_16_rotary_{rates}_seed_1"
    assert model_folder.load_model(Path("answers")).provenance["pretrained"]["step"] == 30
    predictions = Path("predictions").read_text().splitlines()
    assert len(predictions) == len(task.dev.read_text().splitlines())
    # The run is finished: the same command only makes its model folder again.
    (tmp_path / "model").rename(tmp_path / "before")
    assert main(words) == 0
    for file in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "model" / file).read_bytes() == (tmp_path / "before" / file).read_bytes()

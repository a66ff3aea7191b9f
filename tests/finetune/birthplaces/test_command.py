"""The command lines of the assignment, of the documents and of the demo."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.common.arguments import parse_arguments
from finetune.__main__ import _parser, main
from finetune.birthplaces import demo
from finetune.birthplaces.models import Choice
from finetune.birthplaces.pretraining import EXPERIMENTS

ROOT = Path(demo.__file__).parents[2]
RESULTS = (ROOT / "pretrain/notes/measurements.md").read_text().replace("\\\n", "")
MEASURED = re.findall(r"^    zeroclap birthplaces (.*)$", RESULTS, re.MULTILINE)

TRAIN = "--finetune_corpus_path birth_places_train.tsv"
DEV, TEST = "--eval_corpus_path birth_dev.tsv", "--eval_corpus_path birth_test_inputs.tsv"
WIDE = "perceiver wiki.txt --bottleneck_dim 64"
ASSIGNMENT = [
    f"finetune vanilla wiki.txt --writing_params_path vanilla.model.params {TRAIN}",
    f"evaluate vanilla wiki.txt --reading_params_path vanilla.model.params {DEV} "
    "--outputs_path vanilla.nopretrain.dev.predictions",
    f"evaluate vanilla wiki.txt --reading_params_path vanilla.model.params {TEST} "
    "--outputs_path vanilla.nopretrain.test.predictions",
    "pretrain vanilla wiki.txt --writing_params_path vanilla.pretrain.params",
    "finetune vanilla wiki.txt --reading_params_path vanilla.pretrain.params "
    f"--writing_params_path vanilla.finetune.params {TRAIN}",
    f"evaluate vanilla wiki.txt --reading_params_path vanilla.finetune.params {DEV} "
    "--outputs_path vanilla.pretrain.dev.predictions",
    f"evaluate vanilla wiki.txt --reading_params_path vanilla.finetune.params {TEST} "
    "--outputs_path vanilla.pretrain.test.predictions",
    f"pretrain {WIDE} --pretrain_lr 6e-3 --writing_params_path perceiver.pretrain.params",
    f"finetune {WIDE} --reading_params_path perceiver.pretrain.params "
    f"--writing_params_path perceiver.finetune.params {TRAIN}",
    f"evaluate {WIDE} --reading_params_path perceiver.finetune.params {DEV} "
    "--outputs_path perceiver.pretrain.dev.predictions",
    f"evaluate {WIDE} --reading_params_path perceiver.finetune.params {TEST} "
    "--outputs_path perceiver.pretrain.test.predictions",
]
"""In its order: without pretraining, the ordinary transformer, the Perceiver."""


@pytest.mark.parametrize("words", [*ASSIGNMENT, *MEASURED, *demo.commands()])
def test_a_command_line_is_accepted(words):
    options = parse_arguments(_parser(), ["birthplaces", *shlex.split(words)])
    assert options.function == words.split()[0]
    if words in ASSIGNMENT[7:]:
        assert (options.variant, options.bottleneck_dim) == ("perceiver", 64)


@pytest.mark.parametrize("words", [line for line in MEASURED if line.startswith("pretrain ")])
def test_a_pretraining_that_was_measured_can_be_divided_among_the_processes_of_a_cpu(words):
    options = parse_arguments(_parser(), ["birthplaces", *shlex.split(words)])
    choice = Choice(options.variant, options.bottleneck_dim, options.position)
    config = choice.config(["supervision.processes_per_node=2", *options.overrides])
    assert config.batch.accumulation_steps(config.supervision.processes_per_node) >= 1


@pytest.mark.slow
def test_the_assignments_commands_run_in_their_order(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, path in (
        ("wiki.txt", task.text),
        ("birth_places_train.tsv", task.train),
        ("birth_dev.tsv", task.dev),
    ):
        Path(name).write_text(path.read_text())
    questions = [line.split("\t")[0] for line in task.dev.read_text().splitlines()]
    Path("birth_test_inputs.tsv").write_text("".join(f"{each}\n" for each in questions))
    size = "model.size=tiny model.overrides.max_positions=128"
    small = {"pretrain": f"--epochs 8 {size} batch.global_batch_size=16 batch.micro_batch_size=8"}
    for line in ASSIGNMENT:
        words = f"{line} --epochs 2" if line.startswith("finetune") else line
        words += f" {size}" if line == ASSIGNMENT[0] else ""
        words = shlex.split(f"{words} {small.get(words.split()[0], '')}")
        if words[0] == "finetune":  # an engine of its own
            command = [sys.executable, "-m", "finetune", "birthplaces", *words]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        else:
            assert main(["birthplaces", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("correct: ") == shown.count("no accuracy: the file has no answers") == 3
    for path in Path().glob("*.predictions"):
        assert len(path.read_text().splitlines()) == len(questions)
    assert len(list(Path().glob("*.predictions"))) == 6
    runs = [path.name.removesuffix("_seed_1") for path in EXPERIMENTS.glob("*tune/*")]
    runs += [path.name.removesuffix("_seed_1") for path in EXPERIMENTS.glob("pretrain/*")]
    assert set(runs) == {
        "run_vanilla_ft_lr_0.000600",
        "run_vanilla_pt_lr_0.006000",
        "run_vanilla_pt_lr_0.006000_ft_lr_0.000600",
        "run_perceiver_64_pt_lr_0.006000",
        "run_perceiver_64_pt_lr_0.006000_ft_lr_0.000600",
    }

"""The command lines of the assignment and of the demo."""

import shlex

import pytest

from data_prep.arguments import parse_arguments
from finetune.__main__ import _parser
from finetune.birthplaces import demo

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


@pytest.mark.parametrize("words", [*ASSIGNMENT, *demo.commands()])
def test_a_command_line_is_accepted(words):
    options = parse_arguments(_parser(), ["birthplaces", *shlex.split(words)])
    assert options.function == words.split()[0]
    if words in ASSIGNMENT[7:]:
        assert (options.variant, options.bottleneck_dim) == ("perceiver", 64)

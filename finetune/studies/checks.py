"""What of a study is refused before its first run: every arm, its evaluation and fine-tuning."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.files import named_errors
from data_prep.common.records import check_value
from data_prep.corpus import Corpus
from finetune import runs, tasks
from finetune.studies.study import (
    Arm,
    Checked,
    Study,
    finetuning_arms,
    lengths_of,
    pretraining_arms,
    resolved,
)
from pretrain.checks.recipe import USUAL_VOCABULARY, check, check_device, check_settings
from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.config.settings import apply_override, flatten
from pretrain.data.sources import SOURCES
from pretrain.inference.evaluate import check_blocks, check_lengths
from pretrain.model.config import ModelConfig
from pretrain.objectives.base import Vocabulary
from pretrain.supervision.launch import world_size

_OF_RUNS = {"training.seed": "its `seeds`, or --seeds", "folder": "one in --output each"}
"""What neither levels nor settings of all arms may set, as it is each run's own."""


def check_arms(
    study: Study, changes: Sequence[str], device: str = "", begins: bool = True
) -> dict[Arm, Checked]:
    """Read and check the recipe of every arm, with its corpora, and every way of fine-tuning.

    Args:
        study: the study.
        changes: `key=value` settings of the command line, which hold for all arms.
        device: which the runs use, "cpu" or "cuda"; empty: any.
        begins: whether runs begin, which need their corpora; a forecast does not.

    Raises:
        ValueError: what the first arm with an error has; or two arms are the same.
    """
    found = dict[Arm, Checked]()
    for arm in pretraining_arms(study):
        with named_errors(arm.name):
            words, given = [*arm.words, *changes], dict[str, Any]()
            config = recipes.load(arm.recipe, words)
            for word in words:
                apply_override(given, word)
            for key in flatten(given).keys() & _OF_RUNS:
                raise ValueError(f"{key}: a study's runs have {_OF_RUNS[key]}; leave it out")
            ranks = world_size(config.supervision, 1)
            corpora = [Path(source.path) for source in config.segments.sources]
            if begins or (corpora and all(map(Path.exists, corpora))):
                model = check(config, ranks)
                _check_evaluation(study, config, model)
            else:
                check_settings(config, ranks)
                model = config.architecture(USUAL_VOCABULARY)
            check_device(config, ranks, device)
        found[arm] = Checked(config, model, ranks)
    groups = study.finetune.groups if study.finetune else []
    ways = {
        way: [
            runs.check_settings(tasks.find(names), [*way.words, *own], device=device)
            for names, _, own in groups
        ]
        for way in finetuning_arms(study)
    }
    for arm, each in found.items():
        for way in finetuning_arms(study, arm):
            for task, tuned in itertools.chain(*(group.items() for group in ways[way])):
                with named_errors(f"{arm.name}: {task}"):
                    accepted = "'', as a study keeps no fine-tuned models"
                    check_value("start_from", tuned.start_from, not tuned.start_from, accepted)
                    each.model.check_pooling(tuned.pooling)
    _check_distinct({arm: resolved(each) for arm, each in found.items()})
    _check_distinct(ways)
    return found


def _check_evaluation(study: Study, config: RunConfig, model: ModelConfig) -> None:
    """Refuse what `evaluate` could not measure of a model after its last phase."""
    last, lengths = config.segments.parts[-1].config, lengths_of(study, model)
    one_text = last.data.packing == "contiguous"
    for path in dict.fromkeys(Path(source.path) for source in config.segments.sources):
        corpus = Corpus(path, "valid")
        vocabulary = Vocabulary(corpus.manifest.vocab_size, model.vocab_size, path)
        objective = last.objective.for_validation().build(vocabulary)
        if lengths:
            check_lengths(objective, model, corpus, range(len(corpus)), lengths, one_text)
        else:
            source = SOURCES[last.data.packing](corpus, last.data.sequence_length)
            check_blocks(objective, source, last.training.evaluation_blocks)


def _check_distinct(settings: Mapping[Arm, object]) -> None:
    """Raise ValueError if two arms have the same settings or folder name."""
    for (one, ours), (other, theirs) in itertools.combinations(settings.items(), 2):
        if one.folder == other.folder or ours == theirs:
            raise ValueError(
                f"{one.name} = {other.name}: two arms have the same settings, or names without "
                "other letters and digits"
            )

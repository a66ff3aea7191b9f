"""What a command line of the task names: a recipe, a run's folder, a model to start from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.birthplaces import corpus

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.model.config import ModelConfig
    from pretrain.models.model_folder import LoadedModel, ModelContents

EXPERIMENTS = Path("expt")
"""Folder of runs and corpora, for `tensorboard --logdir expt`."""


def recipe(options: argparse.Namespace, *settings: str) -> RunConfig:
    """Load the recipe of the model, with settings and what the command line overrides."""
    from pretrain.config.load import load

    size = [f"model.overrides.latents={options.bottleneck_dim}"] * (options.variant == "perceiver")
    return load(f"birthplaces-{options.variant}", [*size, *settings, *options.overrides])


def run_folder(options: argparse.Namespace, rate: str) -> Path:
    """Return the folder of a run's metrics: what is trained, and below it the output's name.

    Args:
        options: of `pretrain` or `finetune`.
        rate: name and value of the learning rate, as the assignment writes them.
    """
    size = [str(options.bottleneck_dim)] * (options.variant == "perceiver")
    words = [options.tb_expt_name, options.variant, *size, rate, f"seed_{options.seed}"]
    output: Path = options.writing_params_path
    return EXPERIMENTS / str(options.function) / "_".join(words) / output.name


def refuse_existing(output: Path) -> None:
    """Refuse an output that would replace something, before the work for it begins."""
    if output.exists():
        raise ValueError(f"{output}: exists; choose a new name")


def fresh(options: argparse.Namespace, recipe: RunConfig) -> ModelContents:
    """Draw the weights of a fresh model from the recipe's seed.

    Raises:
        ValueError: the text or a setting is not accepted.
    """
    import torch

    from pretrain.config.load import public
    from pretrain.model.language_model import LanguageModel
    from pretrain.models.model_folder import ModelContents

    tokenizer = corpus.vocabulary(corpus.documents(options.corpus))
    architecture = recipe.architecture(tokenizer.vocab_size)
    _refuse_other(architecture, options, "the recipe")
    torch.manual_seed(recipe.training.seed)
    weights = LanguageModel(architecture).state_dict()
    return ModelContents(architecture, weights, tokenizer, {"recipe": public(recipe)})


def load(options: argparse.Namespace) -> LoadedModel:
    """Load the model folder that a command line names.

    Raises:
        ValueError: it is not a model folder, or it has another model or another vocabulary than
            the command line names.
    """
    from pretrain.models import model_folder

    folder: Path = options.reading_params_path
    loaded = model_folder.load_model(folder)
    _refuse_other(loaded.model.config, options, f"the model in {folder}")
    ours = corpus.vocabulary(corpus.documents(options.corpus))
    if ours.digest() != loaded.tokenizer.digest():
        raise ValueError(
            f"{options.corpus}: its characters, {ours.vocab_size} ids, are not the vocabulary of "
            f"{folder}, {loaded.tokenizer.vocab_size} ids; give the text of the pretraining"
        )
    return loaded


def _refuse_other(model: ModelConfig, options: argparse.Namespace, name: str) -> None:
    """Refuse a model of another size than the options say, and one that would see the answers."""
    latents = options.bottleneck_dim if options.variant == "perceiver" else 0
    if not model.causal or model.latents != latents:
        raise ValueError(
            f"{name} has causal {model.causal} and {model.latents} latents; accepted with "
            f"{options.variant}: causal True and {latents} latents (--bottleneck_dim)"
        )

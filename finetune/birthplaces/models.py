"""The models of the task: recipes, settings, fresh weights, and checks of model folders."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.birthplaces import corpus

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.model.config import ModelConfig
    from pretrain.models.model_folder import LoadedModel, ModelContents

VARIANTS = ("vanilla", "perceiver")
BOTTLENECK = 32
"""Default number of latents of the Perceiver."""
MOST_LATENTS = 127
"""The block less one: a last latent would answer no question."""
POSITIONS = ("learned", "rotary", "alibi")
OPTIONS: Mapping[str, str] = {
    "folder": "--tb_expt_name",
    "data.corpus": "the argument corpus",
    "model.variant": "the argument variant",
    "model.overrides.latents": "--bottleneck_dim",
    "model.overrides.position": "--position",
    "training.steps": "--epochs",
    "training.seed": "--seed",
    "optimizer.learning_rate": "--pretrain_lr or --finetune_lr",
    "schedule.minimum_learning_rate": "--pretrain_lr",
}
"""What sets a setting of the recipe in these commands."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The model that a command line names; None: as the recipe or the model folder says."""

    variant: str
    bottleneck_dim: int | None = None
    position: str | None = None

    def __post_init__(self) -> None:
        """Refuse a bottleneck without latents, or of too many."""
        size = self.bottleneck_dim
        if size is not None and self.variant == "vanilla":
            raise ValueError(f"--bottleneck_dim {size}: has a meaning for perceiver only")
        if size is not None and not 1 <= size <= MOST_LATENTS:
            raise ValueError(f"--bottleneck_dim {size}: accepted: 1 to {MOST_LATENTS}")

    @property
    def recipe(self) -> str:
        """Name of the recipe in pretrain/recipes."""
        return f"birthplaces-{self.variant}"

    @property
    def overrides(self) -> list[str]:
        """What differs from the recipe."""
        result = list[str]()
        if self.variant != "vanilla":
            result.append(f"model.overrides.latents={self.bottleneck_dim or BOTTLENECK}")
        if self.position is not None:
            result.append(f"model.overrides.position={self.position}")
        return result

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Load the recipe of the model with further overrides."""
        from pretrain.config.load import load

        return load(self.recipe, [*self.overrides, *overrides])


def refuse_overrides(
    overrides: Sequence[str],
    accepted: Sequence[str] | None = None,
    *,
    refused: Sequence[str] = (),
) -> None:
    """Refuse overrides that contradict an option, or that the command does not use.

    Args:
        overrides: `section.key=value` each.
        accepted: sections and keys that the command uses; None: all.
        refused: sections and keys that would change what `--epochs` counts.

    Raises:
        ValueError: names the override, and what to write.
    """
    from pretrain.config.settings import apply_override, is_within

    for override in overrides:
        values: dict[str, object] = {}
        apply_override(values, override)
        key, _, text = override.partition("=")
        if key in OPTIONS:
            raise ValueError(f"{override!r}: use {OPTIONS[key]}, which sets {key}")
        if accepted is not None and not any(is_within(key, each) for each in accepted):
            keys = ", ".join(accepted)
            raise ValueError(f"{override!r}: has no effect here; only settings of {keys} have")
        if any(is_within(key, each) for each in refused):
            raise ValueError(
                f"{override!r}: cannot be changed: --epochs would not be how often every line is "
                "read"
            )
        if any(is_within(option, key) for option in OPTIONS) or text.lstrip().startswith("{"):
            raise ValueError(f"{override!r}: is a whole section; write {key}.NAME=value")


def refuse_numbers(rate_option: str, rate: float, epochs: int, seed: int) -> None:
    """Refuse a learning rate, a number of epochs or a seed that nothing can be trained with.

    Raises:
        ValueError: names the option, and what is accepted.
    """
    if not 0 < rate < 1:
        raise ValueError(f"{rate_option} {rate}: accepted: above 0 and below 1")
    if epochs < 1:
        raise ValueError(f"--epochs {epochs}: accepted: 1 or more")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: accepted: from 0 to below 2^63")


def variant_of(architecture: ModelConfig) -> str:
    """Return the name in VARIANTS of an architecture."""
    return "perceiver" if architecture.latents else "vanilla"


def fresh(text: Path, recipe: RunConfig) -> ModelContents:
    """Draw the weights of a fresh model from the recipe's seed.

    Raises:
        ValueError: the model could not learn the task: it is not causal, or has no vector for
            `<mask>`.
    """
    import torch

    from pretrain.config.load import public
    from pretrain.config.settings import check
    from pretrain.model.language_model import LanguageModel
    from pretrain.models.model_folder import ModelContents

    tokenizer = corpus.vocabulary(corpus.documents(text))
    architecture = recipe.architecture(tokenizer.vocab_size)
    check(architecture.causal, "model.overrides.causal", False, "true: answers must not be seen")
    fits = architecture.mask_embedding == "row"
    check(fits, "model.overrides.mask_embedding", "zero", "'row', because <mask> is predicted")
    torch.manual_seed(recipe.training.seed)
    weights = LanguageModel(architecture).state_dict()
    return ModelContents(architecture, weights, tokenizer, {"recipe": public(recipe)})


def load(folder: Path, choice: Choice, text: Path) -> LoadedModel:
    """Load a model folder, and check that it holds what the command line names.

    Args:
        folder: written by `pretrain` or `finetune`.
        choice: of the command line.
        text: the corpus, whose characters are the vocabulary.

    Raises:
        ValueError: not a model folder, or one of a model that is not causal, of another variant,
            bottleneck, position method or vocabulary.
    """
    from pretrain.models import model_folder

    loaded = model_folder.load_model(folder)
    architecture = loaded.model.config
    if not architecture.causal:
        raise ValueError(f"{folder}: its model is not causal; choose one that `pretrain` made")
    found = {
        "variant": (choice.variant, variant_of(architecture)),
        "--bottleneck_dim": (choice.bottleneck_dim, architecture.latents),
        "--position": (choice.position, architecture.position),
    }
    for name, (wanted, actual) in found.items():
        if wanted not in (None, actual):
            raise ValueError(f"{name} {wanted}: the model in {folder} has {actual}")
    corpus.refuse_other_vocabulary(folder, loaded.tokenizer, text)
    return loaded


def refuse_existing(output: Path, *, is_file: bool = False) -> None:
    """Refuse an output that would replace something, or that could not be written.

    Args:
        output: the path to be written.
        is_file: a file will be written; otherwise a folder, which may be there if it is empty.

    Raises:
        ValueError: the output exists, or is not below a folder that may be written to.
    """
    if output.exists() and (is_file or not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output}: exists; choose a new name")
    parent = next(path for path in output.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problem = "may not be written to" if parent.is_dir() else "is not a folder"
        raise ValueError(f"{output}: {parent} {problem}")

"""The model that a run continues from (`model.init_from`): checked, fitted and copied.

Order: `recipe_of` (where the recipe names no architecture), `check_initial_model` (before a
launch), `copy_initial_model` (before the first attempt). The last two end in `read_initial_model`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from data_prep.common.arguments import typed
from data_prep.common.files import sha256_of
from data_prep.manifest import CorpusManifest
from pretrain.config.load import public
from pretrain.config.run import RunConfig
from pretrain.config.sections import ModelRecipe
from pretrain.convert import conversion
from pretrain.convert.huggingface_files import weight_files
from pretrain.convert.huggingface_layout import POSITIONS
from pretrain.model.config import ModelConfig
from pretrain.model.presets import SIZES, VARIANTS, build
from pretrain.models import model_folder
from pretrain.models.model_folder import HEADS, ModelContents
from pretrain.records import folder, ledger

_FREE = ("dropout", "attention_dropout", "initial_weights", "initial_beta")
"""Fields that may differ: they change nothing that trained weights compute."""
_OF_OTHERS = ("vocab_size", "pair_head")
"""Fields that other sections of a recipe decide than `model`."""


def recipe_of(config: RunConfig) -> ModelRecipe:
    """Return the settings that describe the model that a run starts from, with its dropout.

    Raises:
        ValueError: there is no model.
    """
    return _nearest(_contents(config).config, _OF_OTHERS)


def check_initial_model(
    config: RunConfig, architecture: ModelConfig, manifest: CorpusManifest
) -> str:
    """Check the model that a run starts from, and say in a sentence what is taken from it.

    A run that has begun has its own copy: then the model is not looked at.

    Raises:
        ValueError: as `read_initial_model`.
    """
    if found := ledger.origin(ledger.read_ledger(Path(config.folder) / ledger.FILE_NAME)):
        return f"initial weights: {ledger.describe_origin(found)}"
    theirs, contents = read_initial_model(config, architecture, manifest)
    text = f"initial weights: those of {config.model.init_from}"
    if _repeats_positions(theirs, architecture):
        text += (
            f", whose {theirs.max_positions} learned positions are repeated up to "
            f"{architecture.max_positions}"
        )
    return "; ".join([text, *contents.provenance.get("notes", [])])


def copy_initial_model(
    config: RunConfig, architecture: ModelConfig, manifest: CorpusManifest
) -> dict[str, object]:
    """Copy the model that a run starts from into the run's folder.

    Returns:
        What the ledger records of it (`ledger.origin`).

    Raises:
        ValueError: as `read_initial_model`.
    """
    _, contents = read_initial_model(config, architecture, manifest)
    path = Path(config.model.init_from).resolve()
    files = {file.name: sha256_of(file) for file in weight_files(path)}
    copy = Path(config.folder) / folder.INITIAL
    shutil.rmtree(copy, ignore_errors=True)  # of an attempt that ended before it was recorded
    provenance = {
        "run": Path(config.folder).name,
        "step": 0,
        "recipe": public(config),
        "init_from": {"path": path.name, "files": files, "provenance": contents.provenance},
    }
    model_folder.save_model(copy, dataclasses.replace(contents, provenance=provenance))
    copied = sha256_of(Path(config.folder) / folder.INITIAL_WEIGHTS)
    return {"path": str(path), "files": files, "sha256": copied}


def read_initial_model(
    config: RunConfig, architecture: ModelConfig, manifest: CorpusManifest
) -> tuple[ModelConfig, ModelContents]:
    """Read the model that a run starts from, and fit it to the run.

    Learned positions beyond the model's repeat them: position p gets the vector of position p
    modulo their number (Beltagy et al. 2020, section 5). Classification heads are left out.

    Args:
        config: the recipe.
        architecture: the run's.
        manifest: of the run's corpus, or of one of several, which have the same vocabulary.

    Returns:
        The architecture of the model as it is, and its contents with that of the run.

    Raises:
        ValueError: there is no model; its vocabulary is not the corpus's; its architecture is not
            the recipe's; or it has no head over the vocabulary. Both sides are named.
    """
    name = f"model.init_from {config.model.init_from}"
    contents = _contents(config)
    _refuse_other_vocabulary(name, contents, config.streams[0].path, manifest)
    theirs = contents.config
    if found := list(_differences(theirs, architecture)):
        listed = ", ".join(
            f"{field} {getattr(theirs, field)!r}, here {getattr(architecture, field)!r}"
            for field in found
        )
        raise ValueError(
            f"{name}: is not the model that the recipe describes: {listed}; set "
            f"{_settings(theirs, config.model.overrides)}"
        )
    weights = {key: w for key, w in contents.weights.items() if not key.startswith(HEADS)}
    dense = weights.get("head.dense.weight")
    if dense is not None and not dense.any():
        raise ValueError(
            f"{name}: has no head over the vocabulary; use a language model, such as "
            "RobertaForMaskedLM"
        )
    if _repeats_positions(theirs, architecture):
        weights[POSITIONS] = _repeated(weights[POSITIONS], theirs, architecture.max_positions)
    fitted = dataclasses.replace(
        contents, config=architecture, weights=weights, classification_heads={}
    )
    return theirs, fitted


def _contents(config: RunConfig) -> ModelContents:
    try:
        return conversion.read_model(Path(config.model.init_from))
    except ValueError as error:
        raise ValueError(f"model.init_from: {error}") from None


def _repeats_positions(theirs: ModelConfig, ours: ModelConfig) -> bool:
    return bool(theirs.longest_input) and ours.max_positions > theirs.max_positions


def _repeated(table: Tensor, config: ModelConfig, positions: int) -> Tensor:
    """Extend a table of learned positions, whose first rows belong to no position."""
    first = config.position_offset
    rows = first + torch.arange(positions) % config.max_positions
    return torch.cat([table[:first], table[rows]])


def _refuse_other_vocabulary(
    name: str, contents: ModelContents, corpus: str, manifest: CorpusManifest
) -> None:
    vocabulary = contents.vocabulary
    if vocabulary is None:
        notes = "; ".join(contents.provenance.get("notes", []))
        raise ValueError(
            f"{name}: has no vocabulary to compare with that of the corpus "
            f"{corpus}{notes and f' ({notes})'}; add one with `{typed('pretrain convert')} ... "
            "--tokenizer ...`"
        )
    if (digest := vocabulary.digest()) != manifest.tokenizer_digest:
        raise ValueError(
            f"{name}: has a vocabulary of {vocabulary.vocab_size} ids ({digest[:12]}), but the "
            f"corpus {corpus} was made with one of {manifest.vocab_size} ids "
            f"({manifest.tokenizer_digest[:12]}); give the model's vocabulary to "
            f"`{typed('data_prep prepare')} --tokenizer`"
        )
    needed = vocabulary.vocab_size - (contents.config.mask_embedding == "zero")
    if contents.config.vocab_size != needed:
        raise ValueError(
            f"{name}: has {contents.config.vocab_size} rows of tokens, but its vocabulary needs "
            f"{needed}"
        )


def _differences(theirs: ModelConfig, ours: ModelConfig) -> Iterator[str]:
    """Yield the fields by which a model is not the one that a run trains."""
    for field in dataclasses.fields(ModelConfig):
        name = field.name
        if name in (*_FREE, "vocab_size") or getattr(theirs, name) == getattr(ours, name):
            continue
        # It limits nothing where positions are computed.
        if name != "max_positions" or (
            theirs.longest_input and not _repeats_positions(theirs, ours)
        ):
            yield name


def _settings(theirs: ModelConfig, overrides: Collection[str]) -> str:
    """Return the settings that describe a model for a recipe whose overrides would remain."""
    model = _nearest(theirs, (*_OF_OTHERS, *_FREE), overrides)
    words = [f"model.size={model.size}", f"model.variant={model.variant}"]
    words += [f"model.overrides.{name}={value}" for name, value in model.overrides.items()]
    if theirs.pair_head:
        words.append("objective.name=sentence-pairs")
    return " ".join(words)


def _nearest(
    theirs: ModelConfig, left_out: Collection[str], stated: Collection[str] = ()
) -> ModelRecipe:
    """Return the named model nearest to a model, and as overrides what differs or is `stated`."""

    def described(config: ModelConfig) -> dict[str, object]:
        return {name: v for name, v in sorted(config.to_dict().items()) if name not in left_out}

    candidates = []
    for size, variant in itertools.product(SIZES, VARIANTS):
        with contextlib.suppress(ValueError):  # some sizes do not go with some variants
            named = described(build(size, variant, theirs.vocab_size, {}))
            overrides = {
                name: value
                for name, value in described(theirs).items()
                if named[name] != value or name in stated
            }
            candidates.append(ModelRecipe(size, variant, overrides))
    return min(candidates, key=lambda model: len(model.overrides))

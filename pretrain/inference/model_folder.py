"""Model folders: weights, architecture and vocabulary of a model.

model.safetensors   fp32 weights: the language model's by their names, and those of classification
                    heads as `classification_heads.NAME.`
model.json          the fields of `Description`
tokenizer.json      the vocabulary, where one is known
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import tokenizer as tokenizers
from data_prep.common.arguments import as_invoked
from data_prep.common.files import check_format, new_folder, write_json
from data_prep.common.records import decode
from pretrain.model.classification import ClassificationConfig
from pretrain.model.config import ModelConfig
from pretrain.objectives.base import ObjectiveSettings
from pretrain.objectives.registry import SETTINGS_BY_NAME

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.model.heads import ClassificationHead
    from pretrain.model.language_model import LanguageModel

FORMAT_VERSION = 1
HEADS = "classification_heads."
_MOST_LAYERS = 10_000
"""Limit for any model: the size of a file does not limit layers that share their weights."""


@dataclasses.dataclass(frozen=True)
class Description:
    """The content of model.json."""

    format_version: int
    architecture: dict[str, Any]
    """Fields of ModelConfig."""
    classification_heads: dict[str, Any]
    """Fields of ClassificationConfig, by the head's name."""
    tokenizer: str | None
    """Digest of the vocabulary; None where none is known."""
    provenance: dict[str, Any]
    """Where the model comes from."""


@dataclasses.dataclass(frozen=True)
class ModelContents:
    """The content of a model folder as plain values, for converters."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    """Of the language model, and `classification_heads.NAME.` of each head; fp32 on the CPU."""
    vocabulary: tokenizers.Tokenizer | None
    """None where the model was converted from a checkpoint without one."""
    provenance: Mapping[str, Any]
    """Where the model comes from."""
    classification_heads: Mapping[str, ClassificationConfig] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """The modules of a model folder, in evaluation mode."""

    folder: Path
    model: LanguageModel
    classification_heads: dict[str, ClassificationHead]
    vocabulary: tokenizers.Tokenizer | None
    provenance: dict[str, Any]

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The vocabulary.

        Raises:
            ValueError: the folder has none.
        """
        if self.vocabulary is None:
            raise ValueError(
                f"{self.folder}: has no vocabulary, so the model takes ids but no text (convert "
                "the checkpoint again with --tokenizer)"
            )
        return self.vocabulary

    @property
    def packing(self) -> str:
        """Packing of its training; as in fairseq where it is not known."""
        default = "sentence-pairs" if self.objective.pairs else "complete"
        return str(self.recipe_section("data").get("packing", default))

    @property
    def sequence_length(self) -> int:
        """Tokens of the blocks of its training; its positions where that is not known."""
        return int(
            self.recipe_section("data").get("sequence_length", self.model.config.max_positions)
        )

    def recipe_section(self, name: str) -> dict[str, Any]:
        """Return a section of the recipe of its training; empty where it is not known."""
        recipe = self.recorded("recipe")
        section = recipe.get(name) if isinstance(recipe, dict) else None
        return section if isinstance(section, dict) else {}

    def recorded(self, name: str) -> Any:  # noqa: ANN401 - any JSON value
        """Return a record of the model, or of the model that it was made from; None if absent.

        A converted model keeps the record of the model that was converted, a fine-tuned one that of
        the pretrained model.
        """
        record: Any = self.provenance
        while isinstance(record, dict):
            if (value := record.get(name)) is not None:
                return value
            record = record.get("provenance") or record.get("pretrained")
        return None

    @property
    def objective(self) -> ObjectiveSettings:
        """Settings of the objective it was trained with.

        If it is not recorded: causal LM for a causal model, else masked LM, with sentence order if
        the model has a pair head.

        Raises:
            ValueError: this version does not know the objective, or one of its settings.
        """
        default = "causal-lm" if self.model.config.causal else "masked-lm"
        default = "sentence-pairs" if self.model.config.pair_head else default
        section = {"name": default, **self.recipe_section("objective")}
        name = section["name"]
        if name not in SETTINGS_BY_NAME:
            known = ", ".join(SETTINGS_BY_NAME)
            raise ValueError(f"{self.folder}: its objective {name!r} is not one of {known}")
        try:
            return decode(SETTINGS_BY_NAME[name], section, "objective.")
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from None

    def contents(self) -> ModelContents:
        """Return the content as plain values."""
        weights = dict(self.model.state_dict())
        for name, head in self.classification_heads.items():
            weights |= {f"{HEADS}{name}.{key}": value for key, value in head.state_dict().items()}
        return ModelContents(
            self.model.config,
            weights,
            self.vocabulary,
            self.provenance,
            {name: head.config for name, head in self.classification_heads.items()},
        )


def save_model(folder: Path, contents: ModelContents) -> None:
    """Write a model folder, complete or not at all.

    Raises:
        ValueError: the folder is not empty.
    """
    from safetensors import torch as safetensors

    vocabulary = contents.vocabulary
    weights = {name: tensor.contiguous() for name, tensor in contents.weights.items()}
    description = Description(
        FORMAT_VERSION,
        architecture=contents.config.to_dict(),
        classification_heads={
            name: head.to_dict() for name, head in contents.classification_heads.items()
        },
        tokenizer=vocabulary.digest() if vocabulary else None,
        provenance=dict(contents.provenance),
    )
    with new_folder(folder) as partial:
        # Not save_file, whose files only the owner can read.
        (partial / "model.safetensors").write_bytes(safetensors.save(weights))
        if vocabulary:
            vocabulary.save(partial / "tokenizer.json")
        write_json(partial / "model.json", dataclasses.asdict(description))


def check_declared_size(
    config: ModelConfig, heads: Mapping[str, ClassificationConfig], size: int
) -> None:
    """Raise ValueError if a description has more weights than its file, before making any.

    Only matrices are counted, at one byte per weight.

    Args:
        config: of the language model.
        heads: its classification heads.
        size: bytes of the weights.

    Raises:
        ValueError: names both numbers; or there are more than 10,000 layers.
    """
    least, layers = config.least_weights + config.token_size * config.segments, config.num_layers
    least += config.hidden_size * (config.latents + sum(head.classes for head in heads.values()))
    if least > size:
        raise ValueError(f"describes {least:,} weights or more, its file has {size:,} bytes")
    if layers > _MOST_LAYERS:
        raise ValueError(f"num_layers: {layers:,}; accepted: at most {_MOST_LAYERS:,}")


def load_model(folder: Path) -> LoadedModel:
    """Load the model of a folder, in evaluation mode, on the CPU.

    Raises:
        ValueError: not a model folder, or its parts do not fit together; the part is named.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from pretrain.model.heads import ClassificationHead
    from pretrain.model.language_model import LanguageModel

    description = folder / "model.json"
    if not description.is_file():
        raise ValueError(
            f"{folder}: is not a model folder, it has no model.json "
            f"(`{as_invoked('pretrain export')} RUN --output FOLDER` makes one)"
        )
    content = read_json(description)
    check_format(content.get("format_version"), FORMAT_VERSION, description)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a model folder has one")
    try:
        values = decode(Description, content)
        config = ModelConfig.from_dict(values.architecture)
        described = {
            name: ClassificationConfig.from_dict(head)
            for name, head in values.classification_heads.items()
        }
        check_declared_size(config, described, path.stat().st_size)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{description}: {error}") from error
    heads = {name: ClassificationHead(config.hidden_size, one) for name, one in described.items()}
    tokenizer = None
    if values.tokenizer is not None:
        tokenizer = tokenizers.load(folder)
        if tokenizer.digest() != values.tokenizer:
            raise ValueError(f"{folder}: tokenizer.json is not the vocabulary of the model")
    model = LanguageModel(config)
    try:
        weights = load_file(str(path))
        for name, head in heads.items():
            mine = [key for key in weights if key.startswith(f"{HEADS}{name}.")]
            head.load_state_dict(
                {key.removeprefix(f"{HEADS}{name}."): weights.pop(key) for key in mine}
            )
        model.load_state_dict(weights)
    except (RuntimeError, SafetensorError, OSError) as error:
        raise ValueError(f"{path}: does not fit model.json: {error}") from error
    heads = {name: head.eval() for name, head in heads.items()}
    return LoadedModel(folder, model.eval(), heads, tokenizer, values.provenance)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: the file is damaged, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: is not a JSON object but {type(values).__name__}")
    return values

"""Model folders: weights, every architectural choice and the vocabulary, together.

model.safetensors   fp32 weights: the language model's by its own names, and those of
                    classification heads as `classification_heads.NAME.`
model.json          {"format", "architecture", "classification_heads", "tokenizer", "provenance"};
                    the tokenizer's digest, or null where none is known
tokenizer.json      the vocabulary, where one is known
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import tokenizer as tokenizers
from data_prep.files import new_folder
from pretrain.model.config import ClassificationConfig, ModelConfig
from pretrain.objectives.base import ObjectiveSettings
from pretrain.objectives.registry import SETTINGS_BY_NAME
from pretrain.run.checkpoints import write_json

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.model.heads import ClassificationHead
    from pretrain.model.language_model import LanguageModel

FORMAT = 2
HEADS = "classification_heads."


@dataclasses.dataclass(frozen=True)
class ModelContents:
    """All that a model folder holds, as plain values: what converters read and write."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    """The language model's, and `classification_heads.NAME.` of each head; fp32 on the CPU."""
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
                f"{self.folder}: has no vocabulary, so it takes ids but no text (convert the "
                "checkpoint again with --tokenizer)"
            )
        return self.vocabulary

    @property
    def packing(self) -> str:
        """How documents filled the blocks it was trained on; fairseq's way where nothing says."""
        recipe = self.provenance.get("recipe")
        data = recipe.get("data") if isinstance(recipe, dict) else None
        return str(data.get("packing", "complete")) if isinstance(data, dict) else "complete"

    @property
    def objective(self) -> ObjectiveSettings:
        """Default settings of the objective it was trained with; masked LM where nothing says.

        Raises:
            ValueError: this version does not know the objective.
        """
        recipe = self.provenance.get("recipe")
        section = recipe.get("objective", {}) if isinstance(recipe, dict) else {}
        name = section.get("name", "masked-lm")
        if name not in SETTINGS_BY_NAME:
            known = ", ".join(SETTINGS_BY_NAME)
            raise ValueError(f"{self.folder}: its objective {name!r} is not one of {known}")
        return SETTINGS_BY_NAME[name]()

    def contents(self) -> ModelContents:
        """The same as plain values."""
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


def save(folder: Path, contents: ModelContents) -> None:
    """Write a model folder, whole or not at all.

    Raises:
        ValueError: the folder holds something already.
    """
    from safetensors.torch import save_file

    vocabulary = contents.vocabulary
    weights = {name: tensor.contiguous() for name, tensor in contents.weights.items()}
    description = {
        "format": FORMAT,
        "architecture": contents.config.to_dict(),
        "classification_heads": {
            name: head.to_dict() for name, head in contents.classification_heads.items()
        },
        "tokenizer": vocabulary.digest() if vocabulary else None,
        "provenance": dict(contents.provenance),
    }
    with new_folder(folder) as partial:
        save_file(weights, str(partial / "model.safetensors"))
        if vocabulary:
            vocabulary.save(partial / "tokenizer.json")
        write_json(partial / "model.json", description)


def load(folder: Path) -> LoadedModel:
    """The model of a folder, in evaluation mode, on the CPU.

    Raises:
        ValueError: no model folder, or its parts do not fit together; the part is named.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from pretrain.model.heads import ClassificationHead
    from pretrain.model.language_model import LanguageModel

    description = folder / "model.json"
    if not description.is_file():
        raise ValueError(
            f"{folder}: is no model folder, it has no model.json "
            "(`python -m pretrain export RUN --output FOLDER` makes one)"
        )
    values = _read_description(description)
    try:
        config = ModelConfig.from_dict(values["architecture"])
        heads = {
            name: ClassificationHead(config.hidden_size, ClassificationConfig.from_dict(head))
            for name, head in values["classification_heads"].items()
        }
    except (ValueError, TypeError) as error:
        raise ValueError(f"{description}: {error}") from error
    tokenizer = None
    if values["tokenizer"] is not None:
        tokenizer = tokenizers.load(folder)
        if tokenizer.digest() != values["tokenizer"]:
            raise ValueError(f"{folder}: tokenizer.json is not the vocabulary that the model has")
    model = LanguageModel(config)
    path = folder / "model.safetensors"
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
    return LoadedModel(folder, model.eval(), heads, tokenizer, values["provenance"])


def _read_description(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: {values!r} is no description of a model")
    if values.get("format") != FORMAT:
        raise ValueError(f"{path}: format {values.get('format')!r}, known is {FORMAT}")
    kinds = {
        "architecture": dict,
        "classification_heads": dict,
        "tokenizer": str | None,
        "provenance": dict,
    }
    if unknown := sorted(values.keys() - {"format", *kinds}):
        raise ValueError(f"{path}: unknown {unknown}; known are format, {', '.join(kinds)}")
    for name, kind in kinds.items():
        if name not in values or not isinstance(values[name], kind):
            raise ValueError(f"{path}: {name} is {values.get(name)!r}")
    return values


def export(run: Path, output: Path, step: int | None = None) -> int:
    """Make a model folder of a run's checkpoint.

    Args:
        run: the run's folder.
        output: the new model folder.
        step: of the checkpoint; None: the newest that is not under suspicion.

    Returns:
        The step exported.

    Raises:
        ValueError: no run, no such checkpoint, or a damaged one.
    """
    from pretrain.config import load as recipes
    from pretrain.engine.engine import consolidated_weights
    from pretrain.run import checkpoints, ledger

    if not (run / "run.yaml").is_file():
        raise ValueError(f"{run}: is no run folder, it has no run.yaml")
    config = recipes.load(str(run / "run.yaml"))
    state = ledger.fold(ledger.read(run / ledger.FILE_NAME), config.training.seed)
    sound = [step for step in state.checkpoints if step not in state.tainted]
    if step is None and sound:
        step = sound[-1]
    if step is None or step not in state.checkpoints:
        have = ", ".join(map(str, state.checkpoints)) or "none"
        raise ValueError(f"{run}: has no checkpoint of step {step}; it has {have}")
    folder = checkpoints.folder_of(run, step)
    try:
        manifest = checkpoints.read_manifest(folder)
    except ValueError as error:
        if not state.done or step != state.checkpoints[-1]:
            raise
        raise ValueError(
            f"{error}; `python -m pretrain supervise` with the same recipe trains the last steps "
            "again"
        ) from None
    source = f"{folder / checkpoints.MANIFEST}: architecture"
    architecture = ModelConfig.from_dict(manifest["architecture"], source)
    save(
        output,
        ModelContents(
            architecture,
            _without_padding(consolidated_weights(folder), architecture),
            tokenizers.load(run),
            {"run": run.name, "step": step, "recipe": manifest["recipe"]},
        ),
    )
    return step


def _without_padding(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights without the rows of no token that the token table has while it is trained."""
    table = "encoder.embeddings.tokens.weight"
    return {**weights, table: weights[table][: config.vocab_size].clone()}

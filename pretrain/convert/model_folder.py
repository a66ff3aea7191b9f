"""Model folders, which are those of transformers, and the modules of one.

config.json                    the architecture, and where the model comes from (`provenance`)
model.safetensors              fp32 weights
tokenizer.json                 the vocabulary, where one is known, with tokenizer_config.json
README.md                      the model card
generation_config.json         the ids that a causal language model does not generate
modeling_zeroclap.py           the code of architectures that transformers does not have

`reading` reads such folders, ours or anybody's, and `writing` writes them. Neither needs
transformers.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from data_prep import tokenizer as tokenizers
from data_prep.common.files import named_errors
from data_prep.common.records import decode
from pretrain.config.run import RunConfig
from pretrain.config.sections import DataConfig
from pretrain.convert.contents import CLASSIFIER, ModelContents
from pretrain.convert.reading import read_folder
from pretrain.model.classification import ClassificationHead
from pretrain.model.heads import build_head
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.base import ObjectiveSettings


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """The modules of a model folder, in evaluation mode."""

    folder: Path
    contents: ModelContents
    model: LanguageModel
    """Its head over the vocabulary is untrained where the folder has none."""
    classifier: ClassificationHead | None

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The vocabulary.

        Raises:
            ValueError: the folder has none.
        """
        if self.contents.vocabulary is None:
            reason = "; ".join(["put its tokenizer.json into the folder", *self.contents.notes])
            raise ValueError(
                f"{self.folder}: has no vocabulary, so the model takes ids but no text ({reason})"
            )
        return self.contents.vocabulary

    @property
    def language_model(self) -> LanguageModel:
        """The model with its head over the vocabulary.

        Raises:
            ValueError: the folder has no such head.
        """
        if not self.contents.has_head:
            raise ValueError(
                f"{self.folder}: has no head over the vocabulary, so it predicts no tokens; choose "
                "a language model, such as RobertaForMaskedLM"
            )
        return self.model

    @property
    def data(self) -> DataConfig:
        """Packing and length of the blocks of its training.

        Where they are not known: as in fairseq, and the model's positions.

        Raises:
            ValueError: the recipe has a packing or a length that is not accepted.
        """
        packing = "sentence-pairs" if self.objective.pairs else "complete"
        usual = {"packing": packing, "sequence_length": self.model.config.max_positions}
        section = self.recipe_section("data")
        used = {name: section.get(name, default) for name, default in usual.items()}
        with named_errors(self.folder):
            return decode(RunConfig, {"data": used}).data

    def recipe_section(self, name: str) -> dict[str, Any]:
        """Return a section of the recipe of its last step in training; empty if it is not known.

        Raises:
            ValueError: the recipe has phases, and this version does not know one of its settings.
        """
        recipe = self.recorded("recipe")
        if isinstance(recipe, dict) and recipe.get("phases"):
            values = {name: value for name, value in recipe.items() if name != "format_version"}
            with named_errors(self.folder):
                segments = decode(RunConfig, values).segments
            recipe = dataclasses.asdict(segments.at((self.recorded("step") or 1) - 1).config)
        section = recipe.get(name) if isinstance(recipe, dict) else None
        return section if isinstance(section, dict) else {}

    def recorded(self, name: str) -> Any:  # noqa: ANN401 - any JSON value
        """Return a record of the model, or of the one that it was made from; None if absent."""
        record: Any = self.contents.provenance
        while isinstance(record, dict):
            if (value := record.get(name)) is not None:
                return value
            record = record.get("pretrained")
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
        with named_errors(self.folder):
            return decode(RunConfig, {"objective": section}).objective


def load_model(folder: Path) -> LoadedModel:
    """Load the model of a folder, in evaluation mode, on the CPU.

    Raises:
        ValueError: not a model folder, its parts do not fit together, or it has a setting that our
            model does not have; the file and the setting are named.
    """
    return build(folder, read_folder(folder))


def build(folder: Path, contents: ModelContents) -> LoadedModel:
    """Make modules of a folder's contents, whose weights they share, in evaluation mode."""
    config, classifier = contents.config, None
    weights = {**build_head(config).state_dict(prefix="head."), **contents.weights}
    names = [name for name in weights if name.startswith(CLASSIFIER)]
    of_head = {name.removeprefix(CLASSIFIER): weights.pop(name) for name in names}
    with torch.device("meta"):  # draws nothing
        model = LanguageModel(config).eval()
        if contents.classifier:
            classifier = ClassificationHead(config.hidden_size, contents.classifier).eval()
    model.load_state_dict(weights, assign=True)
    if classifier:
        classifier.load_state_dict(of_head, assign=True)
    return LoadedModel(folder, contents, model, classifier)

"""zeroclap's models for transformers: an export carries this file and the model's own files.

transformers copies this file and those that it imports into one folder, so the export makes the
imports of `pretrain.model` relative, and changes nothing else. The weights have the same names as
in a model folder; those of a classification head begin with `classifier.`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils.generic import ModelOutput

# The unused imports are for transformers 4, which copies only the files that this file imports
# itself.
from pretrain.model.attention import SelfAttention  # noqa: F401
from pretrain.model.config import ClassificationConfig, ModelConfig
from pretrain.model.embeddings import Embeddings  # noqa: F401
from pretrain.model.flex import FlexBias  # noqa: F401
from pretrain.model.heads import ClapHead, ClassificationHead, RobertaHead, build_head
from pretrain.model.init import STANDARD_DEVIATION
from pretrain.model.layers import EncoderLayer
from pretrain.model.masks import same_document  # noqa: F401
from pretrain.model.positions import LearnedPositions  # noqa: F401
from pretrain.model.stacks import Encoder
from pretrain.model.tiled_attention import tiled_attention  # noqa: F401

Answer = ModelOutput | tuple[Any, ...]


class ZeroclapConfig(PretrainedConfig):
    """Every field of `ModelConfig` under its own name, and transformers' own fields."""

    model_type = "zeroclap"
    attribute_map = {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "max_positions",
    }

    def __init__(
        self,
        vocab_size: int = 50265,
        classifier_pooling: str = "first",
        classifier_dropout: float = 0.0,
        **values: Any,  # noqa: ANN401 - whatever a config.json holds
    ) -> None:
        """Take the architecture from `values`; missing fields have the defaults of ModelConfig.

        Raises:
            ValueError: a field has a value that is not accepted.
        """
        given = {self.attribute_map.get(name, name): value for name, value in values.items()}
        names = {field.name for field in dataclasses.fields(ModelConfig)}
        fields = {name: given.pop(name) for name in names & given.keys()}
        architecture = ModelConfig(**{**fields, "vocab_size": vocab_size})
        for name, value in architecture.to_dict().items():
            setattr(self, name, value)
        self.classifier_pooling = classifier_pooling
        self.classifier_dropout = classifier_dropout
        self.initializer_range = given.pop("initializer_range", STANDARD_DEVIATION)
        super().__init__(**given)

    def architecture(self) -> ModelConfig:
        """Return the fields that decide what the model computes."""
        return ModelConfig.from_dict(
            {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelConfig)}
        )


class ZeroclapPreTrainedModel(PreTrainedModel):
    """An encoder, with what transformers asks of a model."""

    config_class = ZeroclapConfig
    base_model_prefix = "zeroclap"
    _no_split_modules = [EncoderLayer.__name__]
    _supports_sdpa = True

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make an encoder; `post_init` of a subclass draws the weights, after making the heads."""
        super().__init__(config)
        self.encoder = Encoder(config.architecture())

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding; the head over the vocabulary reads the same weight."""
        return self.encoder.embeddings.tokens

    def _init_weights(self, module: nn.Module) -> None:
        # Only through torch.nn.init, which transformers guards so that loaded weights stay.
        super()._init_weights(module)
        if isinstance(module, RobertaHead):
            nn.init.zeros_(module.bias)
        elif isinstance(module, ClapHead):
            nn.init.constant_(module.beta, self.config.initial_beta)

    def _encode(
        self, input_ids: Tensor, attention_mask: Tensor | None, output_hidden_states: bool | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return features [B, T, D], and all N + 1 hidden states if they are requested."""
        mask = None if attention_mask is None else attention_mask.bool()
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if not output_hidden_states:
            return self.encoder(input_ids, mask), None
        states = self.encoder.hidden_states(input_ids, mask)
        return states[-1], tuple(states)

    def _answer(self, output: ModelOutput, return_dict: bool | None) -> Answer:
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()


class ZeroclapModel(ZeroclapPreTrainedModel):
    """Token ids to features."""

    _keys_to_ignore_on_load_unexpected = [r"^head\.", r"^classifier\."]

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make the encoder."""
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Answer:
        """[B, T] ids and a [B, T] mask (nonzero for real tokens; None: all) to [B, T, D]."""
        features, states = self._encode(input_ids, attention_mask, output_hidden_states)
        output = BaseModelOutput(last_hidden_state=features, hidden_states=states)
        return self._answer(output, return_dict)


class ZeroclapForMaskedLM(ZeroclapPreTrainedModel):
    """Token ids to logits over the vocabulary.

    Where the mask is the zero vector, its id has neither a row nor a logit.
    """

    _keys_to_ignore_on_load_unexpected = [r"^classifier\."]

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make the encoder and the head that `config` names."""
        super().__init__(config)
        self.head = build_head(config.architecture())
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Answer:
        """Compute the logits of every token, and their loss.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], nonzero for real tokens; None where all are.
            labels: [B, T] ids to predict, -100 where there is none; the loss is the mean.
            output_hidden_states: whether to return the hidden states of all layers.
            return_dict: False for a plain tuple.

        Returns:
            Logits [B, T, V].
        """
        features, states = self._encode(input_ids, attention_mask, output_hidden_states)
        logits = self.head(features, self.encoder.embeddings.tokens.weight)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size)
        output = MaskedLMOutput(loss=loss, logits=logits, hidden_states=states)
        return self._answer(output, return_dict)


class ZeroclapForSequenceClassification(ZeroclapPreTrainedModel):
    """Token ids to the logits of classes."""

    _keys_to_ignore_on_load_unexpected = [r"^head\."]

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make the encoder and a head of `config.num_labels` classes."""
        super().__init__(config)
        self.num_labels = config.num_labels
        head = ClassificationConfig(
            config.num_labels or 0,  # 0 is refused
            pooling=config.classifier_pooling,
            dropout=config.classifier_dropout,
        )
        self.classifier = ClassificationHead(config.hidden_size, head)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Answer:
        """Compute the logits of every row, and their loss.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], nonzero for real tokens; None where all are.
            labels: [B] classes, or numbers for a regression; `config.problem_type` says which
                loss.
            output_hidden_states: whether to return the hidden states of all layers.
            return_dict: False for a plain tuple.

        Returns:
            Logits [B, C].
        """
        features, states = self._encode(input_ids, attention_mask, output_hidden_states)
        mask = None if attention_mask is None else attention_mask.bool()
        logits = self.classifier(features, mask)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config)
        output = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=states)
        return self._answer(output, return_dict)

"""zeroclap's models for transformers.

An export carries one file: the model's own sources, as they are imported here, and this one. The
weights have the same names as in a model folder; those of a classification head begin with
`classifier.`. Where the mask is the zero vector, the table has a row of zeros for it, so that every
id of the tokenizer has a row.

Order: the config, what all models share, the encoder, then one class for each task.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from pretrain.model.checks import check_value
from pretrain.model.classification import ClassificationConfig, ClassificationHead
from pretrain.model.config import ModelConfig
from pretrain.model.embeddings import TokenEmbedding
from pretrain.model.encoder import Stack
from pretrain.model.heads import ClapHead, RobertaHead, build_head
from pretrain.model.init import STANDARD_DEVIATION
from pretrain.model.layers import EncoderLayer


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
        mask_token_ids: Sequence[int] = (),
        classifier_pooling: str = "first",
        classifier_dropout: float = 0.0,
        **values: Any,  # noqa: ANN401 - whatever a config.json holds
    ) -> None:
        """Take the architecture from `values`; missing fields have the defaults of ModelConfig.

        Args:
            vocab_size: rows of the token table, those of `mask_token_ids` included.
            mask_token_ids: with `mask_embedding` "zero", the ids that mean the mask. Their rows are
                zero and get no gradient, and their logits are the lowest number.
            classifier_pooling: what a sequence classifier reads, one of POOLINGS.
            classifier_dropout: of all classifiers.
            **values: fields of ModelConfig and of PretrainedConfig.

        Raises:
            ValueError: a field has a value that is not accepted.
        """
        given = {self.attribute_map.get(name, name): value for name, value in values.items()}
        self.vocab_size = vocab_size
        for field in dataclasses.fields(ModelConfig)[1:]:
            setattr(self, field.name, given.pop(field.name, field.default))
        self.mask_token_ids = list(mask_token_ids)
        self.classifier_pooling = classifier_pooling
        self.classifier_dropout = classifier_dropout
        self.initializer_range = given.pop("initializer_range", STANDARD_DEVIATION)
        super().__init__(**given)
        self.architecture()

    def architecture(self) -> ModelConfig:
        """Return the fields that decide what the model computes.

        Raises:
            ValueError: a field has a value that is not accepted.
        """
        ids, rows = self.mask_token_ids, self.vocab_size
        is_zero = self.mask_embedding == "zero"
        fits = is_zero == bool(ids) and all(id < rows for id in ids)
        accepted = f"the ids of the mask, below {rows}," if is_zero else "empty"
        accepted += f" with mask_embedding {self.mask_embedding!r}"
        check_value("mask_token_ids", ids, fits, accepted)
        fields = dataclasses.fields(ModelConfig)
        config = ModelConfig(**{field.name: getattr(self, field.name) for field in fields})
        check_value("latents", config.latents, not config.latents, "0")
        check_value("head", config.head, config.head != "untied", ("roberta", "clap", "tied"))
        return config


class ZeroclapLayer(GradientCheckpointingLayer, EncoderLayer):
    """A layer that transformers can tell to recompute its activations."""


class ZeroclapPreTrainedModel(PreTrainedModel):
    """What transformers asks of every model."""

    config_class = ZeroclapConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _no_split_modules = [ZeroclapLayer.__name__]
    _supports_sdpa = True
    _keys_to_ignore_on_load_unexpected = [r"^(pair_)?head\.", r"^classifier\.", r"^qa_outputs\."]
    # Of the encoder's `embeddings`; the head over the vocabulary reads the same weight.
    _input_embed_layer = "tokens"
    # Otherwise Trainer takes `**options` for a sign that `num_items_in_batch` is wanted.
    accepts_loss_kwargs = False

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Add or remove rows at the end of the token table; a new logit has the bias 0.

        The arguments are those of transformers.

        Raises:
            ValueError: a row of the mask would be removed.
        """
        last_mask = max(self.config.mask_token_ids, default=-1)
        if new_num_tokens is not None and new_num_tokens <= last_mask:
            raise ValueError(
                f"{new_num_tokens} rows: accepted: more than {last_mask}, the id of the mask"
            )
        tokens = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        head = getattr(self, "head", None)
        if isinstance(head, RobertaHead):
            grown = nn.functional.pad(head.bias.data, (0, self.config.vocab_size - len(head.bias)))
            head.bias = nn.Parameter(grown, requires_grad=head.bias.requires_grad)
        return tokens

    def _init_weights(self, module: nn.Module) -> None:
        # Only through torch.nn.init, which transformers guards so that loaded weights stay.
        super()._init_weights(module)
        if isinstance(module, RobertaHead):
            nn.init.zeros_(module.bias)
        elif isinstance(module, ClapHead):
            nn.init.constant_(module.beta, self.config.initial_beta)
        elif isinstance(module, TokenEmbedding):
            for id in self.config.mask_token_ids:
                nn.init.zeros_(module.weight[id])


class ZeroclapModel(ZeroclapPreTrainedModel, Stack):
    """Token ids to features. Its parts are those of `Encoder`, under the same names."""

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make the encoder."""
        super().__init__(config)
        self.assemble(config.architecture(), layer_type=ZeroclapLayer)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutput:
        """Compute the features of every token. The other classes take the same arguments.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], nonzero for real tokens; None where all are.
            token_type_ids: [B, T], the segment of each token, from 0; None where all are 0. A model
                without segments accepts zeros alone.
            output_attentions: whether to return the attention weights, N x [B, H, T, T].
            output_hidden_states: whether to return the N + 1 hidden states, [B, T, D].

        Returns:
            Features [B, T, D]; with `return_dict=False`, here and in the other classes, a tuple.

        Raises:
            ValueError: the mask has another shape than the ids, or token types are given to a model
                without segments.
        """
        segment_ids = _segment_ids(token_type_ids, self.config.segments)
        mask, positions = _checked_mask(attention_mask, input_ids), None
        if mask is not None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            positions = (places - _first(mask)).clamp(min=0)
            if self.config.causal:
                mask = mask.int()  # bool ids are for padding on the right only
        is_mask = None
        if self.config.mask_token_ids:
            ids = torch.tensor(self.config.mask_token_ids, device=input_ids.device)
            is_mask = (input_ids[..., None] == ids).any(-1)
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        eager = output_attentions or self.config._attn_implementation == "eager"
        weights: list[Tensor] | None = [] if eager else None
        x, context = self.embed(input_ids, mask, segment_ids, positions, is_mask, weights)
        states: list[Tensor] = []
        for state in self.states(x, context):
            states = [*states, state] if output_hidden_states else [state]
        return BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(weights or ()) if output_attentions else None,
        )


def _segment_ids(token_type_ids: Tensor | None, segments: int) -> Tensor | None:
    """Return the ids; None for a model without segments, which accepts zeros alone."""
    if segments or token_type_ids is None:
        return token_type_ids
    if not torch.compiler.is_compiling() and token_type_ids.any():
        raise ValueError("token_type_ids: the model has one type of token, so all have to be 0")
    return None


def _checked_mask(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor | None:
    """Return the mask as bool [B, T]; None where all tokens are real."""
    if attention_mask is None:
        return None
    fits, accepted = attention_mask.shape == input_ids.shape, list(input_ids.shape)
    expected = f"{accepted}, nonzero for real tokens"
    check_value("attention_mask", list(attention_mask.shape), fits, expected)
    return attention_mask.bool()


def _first(mask: Tensor) -> Tensor:
    """Return the place of the first real token of each row, [B, 1]: padding may be on the left."""
    return mask.int().argmax(dim=1, keepdim=True)


def _first_features(features: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the features of each row's first real token, [B, 1, D]."""
    if attention_mask is None:
        return features[:, :1]
    return features.take_along_dim(_first(attention_mask.bool())[..., None], dim=1)


@dataclasses.dataclass
class ZeroclapMaskedLMOutput(MaskedLMOutput):
    """Adds what the pair head says."""

    pair_logits: Tensor | None = None
    """[B, 2]: the second segment follows the first, or it does not; None without a pair head."""


class ZeroclapWithHead(ZeroclapPreTrainedModel):
    """What the models of all tasks share: an encoder, and what `add_head` makes."""

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make the encoder and the head of the task.

        Raises:
            ValueError: a causal model classifies rows, and `config.classifier_pooling` is not
                "mean".
        """
        super().__init__(config)
        self.num_labels = config.num_labels
        self.encoder = ZeroclapModel(config)
        self.add_head(config)
        self.post_init()

    @abc.abstractmethod
    def add_head(self, config: ZeroclapConfig) -> None:
        """Make the modules that read the features."""

    def encoded(self, *inputs: Tensor | None, **options: Any) -> Any:  # noqa: ANN401
        """Return the outputs of the encoder, whatever `return_dict` the model was called with."""
        return self.encoder(*inputs, return_dict=True, **options)


class ZeroclapForMaskedLM(ZeroclapWithHead):
    """Token ids to logits over the vocabulary."""

    _keys_to_ignore_on_load_unexpected = [r"^classifier\.", r"^qa_outputs\."]
    # Trainer then passes the number of targets of all micro-batches of a step.
    accepts_loss_kwargs = True

    def add_head(self, config: ZeroclapConfig) -> None:
        """Make the head that `config` names, and that of pairs."""
        self.head = build_head(config.architecture())
        if config.pair_head:
            self.pair_head = ClassificationHead(config.hidden_size, ClassificationConfig(2))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,  # noqa: ANN401 - those of the encoder
    ) -> ZeroclapMaskedLMOutput:
        """Compute the logits of every token, [B, T, V], and their loss.

        `labels` are [B, T] ids to predict, -100 where there is none; in a causal model the logits
        at a place are compared with the label after it. The loss is the mean over them; with
        `num_items_in_batch`, their sum divided by this number. A model with a pair head also gives
        `pair_logits`, which the loss leaves out. `logits_to_keep` asks for the logits of so many
        last tokens, or of the places in a tensor.
        """
        outputs = self.encoded(input_ids, attention_mask, token_type_ids, **options)
        features, loss, pairs = outputs.last_hidden_state, None, None
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits: Tensor = self.head(features[:, kept], self.get_input_embeddings().weight)
        if ids := self.config.mask_token_ids:
            hidden = torch.tensor(ids, device=logits.device)
            logits = logits.index_fill(-1, hidden, torch.finfo(logits.dtype).min)
        if labels is not None:
            loss = self.loss_function(
                logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch
            )
        if self.config.pair_head:
            pairs = self.pair_head(_first_features(features, attention_mask), None)
        return ZeroclapMaskedLMOutput(
            loss, logits, outputs.hidden_states, outputs.attentions, pairs
        )


class ZeroclapForCausalLM(ZeroclapForMaskedLM, GenerationMixin):
    """Token ids to logits of the token after each; `generate` continues texts, without a cache."""

    def prepare_inputs_for_generation(  # transformers looks for this name
        self, input_ids: Tensor, **kwargs: object
    ) -> dict[str, Any]:
        """Return what `forward` reads for the next token: the whole text, whatever is cached.

        All else is left out, as each version of transformers keeps more beside it.
        """
        read = {"attention_mask", "token_type_ids", "logits_to_keep"}
        read |= {"output_attentions", "output_hidden_states"}
        return {"input_ids": input_ids, **{name: kwargs[name] for name in read & kwargs.keys()}}


class ZeroclapClassifier(ZeroclapWithHead):
    """What the two kinds of classifiers share."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,  # noqa: ANN401 - those of the encoder
    ) -> SequenceClassifierOutput:
        """Compute the logits of every row, [B, C], or of every token, [B, T, C], and their loss.

        `labels` are [B] classes, or numbers for a regression; `config.problem_type` says which
        loss. Of tokens they are [B, T] classes, -100 where there is none.
        """
        outputs = self.encoded(input_ids, attention_mask, token_type_ids, **options)
        logits, loss = self.logits(outputs.last_hidden_state, attention_mask), None
        if labels is not None:  # each task's loss has its own name for the logits
            loss = self.loss_function(
                logits=logits, pooled_logits=logits, labels=labels, config=self.config
            )
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)

    @abc.abstractmethod
    def logits(self, features: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the logits of the task from features [B, T, D]."""


class ZeroclapForSequenceClassification(ZeroclapClassifier):
    """Token ids to the logits of classes."""

    def add_head(self, config: ZeroclapConfig) -> None:
        """Make a head of `config.num_labels` classes."""
        config.architecture().check_pooling(config.classifier_pooling)
        head = ClassificationConfig(
            config.num_labels or 0,  # 0 is refused
            pooling=config.classifier_pooling,
            dropout=config.classifier_dropout,
        )
        self.classifier = ClassificationHead(config.hidden_size, head)

    def logits(self, features: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the logits of features [B, T, D]."""
        mask = None if attention_mask is None else attention_mask.bool()
        if self.config.classifier_pooling == "first":
            features = _first_features(features, mask)
        return self.classifier(features, mask)


class ZeroclapForTokenClassification(ZeroclapClassifier):
    """Token ids to the logits of classes of every token."""

    def add_head(self, config: ZeroclapConfig) -> None:
        """Make a projection to `config.num_labels` classes."""
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels or 0)

    def logits(self, features: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the logits of features [B, T, D]."""
        return self.classifier(self.dropout(features))


class ZeroclapForQuestionAnswering(ZeroclapWithHead):
    """Token ids to the logits of the first and the last token of an answer."""

    def add_head(self, config: ZeroclapConfig) -> None:
        """Make a projection to two numbers."""
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **options: Any,  # noqa: ANN401 - those of the encoder
    ) -> QuestionAnsweringModelOutput:
        """Compute two logits of every token, each [B, T], and their loss.

        `start_positions` and `end_positions`, [B] each, are the places of the first and the last
        token of the answer.
        """
        outputs = self.encoded(input_ids, attention_mask, token_type_ids, **options)
        start, end = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss, start, end, outputs.hidden_states, outputs.attentions
        )

"""zeroclap's models for transformers: an export carries this file and the model's own files.

transformers copies this file and those that it imports into one folder, so the export makes the
imports of `pretrain.model` relative, and changes nothing else. The weights have the same names as
in a model folder; those of a classification head begin with `classifier.`. Where the mask is the
zero vector, the table has a row of zeros for it, so that every id of the tokenizer has a row.

Order: the config, what all models share, the encoder, then one class for each task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

# The unused imports are for transformers 4, which copies only the files that this file imports
# itself.
from pretrain.model.alibi import Alibi  # noqa: F401
from pretrain.model.attention import AttentionBias, AttentionContext, dense_bias, uses_tiles
from pretrain.model.checks import check_value  # noqa: F401
from pretrain.model.classification import ClassificationConfig, check_pooling
from pretrain.model.config import ModelConfig
from pretrain.model.embeddings import Embeddings, TokenEmbedding, layer_norm
from pretrain.model.flex import FlexBias  # noqa: F401
from pretrain.model.heads import ClapHead, ClassificationHead, RobertaHead, TiedHead, build_head
from pretrain.model.init import STANDARD_DEVIATION
from pretrain.model.layers import EncoderLayer, build_layers
from pretrain.model.masks import same_document  # noqa: F401
from pretrain.model.positions import position_module, token_positions
from pretrain.model.scores import ScoreFunction  # noqa: F401
from pretrain.model.t5_bias import T5Bias  # noqa: F401
from pretrain.model.tiled_attention import tiled_attention  # noqa: F401


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
        names = {field.name for field in dataclasses.fields(ModelConfig)}
        fields = {name: given.pop(name) for name in names & given.keys()}
        for name, value in ModelConfig(**{**fields, "vocab_size": vocab_size}).to_dict().items():
            setattr(self, name, value)
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
        if is_zero != bool(ids) or any(id >= rows for id in ids):
            accepted = f"the ids of the mask, below {rows}" if is_zero else "empty"
            raise ValueError(
                f"mask_token_ids: {ids} is not accepted; with mask_embedding "
                f"{self.mask_embedding!r} it must be {accepted}"
            )
        config = ModelConfig.from_dict(
            {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelConfig)}
        )
        if config.latents or config.head == "untied":
            raise ValueError(
                f"latents: {config.latents}, head: {config.head!r}; accepted: 0, and roberta, clap "
                "or tied"
            )
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
    # Otherwise Trainer takes `**options` for a sign that `num_items_in_batch` is wanted.
    accepts_loss_kwargs = False

    def get_input_embeddings(self) -> nn.Module:
        """Return the token table; the head over the vocabulary reads the same weight."""
        return self._embeddings().tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token table."""
        self._embeddings().register_module("tokens", value)

    def _embeddings(self) -> Embeddings:
        embeddings = self.base_model.embeddings
        assert isinstance(embeddings, Embeddings)
        return embeddings

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
        head, rows = getattr(self, "head", None), self.config.vocab_size
        if isinstance(head, ClapHead | TiedHead):
            head.vocab_size = rows
        elif isinstance(head, RobertaHead):
            grown = nn.functional.pad(head.bias.data, (0, rows - len(head.bias)))
            head.bias = nn.Parameter(grown, requires_grad=head.bias.requires_grad)
        return tokens

    def _encoded(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, BaseModelOutput]:
        """Return the features, [B, T, D], and all that the encoder says."""
        outputs: BaseModelOutput = self.base_model(
            input_ids, attention_mask, token_type_ids, inputs_embeds, **options, return_dict=True
        )
        assert outputs.last_hidden_state is not None
        return outputs.last_hidden_state, outputs

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


class ZeroclapModel(ZeroclapPreTrainedModel):
    """Token ids to features. Its parts are those of `stacks.Encoder`, under the same names."""

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make the encoder."""
        super().__init__(config)
        ours = config.architecture()
        self.embeddings = Embeddings(ours)
        self.rotation = position_module(ours.method.rotation, ours)
        self.score_bias = position_module(ours.method.score_bias, ours)
        self.windows = ours.windows
        self.layers = nn.ModuleList(build_layers(ours, ZeroclapLayer))
        self.final_norm = layer_norm(ours) if ours.final_norm else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutput:
        """Compute the features of every token. The other classes take the same arguments.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], nonzero for real tokens; None where all are.
            token_type_ids: [B, T], the segment of each token, from 0; None where all are 0. A model
                without segments accepts zeros alone.
            inputs_embeds: [B, T, E] in place of `input_ids`, rows of the token table.
            output_attentions: whether to return the attention weights, N x [B, H, T, T].
            output_hidden_states: whether to return the N + 1 hidden states, [B, T, D].

        Returns:
            Features [B, T, D]; with `return_dict=False`, here and in the other classes, a tuple.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds` are given, the mask has
                another shape than the ids, or token types are given to a model without segments.
        """
        segment_ids = _segment_ids(token_type_ids, self.config.segments)
        vectors, is_mask = self._vectors(input_ids, inputs_embeds)
        mask = _checked_mask(attention_mask, vectors)
        positions = token_positions(mask, vectors)
        if mask is not None:
            positions = (positions - _first(mask)).clamp(min=0)
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        eager = output_attentions or self.config._attn_implementation == "eager"
        x = self.embeddings.from_vectors(vectors, is_mask, positions, mask, segment_ids)
        context = self._context(x, positions, mask, [] if eager else None)
        states = self._states(x, context, bool(output_hidden_states))
        return BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(context.weights or ()) if output_attentions else None,
        )

    def _states(self, x: Tensor, context: AttentionContext, all_of_them: bool) -> list[Tensor]:
        """Return the input of the first layer and the output of each, or the last output alone."""
        states = [x]
        for layer, of_layer in zip(self.layers, context.of_layers(self.windows), strict=True):
            x = layer(x, of_layer)
            states = [*states, x] if all_of_them else [x]
        if self.final_norm is not None:
            states[-1] = self.final_norm(states[-1])
        return states

    def _vectors(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return rows of the token table, [B, T, E], and which of them are the mask, [B, T]."""
        has_zero = bool(self.config.mask_token_ids)
        if input_ids is None and inputs_embeds is not None:
            return inputs_embeds, ~inputs_embeds.any(-1) if has_zero else None
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("give either input_ids or inputs_embeds")
        vectors = self.embeddings.tokens(input_ids)
        if not has_zero:
            return vectors, None
        ids = torch.tensor(self.config.mask_token_ids, device=input_ids.device)
        return vectors, (input_ids[..., None] == ids).any(-1)

    def _context(
        self, x: Tensor, positions: Tensor, mask: Tensor | None, weights: list[Tensor] | None
    ) -> AttentionContext:
        rotation = None
        if self.rotation is not None:
            rotation = self.rotation(positions)
        scores = None if self.score_bias is None else self.score_bias(x.device)
        dropout = self.config.attention_dropout if self.training else 0.0
        tiled = weights is None and uses_tiles(x, dropout)
        causal = self.config.causal
        if causal and mask is not None:
            mask = mask.int()  # bool ids are for padding on the right only
        biases: dict[int, AttentionBias] = {
            window: dense_bias(scores, mask, self.config.num_heads, x, tiled, causal, window)
            for window in {0, *self.windows}
        }
        local_bias = biases[max(biases)]
        return AttentionContext(biases[0], rotation, weights, local_bias=local_bias)


def _segment_ids(token_type_ids: Tensor | None, segments: int) -> Tensor | None:
    """Return the ids; None for a model without segments, which accepts zeros alone."""
    if segments or token_type_ids is None:
        return token_type_ids
    if not torch.compiler.is_compiling() and token_type_ids.any():
        raise ValueError("token_type_ids: the model has one type of token, so all have to be 0")
    return None


def _checked_mask(attention_mask: Tensor | None, vectors: Tensor) -> Tensor | None:
    """Return the mask as bool [B, T]; None where all tokens are real."""
    if attention_mask is None:
        return None
    if attention_mask.shape != vectors.shape[:2]:
        raise ValueError(
            f"attention_mask: {list(attention_mask.shape)} is not accepted; it must be "
            f"{list(vectors.shape[:2])}, nonzero for real tokens"
        )
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


class ZeroclapForMaskedLM(ZeroclapPreTrainedModel):
    """Token ids to logits over the vocabulary."""

    _keys_to_ignore_on_load_unexpected = [r"^classifier\.", r"^qa_outputs\."]
    # Trainer then passes the number of targets of all micro-batches of a step.
    accepts_loss_kwargs = True

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make the encoder and the head that `config` names."""
        super().__init__(config)
        self.encoder = ZeroclapModel(config)
        self.head = build_head(config.architecture())
        if config.pair_head:
            self.pair_head = ClassificationHead(config.hidden_size, ClassificationConfig(2))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,  # noqa: ANN401 - those of the encoder
    ) -> ZeroclapMaskedLMOutput:
        """Compute the logits of every token, [B, T, V], and their loss.

        `labels` are [B, T] ids to predict, -100 where there is none. The loss is the mean over
        them; with `num_items_in_batch`, their sum divided by this number. A model with a pair head
        also gives `pair_logits`, which the loss leaves out.
        """
        features, outputs = self._encoded(
            input_ids, attention_mask, token_type_ids, inputs_embeds, options
        )
        logits = self._logits(features)
        loss = self._loss(logits, labels, num_items_in_batch)
        pairs = None
        if self.config.pair_head:
            pairs = self.pair_head(_first_features(features, attention_mask), None)
        return ZeroclapMaskedLMOutput(
            loss, logits, outputs.hidden_states, outputs.attentions, pairs
        )

    def _logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features, self.get_input_embeddings().weight)
        if ids := self.config.mask_token_ids:
            hidden = torch.tensor(ids, device=logits.device)
            logits = logits.index_fill(-1, hidden, torch.finfo(logits.dtype).min)
        return logits

    def _loss(
        self, logits: Tensor, labels: Tensor | None, num_items_in_batch: Tensor | int | None
    ) -> Tensor | None:
        if labels is None:
            return None
        loss: Tensor = self.loss_function(
            logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch
        )
        return loss


class ZeroclapForCausalLM(ZeroclapForMaskedLM, GenerationMixin):
    """Token ids to logits of the token after each; `generate` continues texts, without a cache."""

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401 - transformers looks for this name
    ) -> Any:  # noqa: ANN401
        """Return what `forward` reads for the next token: the whole text, whatever is cached."""
        for name in ("next_sequence_length", "past_key_values", "use_cache"):
            kwargs.pop(name, None)
        return super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[misc]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,  # noqa: ANN401 - those of the encoder
    ) -> CausalLMOutput:
        """Compute the logits of every token, [B, T, V], or of the last `logits_to_keep`.

        A tensor names the places to keep.

        `labels` are [B, T], the ids themselves, -100 where they are not to be predicted; the logits
        at a place are compared with the label after it. The loss is as in the class above.
        """
        features, outputs = self._encoded(
            input_ids, attention_mask, token_type_ids, inputs_embeds, options
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self._logits(features[:, kept])
        loss = self._loss(logits, labels, num_items_in_batch)
        return CausalLMOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class ZeroclapForSequenceClassification(ZeroclapPreTrainedModel):
    """Token ids to the logits of classes."""

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make the encoder and a head of `config.num_labels` classes.

        Raises:
            ValueError: a causal model, of which `config.classifier_pooling` is not "mean".
        """
        super().__init__(config)
        check_pooling(config.architecture(), config.classifier_pooling)
        self.num_labels = config.num_labels
        self.encoder = ZeroclapModel(config)
        head = ClassificationConfig(
            config.num_labels or 0,  # 0 is refused
            pooling=config.classifier_pooling,
            dropout=config.classifier_dropout,
        )
        self.classifier = ClassificationHead(config.hidden_size, head)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,  # noqa: ANN401 - those of the encoder
    ) -> SequenceClassifierOutput:
        """Compute the logits of every row, [B, C], and their loss.

        `labels` are [B] classes, or numbers for a regression; `config.problem_type` says which
        loss.
        """
        features, outputs = self._encoded(
            input_ids, attention_mask, token_type_ids, inputs_embeds, options
        )
        mask = None if attention_mask is None else attention_mask.bool()
        if self.config.classifier_pooling == "first":
            features = _first_features(features, mask)
        logits = self.classifier(features, mask)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class ZeroclapForTokenClassification(ZeroclapPreTrainedModel):
    """Token ids to the logits of classes of every token."""

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make the encoder and a projection to `config.num_labels` classes."""
        super().__init__(config)
        self.num_labels = config.num_labels
        self.encoder = ZeroclapModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels or 0)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,  # noqa: ANN401 - those of the encoder
    ) -> TokenClassifierOutput:
        """Compute the logits of every token, [B, T, C], and their loss.

        `labels` are [B, T] classes, -100 where there is none.
        """
        features, outputs = self._encoded(
            input_ids, attention_mask, token_type_ids, inputs_embeds, options
        )
        logits = self.classifier(self.dropout(features))
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        return TokenClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class ZeroclapForQuestionAnswering(ZeroclapPreTrainedModel):
    """Token ids to the logits of the first and the last token of an answer."""

    def __init__(self, config: ZeroclapConfig) -> None:
        """Make the encoder and a projection to two numbers."""
        super().__init__(config)
        self.encoder = ZeroclapModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **options: Any,  # noqa: ANN401 - those of the encoder
    ) -> QuestionAnsweringModelOutput:
        """Compute two logits of every token, each [B, T], and their loss.

        `start_positions` and `end_positions`, [B] each, are the places of the first and the last
        token of the answer.
        """
        features, outputs = self._encoded(
            input_ids, attention_mask, token_type_ids, inputs_embeds, options
        )
        start, end = self.qa_outputs(features).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss, start, end, outputs.hidden_states, outputs.attentions
        )

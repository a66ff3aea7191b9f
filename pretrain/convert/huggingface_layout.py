"""Names of our weights and settings in transformers, for the export and the import."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pretrain.convert.weights import Names, head_modules, head_of, renamed
from pretrain.inference.model_folder import HEADS
from pretrain.model.config import ClassificationConfig, ModelConfig

CLASSIFIER = "classifier"
"""transformers' attribute, and our name of a head if its folder has none."""
POSITIONS = "encoder.embeddings.positions.table.weight"
TOKEN_TYPES = "roberta.embeddings.token_type_embeddings.weight"
BY_TOKEN = {"encoder.embeddings.tokens.weight", "head.bias"}
"""Weights of our own export that have one row for each id."""
UNUSED_POSITIONS = 2
"""Rows of the position table that no token reads, in both forms; transformers counts them."""

ROBERTA_SETTINGS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""RobertaConfig's name of each field of ours that it has. `max_positions` differs in its count."""

_LAYER = "roberta.encoder.layer.{}."
_ROBERTA: Mapping[str, tuple[str, ...]] = {
    "encoder.embeddings.tokens": ("roberta.embeddings.word_embeddings",),
    "encoder.embeddings.positions.table": ("roberta.embeddings.position_embeddings",),
    "encoder.embeddings.norm": ("roberta.embeddings.LayerNorm",),
    "encoder.layers.{}.attention.query_key_value": tuple(
        f"{_LAYER}attention.self.{part}" for part in ("query", "key", "value")
    ),
    "encoder.layers.{}.attention.output": (_LAYER + "attention.output.dense",),
    "encoder.layers.{}.attention_norm": (_LAYER + "attention.output.LayerNorm",),
    "encoder.layers.{}.expand": (_LAYER + "intermediate.dense",),
    "encoder.layers.{}.contract": (_LAYER + "output.dense",),
    "encoder.layers.{}.output_norm": (_LAYER + "output.LayerNorm",),
    "head.dense": ("lm_head.dense",),
    "head.norm": ("lm_head.layer_norm",),
    "head": ("lm_head",),
}


_HEAD = re.compile(rf"^{re.escape(HEADS)}.+\.(?=\w+\.\w+$)")


def is_plain_roberta(config: ModelConfig, head: ClassificationConfig | None = None) -> bool:
    """Return whether transformers' own RoBERTa computes exactly this model, with this head.

    It does where every field that RobertaConfig lacks has the default of ModelConfig, save for
    settings of ALiBi and of the CLAP head, which such a model has not.
    """
    free = (*ROBERTA_SETTINGS, "max_positions", "alibi", "initial_beta")
    plain = ModelConfig(**{name: getattr(config, name) for name in free})
    return plain == config and (head is None or head.pooling == "first")


def roberta_names(weights: Iterable[str]) -> Names:
    """Return the names in transformers' RoBERTa of our weights, with at most one head."""
    weights = list(weights)
    heads = {head_of(name) for name in weights if name.startswith(HEADS)}
    return renamed(weights, {**_ROBERTA, **head_modules(heads, CLASSIFIER)})


def own_names(weights: Iterable[str]) -> Names:
    """Return the names in our own export: ours, but for a classification head."""
    return {name: (_HEAD.sub(f"{CLASSIFIER}.", name),) for name in weights}


def unnamed(classes: int) -> tuple[str, ...]:
    """Return transformers' labels of classes without names."""
    return tuple(f"LABEL_{index}" for index in range(classes))


def problem_types(classes: int) -> tuple[str | None, ...]:
    """Return the accepted values of `problem_type`, the one to write first."""
    return ("regression" if classes == 1 else "single_label_classification", None)

"""Names of our weights and settings in transformers."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from data_prep.common.records import check_value
from pretrain.convert.contents import CLASSIFIER
from pretrain.convert.weights import Names, renamed
from pretrain.model.classification import ClassificationConfig
from pretrain.model.config import ModelConfig

TOKENS = "encoder.embeddings.tokens.weight"
POSITIONS = "encoder.embeddings.positions.table.weight"
TOKEN_TYPES = "roberta.embeddings.token_type_embeddings.weight"
BY_TOKEN = {TOKENS, "head.bias"}
"""Weights that have one row for each id."""
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
"""RobertaConfig's names of our fields. `max_positions` differs in its count."""

ALBERT_SETTINGS: Mapping[str, str] = {
    **ROBERTA_SETTINGS,
    "max_positions": "max_position_embeddings",
    "segments": "type_vocab_size",
}
"""AlbertConfig's names of our fields. Sharing, the size of token vectors and the activation are
expressed differently."""
ALBERT_ACTIVATIONS: Mapping[str, str] = {"gelu": "gelu", "gelu-tanh": "gelu_new"}
ALBERT_POOLER = "albert.pooler"
ALBERT_PAIRS = "sop_classifier.classifier.weight"
ALBERT_PROJECTION = "albert.encoder.embedding_hidden_mapping_in"
"""Projection of token vectors to the hidden size; present even if the sizes are equal."""

_LAYER = "roberta.encoder.layer.{}."
_ROBERTA = {
    "encoder.embeddings.tokens": "roberta.embeddings.word_embeddings",
    "encoder.embeddings.positions.table": "roberta.embeddings.position_embeddings",
    "encoder.embeddings.norm": "roberta.embeddings.LayerNorm",
    "encoder.layers.{}.attention.query_key_value": _LAYER + "attention.self.query|key|value",
    "encoder.layers.{}.attention.output": _LAYER + "attention.output.dense",
    "encoder.layers.{}.attention_norm": _LAYER + "attention.output.LayerNorm",
    "encoder.layers.{}.expand": _LAYER + "intermediate.dense",
    "encoder.layers.{}.contract": _LAYER + "output.dense",
    "encoder.layers.{}.output_norm": _LAYER + "output.LayerNorm",
    "head.dense": "lm_head.dense",
    "head.norm": "lm_head.layer_norm",
    "head": "lm_head",
    f"{CLASSIFIER}dense": "classifier.dense",
    f"{CLASSIFIER}projection": "classifier.out_proj",
}

_ALBERT_LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.0."
_ALBERT = {
    "encoder.embeddings.tokens": "albert.embeddings.word_embeddings",
    "encoder.embeddings.positions.table": "albert.embeddings.position_embeddings",
    "encoder.embeddings.segments": "albert.embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "albert.embeddings.LayerNorm",
    "encoder.embeddings.projection": ALBERT_PROJECTION,
    "encoder.layers.{}.attention.query_key_value": _ALBERT_LAYER + "attention.query|key|value",
    "encoder.layers.{}.attention.output": _ALBERT_LAYER + "attention.dense",
    "encoder.layers.{}.attention_norm": _ALBERT_LAYER + "attention.LayerNorm",
    "encoder.layers.{}.expand": _ALBERT_LAYER + "ffn",
    "encoder.layers.{}.contract": _ALBERT_LAYER + "ffn_output",
    "encoder.layers.{}.output_norm": _ALBERT_LAYER + "full_layer_layer_norm",
    "head.dense": "predictions.dense",
    "head.norm": "predictions.LayerNorm",
    "head": "predictions",
    "pair_head.dense": ALBERT_POOLER,
    "pair_head.projection": "sop_classifier.classifier",
    f"{CLASSIFIER}dense": ALBERT_POOLER,
    f"{CLASSIFIER}projection": "classifier",
}
SETTINGS = {"roberta": ROBERTA_SETTINGS, "albert": ALBERT_SETTINGS}
"""The names of our fields in the configs of transformers' classes."""
MODULES = {"roberta": _ROBERTA, "albert": _ALBERT}
"""The names of our modules in transformers' classes, as `renamed` reads them."""


def plain_type(config: ModelConfig, head: ClassificationConfig | None = None) -> str | None:
    """Return the type of transformers with exactly the outputs of this model and head; or None.

    roberta  Every field that RobertaConfig lacks has the default of ModelConfig, except settings of
             ALiBi and the CLAP head, which do not apply, and of initial weights.
    albert   The same for AlbertConfig. Layers share all weights or none, positions are counted from
             row 0, and there are segments.

    No class fits a causal model: GPT-NeoX (rotary) and BLOOM (ALiBi) end with a layer norm, which
    the models of the ALiBi paper do not; GPT-NeoX also pairs numbers by halves of a head, not
    neighbours, and BLOOM normalises the token embeddings. OPT has no factor on these.
    """
    if head is not None and head.pooling != "first":
        return None
    free = ("max_positions", "alibi", "alibi_slopes", "initial_beta", "initial_weights")
    given = {name: getattr(config, name) for name in (*ROBERTA_SETTINGS, *free)}
    if config == ModelConfig(**given):
        return "roberta"
    others = ("segments", "embedding_size", "sharing", "layer_groups", "activation", "pair_head")
    given |= {name: getattr(config, name) for name in others}
    named = config.sharing in ("all", "none") and config.activation in ALBERT_ACTIVATIONS
    is_albert = named and config.segments and config == ModelConfig(**given, position_offset=0)
    return "albert" if is_albert else None


def in_transformers(config: ModelConfig) -> bool:
    """Return whether transformers can load the model: not with latents or an untied head."""
    return not config.latents and config.head != "untied"


def loading_call(config: ModelConfig, head: ClassificationConfig | None, folder: str) -> str:
    """Return the call that loads a model folder; `folder` is an expression in Python."""
    trust = "" if plain_type(config, head) else ", trust_remote_code=True"
    return f"AutoModelFor{task(config, head)}.from_pretrained({folder}{trust})"


def task(config: ModelConfig, head: ClassificationConfig | None) -> str:
    """Return the task of a model, as in the names of transformers' classes."""
    if head is not None:
        return "SequenceClassification"
    if config.causal:
        return "CausalLM"
    has_pairs = config.pair_head and plain_type(config) == "albert"
    return "PreTraining" if has_pairs else "MaskedLM"


def albert_groups(config: ModelConfig) -> int:
    """Return the number of ALBERT's groups of layers, which share all weights."""
    return config.layer_groups if config.sharing == "all" else config.num_layers


def their_names(kind: str, weights: Collection[str], config: ModelConfig) -> Names:
    """Return the names in transformers' RoBERTa or ALBERT of our weights."""
    return renamed(weights, MODULES[kind], config.num_layers // albert_groups(config))


def identity(size: int) -> dict[str, Tensor]:
    """Return the identity projection of an ALBERT whose token vectors have the hidden size."""
    weight, bias = f"{ALBERT_PROJECTION}.weight", f"{ALBERT_PROJECTION}.bias"
    return {weight: torch.eye(size), bias: torch.zeros(size)}


def unnamed(classes: int) -> tuple[str, ...]:
    """Return transformers' labels of classes without names."""
    return tuple(f"LABEL_{index}" for index in range(classes))


def problem_types(classes: int) -> tuple[str | None, ...]:
    """Return the accepted values of `problem_type`, the one to write first."""
    return ("regression" if classes == 1 else "single_label_classification", None)


def check_modelled(settings: Mapping[str, Any], accepted: Mapping[str, object]) -> None:
    """Raise ValueError, naming the setting, if one changes outputs as our model cannot.

    Args:
        settings: of a model; a missing one has the accepted value.
        accepted: the only supported value of each such setting.
    """
    for name, supported in accepted.items():
        value = settings.get(name, supported)
        check_value(name, value, value == supported, repr(supported))

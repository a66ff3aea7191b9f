"""What fairseq calls our weights and settings: read by the export and by the import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pretrain.inference.model_folder import HEADS
from pretrain.model.config import ModelConfig

ENCODER = "encoder.sentence_encoder."
LM_HEAD = "encoder.lm_head."
TOKENS = ENCODER + "embed_tokens.weight"
TIED = LM_HEAD + "weight"
BETA = LM_HEAD + "beta"
# A format number and a device marker: fairseq saves them among the weights.
VERSION = ENCODER + "version"
DEVICE_MARKER = ENCODER + "embed_positions._float_tensor"

# Ours on the left. Query, key and value are missing here: one matrix with us, three there.
_LAYER_MODULES = (
    ("attention.output", "self_attn.out_proj"),
    ("attention_norm", "self_attn_layer_norm"),
    ("expand", "fc1"),
    ("contract", "fc2"),
    ("output_norm", "final_layer_norm"),
)

LAYER_NORM_EPSILON = 1e-5
NOT_MODELLED: Mapping[str, object] = MappingProxyType(
    {
        "activation_fn": "gelu",
        "adaptive_input": False,
        "encoder_layers_to_keep": None,
        "encoder_normalize_before": False,
        "ffn_blocks_to_remove": -1,
        "mha_heads_to_keep": -1,
        "quant_noise_pq": 0,
        "quant_noise_scalar": 0,
        "spectral_norm_classification_head": False,
        "untie_weights_roberta": False,
    }
)
"""Settings that change what a model computes, and the one value of each that ours has."""


LABELS = "class_labels"
"""Where we keep heads' labels, in the checkpoint's `extra_state`; fairseq passes over it."""


def names(config: ModelConfig, heads: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """Of each of our weights, its name with fairseq; of several, ours is them joined by rows.

    Args:
        config: of the language model.
        heads: names of its classification heads.
    """
    result: dict[str, tuple[str, ...]] = {"encoder.embeddings.tokens.weight": (TOKENS,)}
    if config.position == "learned":
        result["encoder.embeddings.positions.table.weight"] = (ENCODER + "embed_positions.weight",)
    modules = {**_encoder_modules(config), **_head_modules(config, heads)}
    for ours, theirs in modules.items():
        for kind in ("weight", "bias"):
            result[f"{ours}.{kind}"] = tuple(f"{their}.{kind}" for their in theirs)
    own = "beta" if config.head == "clap" else "bias"
    return result | {f"head.{own}": (LM_HEAD + own,)}


def _encoder_modules(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    result: dict[str, tuple[str, ...]] = {}
    if config.embedding_norm:
        result["encoder.embeddings.norm"] = (ENCODER + "layernorm_embedding",)
    for layer in range(config.num_layers):
        ours, theirs = f"encoder.layers.{layer}.", f"{ENCODER}layers.{layer}."
        parts = tuple(f"{theirs}self_attn.{part}_proj" for part in "qkv")
        result[ours + "attention.query_key_value"] = parts
        result |= {ours + mine: (theirs + their,) for mine, their in _LAYER_MODULES}
    return result


def _head_modules(config: ModelConfig, heads: Iterable[str]) -> dict[str, tuple[str, ...]]:
    result: dict[str, tuple[str, ...]] = {}
    if config.head == "roberta":
        result = {"head.dense": (LM_HEAD + "dense",), "head.norm": (LM_HEAD + "layer_norm",)}
    for head in heads:
        result[f"{HEADS}{head}.dense"] = (f"{HEADS}{head}.dense",)
        result[f"{HEADS}{head}.projection"] = (f"{HEADS}{head}.out_proj",)
    return result

"""Names of our weights and settings in fairseq, for the export and the import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pretrain.convert.weights import Names, head_modules, renamed

ENCODER = "encoder.sentence_encoder."
LM_HEAD = "encoder.lm_head."
TOKENS = ENCODER + "embed_tokens.weight"
TIED = LM_HEAD + "weight"
BETA = LM_HEAD + "beta"
# A format number and a device marker, which fairseq saves among the weights.
VERSION = ENCODER + "version"
DEVICE_MARKER = ENCODER + "embed_positions._float_tensor"

_LAYER = ENCODER + "layers.{}."
_MODULES: Mapping[str, tuple[str, ...]] = {
    "encoder.embeddings.tokens": (ENCODER + "embed_tokens",),
    "encoder.embeddings.positions.table": (ENCODER + "embed_positions",),
    "encoder.embeddings.norm": (ENCODER + "layernorm_embedding",),
    "encoder.layers.{}.attention.query_key_value": tuple(
        f"{_LAYER}self_attn.{part}_proj" for part in "qkv"
    ),
    "encoder.layers.{}.attention.output": (_LAYER + "self_attn.out_proj",),
    "encoder.layers.{}.attention_norm": (_LAYER + "self_attn_layer_norm",),
    "encoder.layers.{}.expand": (_LAYER + "fc1",),
    "encoder.layers.{}.contract": (_LAYER + "fc2",),
    "encoder.layers.{}.output_norm": (_LAYER + "final_layer_norm",),
    "head.dense": (LM_HEAD + "dense",),
    "head.norm": (LM_HEAD + "layer_norm",),
    "head": (LM_HEAD.removesuffix("."),),
}

POSITIONS: Mapping[str, Mapping[str, bool]] = {
    position: {
        "no_token_positional_embeddings": not added,
        "encoder_learned_pos": learned,
        "encoder_alibi": alibi,
    }
    for position, added, learned, alibi in (
        ("learned", True, True, False),
        ("sinusoidal", True, False, False),
        ("alibi", False, True, True),
        ("none", False, True, False),
    )
}
"""fairseq's settings for each position method that it has."""
LAYER_NORM_EPSILON = 1e-5
ACCEPTED: Mapping[str, tuple[object, ...]] = {
    "causal": (False,),
    "position": tuple(POSITIONS),
    "alibi": ("offset", "symmetric"),
    "alibi_slopes": ("fixed",),
    "layer_norm": ("post",),
    "activation": ("gelu",),
    "head": ("roberta", "clap"),
    "layer_norm_epsilon": (LAYER_NORM_EPSILON,),
}
"""Values of our fields of which fairseq has only these."""
FREE = (
    *("vocab_size", "normalize_embeddings", "embedding_scale", "embedding_norm", "mask_embedding"),
    *("initial_beta", "initial_weights", "dropout", "attention_dropout"),
)
"""Fields that may have any value, beside SIZES: the settings hold them, the shapes of the weights
do, or (`initial_weights`) they mean nothing once weights are drawn. Of all other fields fairseq has
the default of ModelConfig alone."""
SIZES: Mapping[str, str] = {
    "hidden_size": "encoder_embed_dim",
    "num_layers": "encoder_layers",
    "num_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_embed_dim",
    "max_positions": "max_positions",
}
NOT_MODELLED: Mapping[str, object] = {
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
"""Settings that change what a model computes, with the only value that our model can have."""

LABELS = "class_labels"
"""Key of the labels of classes in a checkpoint's `extra_state`; fairseq ignores it."""


def names(weights: Iterable[str], heads: Iterable[str]) -> Names:
    """Return fairseq's names of our weights.

    Args:
        weights: names of the weights of a model folder.
        heads: names of its classification heads.

    Raises:
        ValueError: a weight does not exist in fairseq.
    """
    return renamed(weights, {**_MODULES, **head_modules(heads)})

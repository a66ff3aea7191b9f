"""Named models: a size and a variant, each a small change to the defaults of ModelConfig.

The masked variants are those of the published study with ALiBi and the CLAP head (EIFY/fairseq),
the causal ones those of the ALiBi paper. No other file repeats what a variant is.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config import POSITION_METHODS, ModelConfig

Delta = Mapping[str, object]

SIZES: Mapping[str, Delta] = {
    "base": {},
    "large": {
        "hidden_size": 1024,
        "num_layers": 24,
        "num_heads": 16,
        "intermediate_size": 4096,
    },
    # Trains in minutes on two CPU cores: for the demo and the tests.
    "small": {
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "intermediate_size": 512,
        "max_positions": 128,
    },
    "tiny": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 64,
        "max_positions": 64,
    },
}

# The published CLAP models have neither the embedding layer norm nor hidden dropout.
_CLAP: Delta = {
    "head": "clap",
    "normalize_embeddings": True,
    "embedding_norm": False,
    "dropout": 0.0,
}
_ALIBI: Delta = {"position": "alibi"}
_ZERO_CLAP: Delta = {**_CLAP, **_ALIBI, "mask_embedding": "zero"}
# The transformer of Baevski and Auli 2019 without its adaptive tables: what Press et al. 2022
# compare position methods on.
_CAUSAL: Delta = {
    "causal": True,
    "layer_norm": "pre",
    "activation": "relu",
    "head": "tied",
    "embedding_norm": False,
    "embedding_scale": "sqrt-hidden",
    "alibi": "symmetric",
}

VARIANTS: Mapping[str, Delta] = {
    # As trained on the Pile.
    "baseline": {},
    "sinusoidal": {"position": "sinusoidal"},
    "alibi": _ALIBI,
    "learned-clap": _CLAP,
    "zero-clap": {**_ZERO_CLAP, "embedding_scale": "sqrt-hidden"},
    # Tried on WikiText-103 as well, and found to make no difference.
    "alibi-symmetric": {**_ALIBI, "alibi": "symmetric"},
    "learned-clap-unnormalized": {**_CLAP, "normalize_embeddings": False},
    "alibi-clap": {**_CLAP, **_ALIBI, "attention_dropout": 0.0},
    "zero-clap-unscaled": _ZERO_CLAP,
    "zero-clap-unscaled-unnormalized": {**_ZERO_CLAP, "normalize_embeddings": False},
    "zero-clap-unscaled-no-dropout": {**_ZERO_CLAP, "attention_dropout": 0.0},
    **{f"causal-{method}": {**_CAUSAL, "position": method} for method in POSITION_METHODS},
}


def build(size: str, variant: str, tokenizer_size: int, overrides: Delta) -> ModelConfig:
    """Return the config of a named model for a vocabulary of `tokenizer_size` ids.

    Raises:
        ValueError: an unknown size or variant, or a value that ModelConfig refuses.
    """
    if size not in SIZES:
        raise ValueError(f"model.size: {size!r} is not one of {', '.join(SIZES)}")
    if variant not in VARIANTS:
        raise ValueError(f"model.variant: {variant!r} is not one of {', '.join(VARIANTS)}")
    fields = {**SIZES[size], **VARIANTS[variant], **overrides}
    # `<mask>` is the last id; it needs no row where it is the zero vector.
    has_mask_row = fields.get("mask_embedding", "row") == "row"
    rows = tokenizer_size if has_mask_row else tokenizer_size - 1
    return ModelConfig(vocab_size=rows, **fields)  # type: ignore[arg-type]

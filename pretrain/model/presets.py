"""Named models: a size and a variant, each a small delta on the defaults of ModelConfig.

The variants are those of the masked-LM study with ALiBi and the CLAP head (EIFY/fairseq). No other
file spells out what a variant is.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .config import ModelConfig

Delta = Mapping[str, object]

SIZES: Mapping[str, Delta] = MappingProxyType(
    {
        "base": {},
        "large": {
            "hidden_size": 1024,
            "num_layers": 24,
            "num_heads": 16,
            "intermediate_size": 4096,
        },
        # Minutes on two CPU cores, not hours: for the demo and the tests.
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
)

# Beside the head itself, the original's CLAP models drop the embedding layer norm and the hidden
# dropout.
_CLAP: Delta = {
    "head": "clap",
    "normalize_embeddings": True,
    "embedding_norm": False,
    "dropout": 0.0,
}
_ALIBI: Delta = {"position": "alibi"}
_ZERO_CLAP: Delta = {**_CLAP, **_ALIBI, "mask_embedding": "zero"}

VARIANTS: Mapping[str, Delta] = MappingProxyType(
    {
        # As trained on the Pile.
        "baseline": {},
        "sinusoidal": {"position": "sinusoidal"},
        "alibi": _ALIBI,
        "learned-clap": _CLAP,
        "zero-clap": {**_ZERO_CLAP, "embedding_scale": "sqrt-hidden"},
        # What else was tried on WikiText-103, and found to make no difference.
        "alibi-symmetric": {**_ALIBI, "alibi": "symmetric"},
        "learned-clap-unnormalized": {**_CLAP, "normalize_embeddings": False},
        "alibi-clap": {**_CLAP, **_ALIBI, "attention_dropout": 0.0},
        "zero-clap-unscaled": _ZERO_CLAP,
        "zero-clap-unscaled-unnormalized": {**_ZERO_CLAP, "normalize_embeddings": False},
        "zero-clap-unscaled-no-dropout": {**_ZERO_CLAP, "attention_dropout": 0.0},
    }
)


def build(size: str, variant: str, tokenizer_size: int, overrides: Delta) -> ModelConfig:
    """The config of a named model for a vocabulary of `tokenizer_size` ids, `<mask>` the last.

    Raises:
        ValueError: an unknown size or variant, or a value that ModelConfig refuses.
    """
    if size not in SIZES:
        raise ValueError(f"model.size: {size!r} is not one of {', '.join(SIZES)}")
    if variant not in VARIANTS:
        raise ValueError(f"model.variant: {variant!r} is not one of {', '.join(VARIANTS)}")
    fields = {**SIZES[size], **VARIANTS[variant], **overrides}
    # `<mask>` is the last id; a mask that is the zero vector needs no row.
    has_mask_row = fields.get("mask_embedding", "row") == "row"
    rows = tokenizer_size if has_mask_row else tokenizer_size - 1
    return ModelConfig(vocab_size=rows, **fields)  # type: ignore[arg-type]

"""Named models: a size and a variant, each a small change to the defaults of ModelConfig.

The masked variants are those published with ALiBi and the CLAP head (EIFY/fairseq), ALBERT, and a
modern encoder; the causal ones are those of the ALiBi paper, and models of characters. No other
file repeats the definition of a variant.
"""

from collections.abc import Mapping

from .config import POSITION_METHODS, ModelConfig

Delta = Mapping[str, object]


def _size(hidden: int, layers: int, heads: int, intermediate: int, **others: object) -> Delta:
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads}
    return {**sizes, "intermediate_size": intermediate, **others}


# Lan et al. 2020, table 1, with the heads and the dropout of the released models (version 1).
_ALBERT: Delta = {"embedding_size": 128, "max_positions": 512}
_NO_DROPOUT: Delta = {"dropout": 0.0, "attention_dropout": 0.0}

SIZES: Mapping[str, Delta] = {
    "base": {},
    "large": _size(1024, 24, 16, 4096),
    # Trains in minutes on two CPU cores: for the demo and the tests.
    "small": _size(128, 4, 4, 512, max_positions=128),
    "tiny": _size(32, 2, 4, 64, max_positions=64),
    # Between small and base: 51 million weights with a vocabulary of 50,265.
    "medium": _size(512, 8, 8, 2048, max_positions=512),
    "albert-base": _ALBERT,
    "albert-large": _size(1024, 24, 16, 4096, **_ALBERT),
    "albert-xlarge": _size(2048, 24, 16, 8192, **_ALBERT),
    "albert-xxlarge": _size(4096, 12, 64, 16384, **_ALBERT, **_NO_DROPOUT),
    "albert-small": _size(128, 4, 4, 512, max_positions=128, embedding_size=64),
    # ModernBERT's (Warner et al. 2024): deep and narrow.
    "modern-base": {"num_layers": 22, "intermediate_size": 1152},
    "modern-large": _size(1024, 28, 16, 2624),
    # For vocabularies of characters.
    "char": _size(256, 4, 8, 1024, max_positions=128),
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

# The models of the assignment on knowledge in pretraining of Stanford's CS224N, 2023, at size char:
# minGPT, and a Perceiver AR made simple. `alibi` is for those who choose these positions.
_CHAR: Delta = {
    "causal": True,
    "layer_norm": "pre",
    "final_norm": True,
    "head": "untied",
    "embedding_norm": False,
    "position_offset": 0,
    "alibi": "symmetric",
}

# Warner et al. 2024 (ModernBERT), with a tied head of RoBERTa's kind. Their first layer has no norm
# before its attention, which follows the embedding's norm; here it has one as all others.
_MODERN: Delta = {
    "position": "rotary",
    "layer_norm": "pre",
    "final_norm": True,
    "gated": True,
    "biases": False,
    "local_window": 128,
    **_NO_DROPOUT,
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
    # The same, but whether it matters that the mask has a row, EIFY/fairseq took back.
    "alibi-clap": {**_CLAP, **_ALIBI, "attention_dropout": 0.0},
    "zero-clap-unscaled": _ZERO_CLAP,
    "zero-clap-unscaled-unnormalized": {**_ZERO_CLAP, "normalize_embeddings": False},
    "zero-clap-unscaled-no-dropout": {**_ZERO_CLAP, "attention_dropout": 0.0},
    # Lan et al. 2020.
    "albert": {
        "sharing": "all",
        "segments": 2,
        "activation": "gelu-tanh",
        "position_offset": 0,
        "layer_norm_epsilon": 1e-12,
        "initial_weights": "truncated-normal",
    },
    "modern": _MODERN,
    **{f"causal-{method}": {**_CAUSAL, "position": method} for method in POSITION_METHODS},
    "char-vanilla": _CHAR,
    "char-perceiver": {**_CHAR, "latents": 64},
}


def build(size: str, variant: str, tokenizer_size: int, overrides: Delta) -> ModelConfig:
    """Return the config of a named model for a vocabulary of `tokenizer_size` ids.

    Raises:
        ValueError: a value that ModelConfig refuses.
    """
    fields = {**SIZES[size], **VARIANTS[variant], **overrides}
    # `<mask>` is the last id; it needs no row where it is the zero vector.
    has_mask_row = fields.get("mask_embedding", "row") == "row"
    rows = tokenizer_size if has_mask_row else tokenizer_size - 1
    return ModelConfig(vocab_size=rows, **fields)  # type: ignore[arg-type]

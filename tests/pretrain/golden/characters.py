"""Models of characters by their formulas, in fp64, for make.py."""

import functools

from torch.nn.functional import gelu

from tests.pretrain.golden.causal import attend
from tests.pretrain.model.test_parity import linear, norm

LATENTS = 8
VARIANTS = ("char-vanilla", "char-perceiver")
METHODS = ("rotary", "t5-bias", "alibi")
MODELS = (*VARIANTS, *(f"char-perceiver {method}" for method in METHODS))
"""Variants, with learned positions or the position method after the name."""


def logits(model, heads, weights, input_ids):
    """minGPT, or the assignment's Perceiver."""
    variant, _, position = model.partition(" ")
    tokens, is_perceiver = list(range(len(input_ids))), variant == "char-perceiver"
    inputs = weights["encoder.embeddings.tokens.weight"][input_ids]
    if not position:
        inputs = inputs + weights["encoder.embeddings.positions.table.weight"][: len(tokens)]
    x, places = inputs, tokens
    if is_perceiver:
        x, places = weights["encoder.basis"][: len(tokens)], tokens[:LATENTS]
    layers = sum(name.endswith("attention_norm.bias") for name in weights)
    attention = functools.partial(attend, weights, position, heads)
    for number in range(layers):
        name = f"encoder.layers.{number}."
        read = functools.partial(norm, weights=weights, name=name + "attention_norm")
        # The assignment has no norm on the tokens in the first and the last layer.
        if is_perceiver and number == 0:
            mixed = attention(name, read(x), inputs, places, tokens)
        elif is_perceiver and number == layers - 1:
            source, x = read(x), inputs
            mixed = attention(name, x, source, tokens, places)
        else:
            mixed = attention(name, read(x), read(x), places, places)
        x = x + mixed
        inner = linear(norm(x, weights, name + "output_norm"), weights, name + "expand")
        x = x + linear(gelu(inner), weights, name + "contract")
    return norm(x, weights, "encoder.final_norm") @ weights["head.weight"].T

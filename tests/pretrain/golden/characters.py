"""Models of characters by their formulas, in fp64, for make.py."""

import functools
import math

import torch
from torch.nn.functional import gelu

from tests.pretrain.golden.causal import bias, rotated
from tests.pretrain.model.test_parity import linear, norm

LATENTS = 8
QUERIES = {"char-vanilla": None, "char-perceiver": "basis", "char-perceiver-ar": "tokens"}
METHODS = ("rotary", "t5-bias", "alibi")
MODELS = (*QUERIES, *(f"{variant} {method}" for variant in [*QUERIES][1:] for method in METHODS))
"""Variants, with learned positions or the position method after the name."""


def logits(model, heads, weights, input_ids):
    """minGPT; or the assignment's Perceiver, with a basis or with the last tokens as queries."""
    variant, _, position = model.partition(" ")
    tokens, queries = list(range(len(input_ids))), QUERIES[variant]
    inputs = weights["encoder.embeddings.tokens.weight"][input_ids]
    if not position:
        inputs = inputs + weights["encoder.embeddings.positions.table.weight"][: len(tokens)]
    x, places = inputs, tokens
    if queries == "tokens":
        x, places = inputs[-LATENTS:], tokens[-LATENTS:]
    if queries == "basis":
        x, places = weights["encoder.basis"][: len(tokens)], tokens[:LATENTS]
    layers = sum(name.endswith("attention_norm.bias") for name in weights)
    attention = functools.partial(attend, weights, position, heads)
    for number in range(layers):
        name = f"encoder.layers.{number}."
        read = functools.partial(norm, weights=weights, name=name + "attention_norm")
        # The assignment has no norm on what stands beside a basis.
        beside = torch.clone if queries == "basis" else read
        if queries and number == 0:
            mixed = attention(name, read(x), beside(inputs), places, tokens)
        elif queries and number == layers - 1:
            source = read(x)
            x = inputs if queries == "basis" else torch.cat([inputs[:-LATENTS], x])
            mixed = attention(name, beside(x), source, tokens, places)
        else:
            mixed = attention(name, read(x), read(x), places, places)
        x = x + mixed
        inner = linear(norm(x, weights, name + "output_norm"), weights, name + "expand")
        x = x + linear(gelu(inner), weights, name + "contract")
    return norm(x, weights, "encoder.final_norm") @ weights["head.weight"].T


def attend(weights, position, heads, layer, queries, source, query_places, key_places):
    """Each query sees the keys whose places are not after its own; without any it gets zeros."""
    name, size = layer + "attention.query_key_value", queries.shape[1]
    query = linear(queries, weights, name)[:, :size]
    key, value = linear(source, weights, name)[:, size:].split(size, dim=1)
    parts = []
    for head in range(heads):
        part = slice(head * size // heads, (head + 1) * size // heads)
        one, other = query[:, part], key[:, part]
        if position == "rotary":
            one, other = rotated(one, query_places), rotated(other, key_places)
        scores = one @ other.T / math.sqrt(size // heads)
        length = max(query_places + key_places) + 1
        added = bias(weights, position, heads, head, length)[query_places][:, key_places]
        # A query that sees nothing: no numbers of -inf alone, which have no softmax.
        sees = (added > -math.inf).any(dim=1, keepdim=True)
        parts.append((scores + added.where(sees, 0.0)).softmax(dim=1) @ value[:, part])
    return linear(torch.cat(parts, dim=1), weights, layer + "attention.output") * sees

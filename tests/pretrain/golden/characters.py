"""Models of characters by their formulas, in fp64, for make.py."""

import math

import torch
from torch.nn.functional import gelu

from tests.pretrain.model.test_parity import linear, norm

LATENTS = 8
QUERIES = {"char-vanilla": None, "char-perceiver": "basis", "char-perceiver-ar": "inputs"}


def logits(variant, heads, weights, input_ids):
    """minGPT; or the assignment's Perceiver, with a basis or with the last tokens as queries."""
    tokens, queries = list(range(len(input_ids))), QUERIES[variant]
    inputs = weights["encoder.embeddings.tokens.weight"][input_ids]
    inputs = inputs + weights["encoder.embeddings.positions.table.weight"][: len(tokens)]
    x, places = inputs, tokens
    if queries == "inputs":
        x, places = inputs[-LATENTS:], tokens[-LATENTS:]
    if queries == "basis":
        x, places = weights["encoder.basis"][: len(tokens)], tokens[:LATENTS]
    layers = sum(name.endswith("attention_norm.bias") for name in weights)
    for number in range(layers):
        name = f"encoder.layers.{number}."
        read = norm(x, weights, name + "attention_norm")
        if queries and number == 0:
            mixed = attention(read, inputs, places, tokens, weights, name, heads)
        elif queries and number == layers - 1:
            x, mixed = inputs, attention(inputs, read, tokens, places, weights, name, heads)
        else:
            mixed = attention(read, read, places, places, weights, name, heads)
        x = x + mixed
        inner = linear(norm(x, weights, name + "output_norm"), weights, name + "expand")
        x = x + linear(gelu(inner), weights, name + "contract")
    return norm(x, weights, "encoder.final_norm") @ weights["head.weight"].T


def attention(queries, source, query_places, key_places, weights, layer, heads):
    """Each query sees the keys whose places are not after its own; without any it gets zeros."""
    name, size = layer + "attention.query_key_value", queries.shape[1]
    query = linear(queries, weights, name)[:, :size]
    key, value = linear(source, weights, name)[:, size:].split(size, dim=1)
    rows = []
    for index, place in enumerate(query_places):
        seen = [number for number, other in enumerate(key_places) if other <= place]
        parts = []
        for head in range(heads):
            part = slice(head * size // heads, (head + 1) * size // heads)
            scores = key[seen, part] @ query[index, part] / math.sqrt(size // heads)
            parts.append(scores.softmax(dim=0) @ value[seen, part])
        mixed = linear(torch.cat(parts)[None], weights, layer + "attention.output")[0]
        rows.append(mixed if seen else torch.zeros_like(mixed))
    return torch.stack(rows)

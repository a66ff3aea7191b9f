"""ALBERT by its formulas (Lan et al. 2020, and the released code), in fp64, for make.py."""

import math

import torch
from torch.nn.functional import gelu

from tests.pretrain.model.test_parity import linear
from tests.pretrain.model.test_parity import norm as layer_norm

EMBEDDING_SIZE = 16
SHARING = {
    "albert": {},
    "albert sharing attention": {"sharing": "attention"},
    "albert sharing feed-forward": {"sharing": "feed-forward"},
    "albert in groups": {"layer_groups": 2},
}
"""What differs from the variant `albert` besides the size of its embeddings, by name."""


def owners(name, layers):
    """The layers whose weights each layer uses, of attention and of feed-forward."""
    changed = SHARING[name]
    alone, first = list(range(layers)), [0] * layers
    if changed.get("layer_groups") == layers:
        return alone, alone
    sharing = changed.get("sharing", "all")
    return (
        first if sharing in ("all", "attention") else alone,
        first if sharing in ("all", "feed-forward") else alone,
    )


def logits(name, heads, layers, weights, input_ids):
    """The logits at every place of a text in segment 0."""

    def dense(x, part):
        return linear(x, weights, part)

    def norm(x, part):
        return layer_norm(x, weights, part, epsilon=1e-12)

    table = weights["encoder.embeddings.tokens.weight"]
    x = table[input_ids] + weights["encoder.embeddings.segments.weight"][0]
    x = x + weights["encoder.embeddings.positions.table.weight"][: len(input_ids)]
    x = dense(norm(x, "encoder.embeddings.norm"), "encoder.embeddings.projection")
    size = x.shape[1] // heads
    for attention, feed_forward in zip(*owners(name, layers), strict=True):
        layer = f"encoder.layers.{attention}."
        query, key, value = dense(x, layer + "attention.query_key_value").chunk(3, dim=1)
        of_heads = (part.split(size, dim=1) for part in (query, key, value))
        mixed = [
            (q @ k.T / math.sqrt(size)).softmax(dim=1) @ v
            for q, k, v in zip(*of_heads, strict=True)
        ]
        mixed = dense(torch.cat(mixed, dim=1), layer + "attention.output")
        x = norm(x + mixed, layer + "attention_norm")
        layer = f"encoder.layers.{feed_forward}."
        inner = gelu(dense(x, layer + "expand"), approximate="tanh")
        x = norm(x + dense(inner, layer + "contract"), layer + "output_norm")
    x = norm(gelu(dense(x, "head.dense"), approximate="tanh"), "head.norm")
    return x @ table.T + weights["head.bias"]

"""Causal models by their formulas, in fp64, for make.py."""

import math

import torch

from tests.pretrain.model.test_parity import linear, norm, positions_by_formula, slopes_by_formula

POSITIONS = ("learned", "sinusoidal", "rotary", "t5-bias", "alibi", "none")


def logits(position, heads, weights, input_ids):
    """Baevski and Auli's transformer without a norm at its end, and one of the position methods."""
    table = weights["encoder.embeddings.tokens.weight"]
    length, size = len(input_ids), table.shape[1]
    places = list(range(length))
    x = table[input_ids] * math.sqrt(size)
    if position == "learned":
        x = x + weights["encoder.embeddings.positions.table.weight"][2 : 2 + length]
    if position == "sinusoidal":
        x = x + positions_by_formula({}, {"encoder_learned_pos": False}, length, size)
    layers = sum(name.endswith("attention_norm.bias") for name in weights)
    for layer in (f"encoder.layers.{number}." for number in range(layers)):
        read = norm(x, weights, layer + "attention_norm")
        x = x + attend(weights, position, heads, layer, read, read, places, places)
        read = norm(x, weights, layer + "output_norm")
        x = x + linear(linear(read, weights, layer + "expand").relu(), weights, layer + "contract")
    return x @ table.T


def attend(weights, position, heads, layer, queries, source, query_places, key_places):
    """Each query sees the keys whose places are not after its own."""
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
        parts.append((scores + added).softmax(dim=1) @ value[:, part])
    return linear(torch.cat(parts, dim=1), weights, layer + "attention.output")


def bias(weights, position, heads, head, length):
    """What is added to the scores of a head: [length, length], -inf at later keys."""

    def of(query, key):
        if key > query:
            return torch.tensor(-math.inf, dtype=torch.float64)
        if position == "t5-bias":
            bucket = t5_bucket(key - query, causal=True)
            return weights["encoder.score_bias.table.weight"][bucket, head]
        slope = slopes_by_formula(heads)[head] if position == "alibi" else 0.0
        return torch.tensor(-slope * (query - key), dtype=torch.float64)

    rows = [[of(query, key) for key in range(length)] for query in range(length)]
    return torch.stack([torch.stack(row) for row in rows])


def rotated(x, places=None):
    """Neighbouring numbers as one complex number, turned by place * 10000^(-2i / K)."""
    places = torch.tensor(places or range(len(x)))
    pair = torch.arange(x.shape[1] // 2, dtype=torch.float64)
    angle = places[:, None] * 10000.0 ** (-2 * pair / x.shape[1])
    turned = torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous()) * torch.exp(1j * angle)
    return torch.view_as_real(turned).flatten(1)


def t5_bucket(distance, causal):
    """The bucket of a key `distance` after the query, by T5's logarithm."""
    buckets = 32 if causal else 16
    first = 0 if causal or distance <= 0 else 16
    distance = max(-distance, 0) if causal else abs(distance)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(128 / exact)
    # Where a border is a whole number, the quotient of the logarithms may be just below.
    return first + min(exact + math.floor(share * (buckets - exact) + 1e-9), buckets - 1)

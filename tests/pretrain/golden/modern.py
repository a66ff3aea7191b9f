"""The variant `modern` by its formulas, in fp64, for make.py."""

import math

import torch
from torch.nn.functional import gelu

from tests.pretrain.golden.causal import rotated

WINDOW, GLOBAL_EVERY = 6, 2


def logits(heads, weights, input_ids):
    """Pre-norm, GEGLU, rotary, no biases; layer 0 sees all tokens, layer 1 three on each side."""
    table = weights["encoder.embeddings.tokens.weight"]
    size, length = table.shape[1], len(input_ids)
    x = norm(table[input_ids], weights, "encoder.embeddings.norm")
    layers = sum(name.endswith("attention_norm.weight") for name in weights)
    for number in range(layers):
        layer = f"encoder.layers.{number}."
        read = norm(x, weights, layer + "attention_norm")
        qkv = read @ weights[layer + "attention.query_key_value.weight"].T
        mixed = []
        for head in range(heads):
            part = slice(head * size // heads, (head + 1) * size // heads)
            query, key, value = (third[:, part] for third in qkv.split(size, dim=1))
            scores = rotated(query) @ rotated(key).T / math.sqrt(size // heads)
            if number % GLOBAL_EVERY:
                hidden = [[far(i, j) for j in range(length)] for i in range(length)]
                scores = scores.masked_fill(torch.tensor(hidden), -math.inf)
            mixed.append(scores.softmax(dim=1) @ value)
        x = x + torch.cat(mixed, dim=1) @ weights[layer + "attention.output.weight"].T
        read = norm(x, weights, layer + "output_norm")
        expanded, gate = (read @ weights[layer + "expand.weight"].T).chunk(2, dim=1)
        x = x + (gelu(expanded) * gate) @ weights[layer + "contract.weight"].T
    x = norm(x, weights, "encoder.final_norm")
    x = norm(gelu(x @ weights["head.dense.weight"].T), weights, "head.norm")
    return x @ table.T + weights["head.bias"]


def far(query, key):
    """Whether a local layer hides the key from the query."""
    return not -WINDOW / 2 <= key - query <= WINDOW / 2


def norm(x, weights, name):
    """A layer norm without a bias."""
    centred = x - x.mean(dim=1, keepdim=True)
    unit = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    return unit * weights[name + ".weight"]

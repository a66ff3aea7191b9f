"""Figures of models, against which test_golden.py holds the code.

Every figure follows from formulas that are written out here or beside this file, in fp64 and
without the code under test, nor torch's generator: weights and inputs are formulas as well. So they
are the same on every machine up to the last digits.
"""

import functools
import math

import numpy as np
import torch

from tests.pretrain.golden import albert, causal, characters, modern

VOCABULARY, MASK_ID = 50, 49
LENGTHS = (12, 7)
LAYERS, HEADS = 2, 4


def weight(name, shape):
    """The weight of a name: sines whose phase is quadratic in the element's number.

    A linear phase would make matrices of rank two.
    """
    number = np.arange(math.prod(shape), dtype=np.float64)
    waves = np.sin(0.37 * number * number + sum(map(ord, name))).reshape(shape)
    if name == "head.beta":
        return np.full(shape, 1.5)
    if name.endswith("bias"):
        return 0.1 * waves
    return 1.0 + 0.1 * waves if "norm" in name else 0.2 * waves


def ids(row):
    """Ids of a text before any is hidden."""
    return [4 + (7 * place * place + 3 * place + 11 * row) % 45 for place in range(LENGTHS[row])]


def hidden(row):
    """The places of a text that are hidden, and predicted."""
    return list(range(1, LENGTHS[row], 4))


def inputs(row):
    """Ids of a text as the model reads them."""
    return [MASK_ID if place in hidden(row) else id for place, id in enumerate(ids(row))]


def models():
    """Of each variant that EIFY/fairseq lacks: the function of its weights and a text to logits."""
    made = {
        f"causal-{position}": functools.partial(causal.logits, position, HEADS)
        for position in causal.POSITIONS
    }
    made["modern"] = functools.partial(modern.logits, HEADS)
    for model in characters.MODELS:
        made[model] = functools.partial(characters.logits, model, HEADS)
    for name in albert.SHARING:
        made[name] = functools.partial(albert.logits, name, HEADS, LAYERS)
    return made


def figures(shapes, logits_of):
    """Of a model: the loss in nats, some logits, and the norm of each gradient.

    Every parameter is read under its name by the formulas: one that they lack, or have beside
    these, is an error.
    """
    weights = {
        name: torch.tensor(weight(name, shape), requires_grad=True)
        for name, shape in shapes.items()
    }
    loss, logits = 0.0, []
    for row in range(len(LENGTHS)):
        answer = logits_of(weights, inputs(row))
        for place in hidden(row):
            loss = loss - answer[place].log_softmax(0)[ids(row)[place]]
            logits.append(answer[place])
    loss.backward()
    return {
        "loss": loss.item(),
        "first_logits": logits[0][:8].tolist(),
        "last_logits": logits[-1][-8:].tolist(),
        "gradient_norms": {name: w.grad.norm().item() for name, w in weights.items()},
    }

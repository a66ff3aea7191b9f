"""Figures of models, against which test_golden.py holds the code.

Every figure follows from formulas that are written out here, beside this file or in test_parity.py,
in fp64 and without the code under test, nor torch's generator: weights and inputs are formulas as
well. So they are the same on every machine up to the last digits, also where recordings of
EIFY/fairseq are not at hand.
"""

import functools
import math

import numpy as np
import torch

from tests.pretrain.golden import albert, causal, characters, modern
from tests.pretrain.model.test_parity import ENCODER, HEAD, logits_by_formula

VOCABULARY, MASK_ID = 50, 49
LENGTHS = (12, 7)
SIZE, INNER, LAYERS, HEADS, MAX_POSITIONS = 32, 64, 2, 4, 64

BASELINE = {
    "encoder_embed_dim": SIZE,
    "encoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "encoder_learned_pos": True,
    "no_token_positional_embeddings": False,
    "encoder_alibi": False,
    "encoder_alibi_asymmetrical": False,
    "contrastive_pretraining": False,
    "l2norm_embedding": True,
    "no_scale_embedding": True,
    "layernorm_embedding": True,
    "zero_masking": False,
}
ALIBI = {
    "no_token_positional_embeddings": True,
    "encoder_alibi": True,
    "encoder_alibi_asymmetrical": True,
}
CLAP = {"contrastive_pretraining": True, "layernorm_embedding": False}
ZERO = {**CLAP, **ALIBI, "zero_masking": True}
VARIANTS = {
    "baseline": {},
    "sinusoidal": {"encoder_learned_pos": False},
    "alibi": ALIBI,
    "alibi-symmetric": {**ALIBI, "encoder_alibi_asymmetrical": False},
    "learned-clap": CLAP,
    "learned-clap-unnormalized": {**CLAP, "l2norm_embedding": False},
    "alibi-clap": {**CLAP, **ALIBI},
    "zero-clap": {**ZERO, "no_scale_embedding": False},
    "zero-clap-unscaled": ZERO,
    "zero-clap-unscaled-unnormalized": {**ZERO, "l2norm_embedding": False},
    "zero-clap-unscaled-no-dropout": ZERO,
}
"""In EIFY/fairseq's names; the published variants, and what was tried beside them."""


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


def shapes(settings):
    """Every parameter by its name in a model folder."""
    table = {"encoder.embeddings.tokens.weight": (VOCABULARY - settings["zero_masking"], SIZE)}
    if settings["encoder_learned_pos"] and not settings["no_token_positional_embeddings"]:
        table["encoder.embeddings.positions.table.weight"] = (MAX_POSITIONS + 2, SIZE)

    def add(name, *shape):
        table[f"{name}.weight"], table[f"{name}.bias"] = shape, shape[:1]

    if settings["layernorm_embedding"]:
        add("encoder.embeddings.norm", SIZE)
    for layer in (f"encoder.layers.{number}." for number in range(LAYERS)):
        add(layer + "attention.query_key_value", 3 * SIZE, SIZE)
        add(layer + "attention.output", SIZE, SIZE)
        add(layer + "attention_norm", SIZE)
        add(layer + "expand", INNER, SIZE)
        add(layer + "contract", SIZE, INNER)
        add(layer + "output_norm", SIZE)
    if settings["contrastive_pretraining"]:
        table["head.beta"] = (1,)
    else:
        add("head.dense", SIZE, SIZE)
        add("head.norm", SIZE)
        table["head.bias"] = table["encoder.embeddings.tokens.weight"][:1]
    return table


def causal_shapes(position):
    """Every parameter of a causal model."""
    settings = {"no_token_positional_embeddings": position != "learned"}
    table = shapes({**BASELINE, **settings, "layernorm_embedding": False})
    table = {name: shape for name, shape in table.items() if not name.startswith("head.")}
    if position == "t5-bias":
        table["encoder.score_bias.table.weight"] = (32, HEADS)
    return table


def character_shapes(model):
    """Every parameter of a model of characters; it has a layer between the first and the last."""
    variant, _, position = model.partition(" ")
    table = causal_shapes(position or "learned")
    table |= {name.replace("layers.1.", "layers.2."): shape for name, shape in table.items()}
    if not position:
        table["encoder.embeddings.positions.table.weight"] = (MAX_POSITIONS, SIZE)
    if variant == "char-perceiver":
        table["encoder.basis"] = (characters.LATENTS, SIZE)
    norm = {f"encoder.final_norm.{part}": (SIZE,) for part in ("weight", "bias")}
    return table | norm | {"head.weight": (VOCABULARY, SIZE)}


def modern_shapes():
    """Every parameter of the variant `modern`."""
    settings = {**BASELINE, "no_token_positional_embeddings": True}
    table = {
        name: shape
        for name, shape in shapes(settings).items()
        if not name.endswith(".bias") or name == "head.bias"
    }
    expand = {f"encoder.layers.{n}.expand.weight": (2 * INNER, SIZE) for n in range(LAYERS)}
    return table | expand | {"encoder.final_norm.weight": (SIZE,)}


def albert_shapes(name):
    """Every parameter of an ALBERT."""
    size, attention, feed_forward = albert.EMBEDDING_SIZE, *map(set, albert.owners(name, LAYERS))
    own = [f"encoder.layers.{n}.{part}." for n in attention for part in albert.ATTENTION]
    own += [f"encoder.layers.{n}.{part}." for n in feed_forward for part in albert.FEED_FORWARD]
    result = {}
    for parameter, shape in shapes(BASELINE).items():
        if parameter.startswith("encoder.embeddings."):
            result[parameter] = (*shape[:-1], size)
        elif not parameter.startswith("encoder.layers.") or parameter.startswith(tuple(own)):
            result[parameter] = shape
    return result | {
        "encoder.embeddings.segments.weight": (2, size),
        "encoder.embeddings.positions.table.weight": (MAX_POSITIONS, size),
        "encoder.embeddings.projection.weight": (SIZE, size),
        "encoder.embeddings.projection.bias": (SIZE,),
        "head.dense.weight": (size, SIZE),
        **{f"head.{part}": (size,) for part in ("dense.bias", "norm.weight", "norm.bias")},
    }


RENAMED = [
    ("encoder.embeddings.tokens", ENCODER + "embed_tokens"),
    ("encoder.embeddings.positions.table", ENCODER + "embed_positions"),
    ("encoder.embeddings.norm", ENCODER + "layernorm_embedding"),
    ("encoder.layers.", ENCODER + "layers."),
    ("attention.output", "self_attn.out_proj"),
    ("attention_norm", "self_attn_layer_norm"),
    ("expand", "fc1"),
    ("contract", "fc2"),
    ("output_norm", "final_layer_norm"),
    ("head.norm", HEAD + "layer_norm"),
    ("head.", HEAD),
]


def in_their_names(weights):
    """The weights under the names of EIFY/fairseq, with query, key and value apart."""
    result = {}
    for name, tensor in weights.items():
        theirs = name
        for ours, other in RENAMED:
            theirs = other + theirs.removeprefix(ours) if theirs.startswith(ours) else theirs
        for ours, other in RENAMED[4:9]:
            theirs = theirs.replace(f".{ours}.", f".{other}.")
        if "query_key_value" in name:
            for part, third in zip("qkv", tensor.split(SIZE), strict=True):
                key = theirs.replace("attention.query_key_value", f"self_attn.{part}_proj")
                result[key] = third
        else:
            result[theirs] = tensor
    return result


def models():
    """Of each variant: its parameters, and the function of them and a text to its logits."""
    made = {}
    for variant, delta in VARIANTS.items():
        settings = {**BASELINE, **delta}

        def logits(weights, input_ids, settings=settings):
            return logits_by_formula(in_their_names(weights), settings, input_ids)

        made[variant] = shapes(settings), logits
    for position in causal.POSITIONS:

        def logits(weights, input_ids, position=position):
            return causal.logits(weights, position, HEADS, input_ids)

        made[f"causal-{position}"] = causal_shapes(position), logits
    made["modern"] = modern_shapes(), functools.partial(modern.logits, HEADS)
    for model in characters.MODELS:
        logits = functools.partial(characters.logits, model, HEADS)
        made[model] = character_shapes(model), logits
    for name in albert.SHARING:

        def logits(weights, input_ids, name=name):
            return albert.logits(weights, name, HEADS, LAYERS, input_ids)

        made[name] = albert_shapes(name), logits
    return made


def figures(parameters, logits_of):
    """Of a model: the loss in nats, some logits, and the norm of each gradient."""
    weights = {
        name: torch.tensor(weight(name, shape), requires_grad=True)
        for name, shape in parameters.items()
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

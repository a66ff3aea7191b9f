"""The model against EIFY/fairseq: its recorded outputs, and its formulas, written out again."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file

from pretrain.config.sections import OptimizerConfig
from pretrain.convert import fairseq
from pretrain.convert.weights import renamed, separated
from pretrain.engine import optimizers
from pretrain.model.language_model import LanguageModel

ENCODER, HEAD = "encoder.sentence_encoder.", "encoder.lm_head."
GRADIENTS = ".grads.safetensors"
FILES = sorted((Path(__file__).parents[2] / "fairseq").glob(f"*{GRADIENTS}"))


@pytest.fixture(params=FILES, ids=lambda path: path.name.split(".")[0])
def recorded(request):
    """Every recording of a language model: its model with us, its tensors, its facts."""
    path = str(request.param).removesuffix(GRADIENTS)
    tensors = load_file(f"{path}.safetensors")
    facts = json.loads(Path(f"{path}.json").read_text())
    theirs = part(tensors, "model.")
    config = fairseq.architecture(facts["model_args"], len(theirs[ENCODER + "embed_tokens.weight"]))
    model = LanguageModel(config).eval()
    model.load_state_dict(fairseq.import_weights(theirs, config))
    gradients = load_file(request.param)
    return model, tensors, facts, fairseq.import_weights(gradients, config)


def part(tensors, prefix):
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def test_logits_loss_and_gradients_are_those_of_eify_fairseq(recorded):
    model, tensors, facts, theirs = recorded
    input_ids = tensors["in.src_tokens"]
    places = tensors["in.masked"].flatten().nonzero()[:, 0]
    logits = model(input_ids, input_ids != 1, places)
    torch.testing.assert_close(logits, tensors["out.masked_logits"], rtol=0, atol=2e-5)
    labels = tensors["in.target"].flatten()[places]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    assert loss.item() == pytest.approx(facts["loss_sum_nats"], abs=1e-4)
    loss.backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.norm()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        # The key biases' gradients are zero but for rounding: measured against all the others.
        scale = max(float(gradient.norm()), 1e-3 * largest)
        assert float((ours[name] - gradient).norm()) <= 1e-4 * scale, name


def test_hidden_states_are_those_of_eify_fairseq_those_of_padding_included(recorded):
    model, tensors, *_ = recorded
    input_ids = tensors["in.src_tokens"]
    features = model.encoder(input_ids, input_ids != 1)
    torch.testing.assert_close(features, tensors["out.features"], rtol=0, atol=2e-5)
    states = model.encoder.hidden_states(input_ids, input_ids != 1)
    assert len(states) == model.config.num_layers + 1
    assert torch.equal(states[-1], features)
    for number, state in enumerate(states):
        torch.testing.assert_close(state, tensors[f"out.hidden.{number}"], rtol=0, atol=2e-5)


def test_three_optimizer_steps_are_those_of_eify_fairseq(golden):
    tensors = load_file(golden / "adam3-baseline.safetensors")
    facts = json.loads((golden / "adam3-baseline.json").read_text())
    before, after = part(tensors, "before."), part(tensors, "after.")
    config = fairseq.architecture(facts["model_args"], len(before[ENCODER + "embed_tokens.weight"]))
    model = LanguageModel(config).eval()
    model.load_state_dict(fairseq.import_weights(before, config))
    settings = OptimizerConfig(
        beta1=facts["betas"][0],
        beta2=facts["betas"][1],
        epsilon=facts["eps"],
        weight_decay=facts["weight_decay"],
    )
    adam = optimizers.build(model, settings)
    input_ids, labels = tensors["in.src_tokens"], tensors["in.target"].flatten()
    places = (labels != 1).nonzero()[:, 0]
    for step, rate in enumerate(facts["lrs"]):
        logits = model(input_ids, input_ids != 1, places)
        loss = F.cross_entropy(logits, labels[places])
        expected = facts["loss_mean_nats_before_each_step"][step]
        assert loss.item() == pytest.approx(expected, abs=2e-5)
        adam.zero_grad()
        loss.backward()
        optimizers.set_step(adam.param_groups, settings, rate, step)
        adam.step()
    for name, expected in fairseq.import_weights(after, config).items():
        weight = model.state_dict()[name]
        if name.endswith("query_key_value.bias"):
            # The keys' gradients are rounding noise, whose sign Adam makes a whole step of.
            (query, _, value), (their_query, _, their_value) = weight.chunk(3), expected.chunk(3)
            weight, expected = torch.cat([query, value]), torch.cat([their_query, their_value])
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5, msg=name)


# --- every combination, against the formulas ----------------------------------------------------


def logits_by_formula(weights, settings, input_ids):
    """EIFY/fairseq's forward pass for one text, written out from its description in loops."""
    table = weights[ENCODER + "embed_tokens.weight"].double()
    clap, length = settings["contrastive_pretraining"], len(input_ids)
    unit = table / table.norm(dim=1, keepdim=True).clamp(min=1e-12)
    rows = unit if clap and settings["l2norm_embedding"] else table
    size = rows.shape[1]
    x = torch.stack([rows[min(i, len(rows) - 1)] for i in input_ids])
    if settings["zero_masking"]:
        x[[i >= len(rows) for i in input_ids]] = 0
    if not settings["no_scale_embedding"]:
        x = x * math.sqrt(size)
    if not settings["no_token_positional_embeddings"]:
        x = x + positions_by_formula(weights, settings, length, size)
    if settings["layernorm_embedding"]:
        x = norm(x, weights, ENCODER + "layernorm_embedding")
    for number in range(settings["encoder_layers"]):
        x = layer_by_formula(x, weights, settings, f"{ENCODER}layers.{number}.")
    if clap:
        return weights[HEAD + "beta"].double() * x @ rows.T
    x = F.gelu(linear(x, weights, HEAD + "dense"))
    return norm(x, weights, HEAD + "layer_norm") @ table.T + weights[HEAD + "bias"].double()


def positions_by_formula(weights, settings, length, size):
    if settings["encoder_learned_pos"]:
        return weights[ENCODER + "embed_positions.weight"].double()[2 : 2 + length]
    half = size // 2
    waves = [(wave, k) for wave in (math.sin, math.cos) for k in range(half)]
    rows = [
        [wave((2 + place) * 10000 ** (-k / (half - 1))) for wave, k in waves]
        for place in range(length)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def layer_by_formula(x, weights, settings, prefix):
    heads, length = settings["encoder_attention_heads"], len(x)
    query, key, value = (linear(x, weights, f"{prefix}self_attn.{part}_proj") for part in "qkv")
    size = x.shape[1] // heads
    mixed = torch.zeros_like(x)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = query[:, part] @ key[:, part].T / math.sqrt(size)
        if settings["encoder_alibi"]:
            slope = slopes_by_formula(heads)[head]
            for i, j in itertools.product(range(length), range(length)):
                nearer = 0.5 if settings["encoder_alibi_asymmetrical"] and j > i else 0.0
                scores[i, j] -= slope * (abs(i - j) - nearer)
        mixed[:, part] = scores.softmax(dim=1) @ value[:, part]
    x = norm(
        x + linear(mixed, weights, prefix + "self_attn.out_proj"),
        weights,
        prefix + "self_attn_layer_norm",
    )
    inner = linear(F.gelu(linear(x, weights, prefix + "fc1")), weights, prefix + "fc2")
    return norm(x + inner, weights, prefix + "final_layer_norm")


def slopes_by_formula(heads):
    def series(count):
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start ** (number + 1) for number in range(count)]

    if math.log2(heads).is_integer():
        return series(heads)
    power = 2 ** math.floor(math.log2(heads))
    return series(power) + series(2 * power)[0::2][: heads - power]


def linear(x, weights, name):
    return x @ weights[name + ".weight"].double().T + weights[name + ".bias"].double()


def norm(x, weights, name, epsilon=1e-5):
    centred = x - x.mean(dim=1, keepdim=True)
    unit = centred / (centred.square().mean(dim=1, keepdim=True) + epsilon).sqrt()
    return unit * weights[name + ".weight"].double() + weights[name + ".bias"].double()


ALIBI = {"no_token_positional_embeddings": True, "encoder_alibi": True}
POSITIONS = {
    "learned": {},
    "sinusoidal": {"encoder_learned_pos": False},
    "none": {"no_token_positional_embeddings": True},
    "alibi": ALIBI,
    "alibi-offset": {**ALIBI, "encoder_alibi_asymmetrical": True},
}
HEADS = {
    "roberta": {},
    "clap": {"contrastive_pretraining": True},
    "clap-unnormalized": {"contrastive_pretraining": True, "l2norm_embedding": False},
}


@pytest.mark.parametrize("heads", [2, 12])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("embedding_norm", [False, True])
@pytest.mark.parametrize("zero_mask", [False, True])
def test_every_combination_of_settings_computes_those_of_eify_fairseq_formulas(
    position, head, heads, scaled, embedding_norm, zero_mask
):
    settings = {
        **{"encoder_embed_dim": 24, "encoder_layers": 2, "encoder_attention_heads": heads},
        **{"encoder_ffn_embed_dim": 40, "max_positions": 16, "encoder_learned_pos": True},
        **{"no_token_positional_embeddings": False, "encoder_alibi": False},
        **{"encoder_alibi_asymmetrical": False, "contrastive_pretraining": False},
        **{"l2norm_embedding": True, "no_scale_embedding": not scaled},
        **{"layernorm_embedding": embedding_norm, "zero_masking": zero_mask},
        **POSITIONS[position],
        **HEADS[head],
    }
    rows = 30
    torch.manual_seed(0)
    model = LanguageModel(fairseq.architecture(settings, rows)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that norms and biases matter too
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    mask = rows if zero_mask else rows - 1
    input_ids = [0, 7, mask, 12, 12, mask, 29 - zero_mask, 5, 2]
    logits = model(torch.tensor([input_ids]), None, torch.arange(len(input_ids)))
    ours = dict(model.named_parameters())
    parts = renamed(ours, fairseq._MODULES)
    theirs = {name: part.requires_grad_() for name, part in separated(ours, parts).items()}
    expected = logits_by_formula(theirs, settings, input_ids)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=2e-5)
    for each in (logits, expected):
        each.log_softmax(1)[:, 7].sum().backward()
    for name, weight in ours.items():
        gradient = torch.cat([theirs[part].grad.flatten() for part in parts[name]])
        torch.testing.assert_close(weight.grad.flatten(), gradient, rtol=1e-4, atol=1e-4, msg=name)

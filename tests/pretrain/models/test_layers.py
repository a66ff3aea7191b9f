"""What each layer does to its input."""

import math

import pytest
import torch

from data_prep import tokenizer as tokenizers
from data_prep.corpus import Corpus
from pretrain.data.batches import validation_batches
from pretrain.data.sources import SOURCES
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.models.evaluate import validation_objective
from pretrain.models.layers import _summed_changes, layer_changes
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.sentence_pairs import SentencePairsConfig
from pretrain.objectives.tokens import IGNORED

READINGS = {
    "alibi": ("chunked", MaskedLMConfig()),
    "zero-clap": ("complete", MaskedLMConfig()),
    "causal-rotary": ("contiguous", CausalLMConfig()),
    "albert": ("sentence-pairs", SentencePairsConfig()),
}


@pytest.fixture
def reading(corpus_for):
    """`reading(variant)`: a model with random weights, its objective, and its blocks."""

    def made(variant):
        packing, settings = READINGS[variant]
        valid = Corpus(corpus_for(packing), "valid")
        tokenizer = tokenizers.load(valid.folder)
        torch.manual_seed(0)
        heads = {"pair_head": True} if settings.pairs else {}
        model = LanguageModel(presets.build("tiny", variant, tokenizer.vocab_size, heads)).eval()
        objective = validation_objective(model, tokenizer.digest(), valid, settings)
        return model, objective, SOURCES[packing](valid, 64)

    return made


def test_distance_cosine_and_angle_of_known_vectors():
    x = torch.tensor([[1.0, 0.0], [3.0, 4.0], [1.0, 0.0]])
    y = torch.tensor([[0.0, 2.0], [6.0, 8.0], [-1.0, 0.0]])
    found = _summed_changes(x, y).tolist()
    assert found == pytest.approx([math.sqrt(5) + 5 + 2, 0 + 1 - 1, 90 + 0 + 180])


@pytest.mark.parametrize("variant", READINGS)
def test_the_means_are_over_the_tokens_of_the_text_without_masks(reading, variant):
    model, objective, source = reading(variant)
    found = layer_changes(model, objective, source, 5, 2)
    inputs, outputs = [[], []], [[], []]
    for batch in validation_batches(source, objective, 5, 1, 0, 1):
        arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
        ids, segments = arrays["document_ids"], arrays.get("segment_ids")
        used = arrays["labels"] != IGNORED
        if not model.config.causal:
            arrays["input_ids"][0, arrays["target_positions"][used]] = arrays["labels"][used]
        with torch.no_grad():
            states = model.encoder.hidden_states(arrays["input_ids"], ids, segments)
        for layer in range(2):
            inputs[layer].append(states[layer][0, : batch.tokens])
            outputs[layer].append(states[layer + 1][0, : batch.tokens])
    assert (found.length, found.blocks) == (64, 5)
    for layer, change in enumerate(found.layers):
        x, y = torch.cat(inputs[layer]), torch.cat(outputs[layer])
        assert found.tokens == len(x)
        cosine = (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1))
        assert change.distance == pytest.approx(float((y - x).norm(dim=1).mean()), rel=1e-5)
        assert change.cosine == pytest.approx(float(cosine.mean()), abs=1e-5)
        assert change.degrees == pytest.approx(float(cosine.acos().rad2deg().mean()), abs=0.05)


def test_a_layer_that_adds_nothing_leaves_its_input(reading):
    model, objective, source = reading("causal-rotary")
    with torch.no_grad():
        for part in (model.encoder.layers[1].attention.output, model.encoder.layers[1].contract):
            part.weight.zero_()
            part.bias.zero_()
    first, second = layer_changes(model, objective, source, 3).layers
    assert first.distance > 0.01
    assert first.degrees > 1
    assert (second.distance, second.cosine) == (0, pytest.approx(1))
    assert second.degrees == pytest.approx(0, abs=1e-3)

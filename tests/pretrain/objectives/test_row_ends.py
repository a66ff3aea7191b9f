"""Rows that end at random, for models whose latents are the last tokens of a row."""

import numpy as np
import pytest
import torch

from data_prep.tokenizer import Tokenizer
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.base import Block
from pretrain.objectives.causal import CausalLM, CausalLMConfig
from pretrain.objectives.row_ends import end_rows
from pretrain.objectives.tokens import IGNORED

LATENTS, LENGTH, VOCABULARY = 8, 24, 50
OBJECTIVE = CausalLM(CausalLMConfig(), VOCABULARY)


def text(size, seed=0):
    ids = np.random.default_rng(seed).integers(4, VOCABULARY, LENGTH)[:size]
    return np.concatenate([[Tokenizer.bos_id], ids[1:]])


def rows(texts, keys, latents=LATENTS):
    arrays = OBJECTIVE.collate([Block(ids) for ids in texts], keys, LENGTH)
    return end_rows(arrays, latents, keys)


def predicted(arrays):
    """Row, place that predicts, and label of each target."""
    used = arrays["labels"] != IGNORED
    row, place = np.divmod(arrays["target_positions"][used], LENGTH)
    return list(zip(row.tolist(), place.tolist(), arrays["labels"][used].tolist(), strict=True))


def test_a_rows_end_is_that_of_a_prompt_of_any_length_and_depends_on_its_key_alone():
    keys = [(1, epoch, index) for epoch in range(40) for index in range(40)]
    long, short = (rows([text(size)] * len(keys), keys) for size in (LENGTH, 11))
    assert np.array_equal(long["document_ids"], short["document_ids"])
    ends = long["document_ids"].sum(axis=1)
    values, counts = np.unique(ends, return_counts=True)
    assert values.tolist() == list(range(LATENTS, LENGTH + 1))
    expected = np.array([LATENTS, *[1] * (LENGTH - LATENTS)]) / LENGTH
    assert abs(counts / len(keys) - expected).max() < 0.04
    assert rows([text(LENGTH)], [keys[7]])["document_ids"].sum() == ends[7]


def test_the_last_latents_before_the_end_predict_and_no_other_token():
    keys = [(1, 0, index) for index in range(200)]
    sizes = [2 + index % (LENGTH - 1) for index in range(200)]
    texts = [text(size, seed) for seed, size in enumerate(sizes)]
    arrays = rows(texts, keys)
    expected = [
        (row, place, int(ids[place + 1]))
        for row, (ids, end) in enumerate(
            zip(texts, arrays["document_ids"].sum(axis=1).tolist(), strict=True)
        )
        for place in range(max(0, end - LATENTS), min(end, len(ids) - 1))
    ]
    assert predicted(arrays) == expected
    assert {place for _, place, _ in expected} == set(range(LENGTH - 1))


def test_rows_of_at_most_as_many_tokens_as_latents_stay_as_they_are():
    keys = [(1, 0, 0), (1, 0, 1)]
    texts = [text(LENGTH), text(5)]
    whole = OBJECTIVE.collate([Block(ids) for ids in texts], keys, LENGTH)
    for name, array in rows(texts, keys, latents=LENGTH).items():
        assert np.array_equal(array, whole[name])


@pytest.mark.parametrize("position", ["learned", "rotary", "alibi"])
def test_no_prediction_tells_how_many_tokens_follow(position):
    """A text and its beginning have the same logits at the same places."""
    torch.manual_seed(0)
    fields = {"position": position, "latents": LATENTS, "dropout": 0.0, "attention_dropout": 0.0}
    config = presets.build("tiny", "char-perceiver-ar", VOCABULARY, fields)
    assert config.last_latents == LATENTS
    model = LanguageModel(config).eval()

    def logits(size):
        keys = [(1, 0, index) for index in range(40)]
        arrays = rows([text(size)] * len(keys), keys)
        given = [torch.from_numpy(arrays[name]) for name in ("input_ids", "document_ids")]
        with torch.no_grad():
            found = model(*given, torch.from_numpy(arrays["target_positions"]))
        used = arrays["labels"] != IGNORED
        places = [(row, place) for row, place, _ in predicted(arrays)]
        return dict(zip(places, found[torch.from_numpy(used)], strict=True))

    whole, beginning = logits(LENGTH), logits(14)
    assert len(beginning) > 200
    for place, numbers in beginning.items():
        torch.testing.assert_close(numbers, whole[place], rtol=0, atol=1e-5)

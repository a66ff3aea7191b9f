"""Which tokens are hidden, and the loss on them."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pretrain.objectives.base import Block, Vocabulary
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig, word_starts_of
from pretrain.objectives.tokens import FIRST_WORD_ID, PAD_ID

MASK_ID, END = 999, 900


def objective(probability=0.15, keep=0.1, random=0.1):
    return MaskedLM(MaskedLMConfig(probability, keep, random), MASK_ID, END)


def block(length, seed=0):
    return np.random.default_rng(seed).integers(4, END, length)


def test_replacements_are_drawn_evenly_and_are_never_special_tokens():
    words = []
    for key in range(400):
        masked, positions = objective(1.0, 0.0, 1.0).mask(np.full(500, 2), (0, 0, key))
        words.append(masked[positions])
    counts = np.bincount(np.concatenate(words), minlength=1000)
    assert counts[:FIRST_WORD_ID].sum() == counts[END:].sum() == 0
    expected = 200_000 / (END - FIRST_WORD_ID)
    assert abs(counts[FIRST_WORD_ID:END] - expected).max() < 6 * expected**0.5


@pytest.mark.parametrize("probability", [0.15, 1 / 3, 1.0])
def test_capacity_is_never_exceeded_and_sometimes_reached(probability):
    """Law 4: a fixed-capacity head never drops a token."""
    masked_lm = objective(probability)
    for length in range(1, 260):
        counts = [len(masked_lm.mask(block(length), (2, 0, key))[1]) for key in range(4)]
        assert max(counts) <= masked_lm.capacity(length)
        assert min(counts) >= int(probability * length)
    many = {len(masked_lm.mask(block(103), (3, 0, key))[1]) for key in range(300)}
    assert max(many) == masked_lm.capacity(103)


def test_capacity_holds_when_rounding_would_carry_over(monkeypatch):
    """100 * .15 + the largest number below 1 is 16 in floating point."""
    largest = np.nextafter(1.0, 0.0)
    assert int(0.15 * 100 + largest) == 16

    class Unlucky(np.random.RandomState):
        def random_sample(self, size=None):
            return largest if size is None else super().random_sample(size)

    monkeypatch.setattr(np.random, "RandomState", Unlucky)
    assert len(objective().mask(block(100), (1, 0, 0))[1]) <= objective().capacity(100) == 15


@pytest.mark.parametrize(("case", "end"), [("omit0", 1005), ("omit1", 1004)])
@pytest.mark.parametrize("epoch", [1, 2])
def test_with_fairseq_s_generator_the_hidden_tokens_are_those_of_fairseq(case, end, epoch, golden):
    """With a `<mask>` row (omit0), which may be drawn as a random token, and without."""
    tensors = load_file(golden / "masking.safetensors")
    masked_lm = MaskedLM(MaskedLMConfig(), 1004, end)
    for number in range(4):
        ids = tensors[f"{case}.item{number}"]
        seed = int(hash((1, epoch, number)) % 1e6)
        hidden, positions = masked_lm.hide(ids, np.random.RandomState(seed))
        targets = np.full_like(ids, PAD_ID)
        targets[positions] = ids[positions]
        assert np.array_equal(hidden, tensors[f"{case}.ep{epoch}.src{number}"])
        assert np.array_equal(targets, tensors[f"{case}.ep{epoch}.tgt{number}"])


SETTINGS = {
    "published": {},
    "masks alone": {"keep_probability": 0.0, "random_probability": 0.0},
    "no masks": {"keep_probability": 0.5, "random_probability": 0.5},
    "many": {"probability": 0.4, "keep_probability": 0.0},
    "self-masking": {"keep_probability": 0.0, "random_probability": 0.0, "targets": "all"},
}


def test_hidden_tokens_stay_whatever_the_version_of_numpy():
    """The digest is that of what the formulas of `hide`, written out in plain Python, gave."""
    hidden = {name: {} for name in SETTINGS}
    for name, settings in SETTINGS.items():
        masked_lm = MaskedLM(MaskedLMConfig(**settings), 100, 100)
        for key in ((1, 0, 0), (1, 0, 7), (2, 3, 7)):
            words = [4 + (5 * n * n + 3 * n + 17 * sum(key)) % 96 for n in range(38)]
            ids, places = masked_lm.mask(np.array([0, *words, 2]), key)
            hidden[name][str([*key])] = {"ids": ids.tolist(), "places": places.tolist()}
    digest = hashlib.blake2b(json.dumps(hidden).encode(), digest_size=8).hexdigest()
    assert digest == "263b5d56a27ea76a"


def test_self_masking_hides_tokens_independently_and_predicts_all():
    masked_lm = MaskedLM(MaskedLMConfig(0.15, 0.0, 0.0, "all"), MASK_ID, END)
    hidden = 0
    for key in range(500):
        ids = block(400, seed=key)
        masked, positions = masked_lm.mask(ids, (1, 0, key))
        assert positions.tolist() == list(range(400))
        assert ((masked == ids) | (masked == MASK_ID)).all()
        hidden += int((masked == MASK_ID).sum())
    assert abs(hidden - 30_000) < 5 * (200_000 * 0.15 * 0.85) ** 0.5
    arrays = masked_lm.collate([Block(block(40)), Block(block(5))], [(1, 0, 0), (1, 0, 1)], 40)
    assert masked_lm.targets(arrays) == (45,)


def ngrams(probability, longest=3, starts=None):
    settings = MaskedLMConfig(probability, 0.0, 0.0, longest_ngram=longest)
    return MaskedLM(settings, MASK_ID, END, np.ones(1000, dtype=bool) if starts is None else starts)


@pytest.mark.parametrize("longest", [2, 3, 4])
def test_runs_of_n_words_have_a_probability_proportional_to_1_over_n(longest):
    """Where the budget does not bind, and few overlap: a hundred words between two hidden runs."""
    counts = np.zeros(longest + 1)
    for key in range(40):
        _, positions = ngrams(0.01, longest).mask(block(20_000), (1, 0, key))
        runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
        counts += np.bincount([len(run) for run in runs], minlength=50)[: longest + 1]
    shares = 1 / np.arange(1, longest + 1)
    expected = shares / shares.sum()
    assert counts[1:] / counts.sum() == pytest.approx(expected, abs=0.02)
    if longest == 3:
        assert expected == pytest.approx([6 / 11, 3 / 11, 2 / 11])


def test_n_grams_are_whole_words_within_the_probability_and_never_special_tokens():
    starts = np.arange(1000) % 3 == 0  # every third id begins a word
    hidden = tokens = 0
    for key in range(300):
        ids = block(150, seed=key)
        ids[[0, 50, 51, 149]] = 0, 2, 0, 2
        ids[100:103] = 3, MASK_ID, 5  # a special id that the text has, and the rest of a word
        masked_lm = ngrams(0.15, starts=starts)
        masked, positions = masked_lm.mask(ids, (1, 0, key))
        special = (ids < FIRST_WORD_ID) | (ids == MASK_ID)
        assert not special[positions].any()
        begins = starts[ids] | special | np.append(True, special[:-1])
        word, chosen = np.cumsum(begins), np.isin(np.arange(150), positions)
        for number in np.unique(word):
            assert len(set(chosen[word == number])) == 1
        assert (masked[positions] == MASK_ID).all()
        assert len(positions) <= masked_lm.capacity(150)
        hidden, tokens = hidden + len(positions), tokens + 150
    assert 0.14 < hidden / tokens < 0.15


def test_a_text_of_special_tokens_has_nothing_to_hide():
    for ids in (np.array([0, 2]), np.array([0]), np.array([0, 2, 0, 2, 3])):
        assert ngrams(1.0).mask(ids, (1, 0, 0))[1].tolist() == []


def test_n_grams_are_refused_where_every_token_is_a_target():
    with pytest.raises(ValueError, match="longest_ngram: 3.*objective.targets=masked"):
        MaskedLMConfig(targets="all", longest_ngram=3)


def test_a_word_begins_with_white_space(corpus):
    from data_prep.tokenizer import load

    tokenizer = load(corpus)
    starts = word_starts_of(tokenizer)
    assert len(starts) == tokenizer.vocab_size
    assert starts[:4].all()
    assert starts[tokenizer.mask_id]
    (ids,) = tokenizer.encode_batch(["the statement"])
    words = np.cumsum(starts[ids])
    assert words[-1] - words[0] == 1
    assert tokenizer.decode(ids[words > words[0]]) == " statement"


@pytest.mark.parametrize("settings", [MaskedLMConfig(0.4), MaskedLMConfig(0.15, 0.0, 0.0, "all")])
def test_validation_hides_the_same_tokens_whatever_training_hides(settings):
    vocabulary = Vocabulary(MASK_ID + 1, END, Path())
    arrays = [
        chosen.build(vocabulary).collate([Block(block(100))], [(0, 0, 7)], 100)
        for chosen in (MaskedLMConfig(), settings.for_validation())
    ]
    assert all(np.array_equal(arrays[0][name], arrays[1][name]) for name in arrays[0])

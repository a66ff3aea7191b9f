"""Span corruption: how much of a text is read, and which span of it is moved."""

from pathlib import Path

import numpy as np
import pytest

from data_prep.tokenizer import load, train_characters
from pretrain.inference.evaluate import check_lengths
from pretrain.objectives.base import Block, Vocabulary
from pretrain.objectives.spans import SpanCorruptionConfig, SpanCorruptionLM, Words
from pretrain.objectives.tokens import DocumentObjective

MASK_ID, LENGTH = 999, 64


def objective(**settings):
    return SpanCorruptionLM(SpanCorruptionConfig(**settings), MASK_ID, MASK_ID)


def block(size, *, ends=True):
    """`<s>`, a text of different ids, and `</s>`, unless the text goes on."""
    return Block(np.array([0, *range(4, 4 + size), *[2] * ends]))


def parts_of(ids):
    """Prefix, suffix and span of a row; the form is checked."""
    assert ids[0] == 0
    marks = np.flatnonzero(ids == MASK_ID)
    assert len(marks) == 3
    assert marks[-1] == len(ids) - 1
    return ids[1 : marks[0]], ids[marks[0] + 1 : marks[1]], ids[marks[1] + 1 : -1]


def draws(size, count, **settings):
    """(tokens read, tokens of the span, first token of the span) of so many draws, [count, 3]."""
    found = []
    for index in range(count):
        row = objective(**settings).rearranged(block(size), (1, 0, index), LENGTH)
        prefix, suffix, span = parts_of(row.ids)
        text = np.concatenate([prefix, span, suffix])
        assert text.tolist() == list(range(4, 4 + len(text)))
        found.append((len(text), len(span), len(prefix)))
    return np.array(found)


def assert_even(counts):
    """Within five standard deviations of a draw where all have the same probability."""
    expected = counts.sum() / len(counts)
    assert abs(counts - expected).max() < 5 * expected**0.5


def test_a_text_is_cut_to_every_length_from_4_to_seven_eighths_of_the_block_evenly():
    read = draws(LENGTH - 2, 5300)[:, 0]
    counts = np.bincount(read)
    assert (counts[:4] == 0).all()
    assert len(counts) == 56 + 1
    assert_even(counts[4:])


def test_a_text_that_is_shorter_than_the_length_drawn_stays_whole():
    read = draws(20, 3000)[:, 0]
    counts = np.bincount(read)
    assert (counts[:4] == 0).all()
    assert len(counts) == 20 + 1
    assert_even(counts[4:20])
    whole = 37 / 53  # of the lengths 4 to 56, 20 to 56
    assert abs(counts[20] - 3000 * whole) < 5 * (3000 * whole * (1 - whole)) ** 0.5


@pytest.mark.parametrize("size", [0, 1, 5, 60, 61])
def test_without_truncation_as_much_is_read_as_fits(size):
    assert set(draws(size, 20, truncate=False)[:, 0]) == {min(size, 60)}


@pytest.mark.parametrize("size", [1, 3, 4, 7, 60])
def test_the_mean_share_of_the_span_is_exact_for_every_length(size):
    """Within five standard errors of 1000 draws."""
    spans = draws(size, 1000, truncate=False)[:, 1]
    mean = size / 4
    assert abs(spans.mean() - mean) <= 5 * spans.std() / 1000**0.5
    if mean < 1:
        assert set(spans) == {0, 1}
    else:
        assert set(spans) == set(range(1, int(np.ceil(2 * mean - 1)) + 1))


def test_a_span_begins_at_every_place_evenly():
    _, spans, first = draws(16, 6000, truncate=False).T
    for size in (2, 4, 6):
        counts = np.bincount(first[spans == size])
        assert len(counts) == 16 - size + 1
        assert_even(counts)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("size", range(6))
def test_the_shortest_texts_are_read_whole_without_the_end_of_the_document(size, ends):
    for index in range(50):
        row = objective().rearranged(block(size, ends=ends), (1, 0, index), LENGTH)
        prefix, suffix, span = parts_of(row.ids)
        text = np.concatenate([prefix, span, suffix])
        assert min(size, 4) <= len(text) <= size
        assert text.tolist() == list(range(4, 4 + len(text)))
        assert len(row.ids) == len(text) + 4


TEXT = "Ann Lee. Born in Graz , Ann  Lee (a painter) died in Linz."


def words_of(tokenizer, text):
    """The objective that moves whole words, and the ids of a text."""
    [ids] = tokenizer.encode_batch([text])
    settings = SpanCorruptionConfig(truncate=False, whole_words=True)
    built = SpanCorruptionLM(settings, MASK_ID, MASK_ID, Words.of(tokenizer))
    return built, Block(np.concatenate([[0], ids, [2]]).astype(np.int64))


@pytest.mark.parametrize("kind", ["characters", "byte pairs"])
def test_whole_words_are_moved_and_their_mean_share_is_about_a_quarter(kind, corpus):
    """Spaces of a vocabulary of characters stay in the text; byte pairs hold theirs."""
    characters = kind == "characters"
    tokenizer = train_characters([TEXT]) if characters else load(corpus)
    built, read = words_of(tokenizer, TEXT)
    words, shares, spans = set(TEXT.split()), [], set()
    for index in range(800):
        row = built.rearranged(read, (1, 0, index), 128)
        prefix, suffix, span = (tokenizer.decode(part.tolist()) for part in parts_of(row.ids))
        assert prefix + span + suffix == TEXT
        assert set(span.split()) <= words
        assert not characters or span == span.strip()
        assert prefix.strip().split() + span.split() + suffix.strip().split() == TEXT.split()
        spans.add(span.strip())
        shares.append(len(span) / len(TEXT))
    assert words <= spans
    assert "in Graz" in spans
    assert abs(np.mean(shares) - 0.25) < 0.05


@pytest.mark.parametrize(
    ("text", "spans"), [("Linz", {"Linz"}), (" Linz ", {"Linz"}), ("   ", {"", " "}), ("", {""})]
)
def test_texts_of_one_word_or_none_are_whole_spans_or_go_as_they_were(text, spans):
    tokenizer = train_characters(["Linz a"])
    built, read = words_of(tokenizer, text)
    found = set()
    for index in range(50):
        prefix, suffix, span = parts_of(built.rearranged(read, (1, 0, index), LENGTH).ids)
        assert tokenizer.decode([*prefix, *span, *suffix]) == text
        found.add(tokenizer.decode(span.tolist()))
    assert found <= spans


def test_the_ends_of_a_span_go_to_the_nearest_ends_of_words():
    tokenizer = train_characters([TEXT])
    words, [ids] = Words.of(tokenizer), tokenizer.encode_batch(["ab cde  f"])
    moved = {(0, 1): (0, 2), (1, 4): (0, 2), (2, 5): (3, 6), (4, 9): (3, 9), (6, 7): (8, 9)}
    for span, expected in moved.items():
        assert words.nearest(ids, *span) == expected


def test_the_draw_depends_on_seed_epoch_and_block_only():
    blocks = [block(40 + number) for number in range(6)]
    keys = [(1, 0, number) for number in range(6)]
    together = objective().collate(blocks, keys, LENGTH)
    for row in (5, 0, 3):
        alone = objective().collate(blocks[row : row + 1], keys[row : row + 1], LENGTH)
        assert np.array_equal(together["input_ids"][row], alone["input_ids"][0])
    keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)]
    rows = [objective().rearranged(blocks[5], key, LENGTH).ids for key in keys]
    assert len({tuple(row) for row in rows}) == 5
    assert blocks[5].ids.tolist() == block(45).ids.tolist()


def test_the_subsets_of_tokens_move_with_them():
    read = block(40)
    subsets = np.append(0, np.arange(41) // 5)
    for index in range(20):
        row = objective().rearranged(Block(read.ids, subsets=subsets), (1, 0, index), LENGTH)
        words = row.ids != MASK_ID
        assert row.subsets[words].tolist() == subsets[np.maximum(row.ids[words] - 3, 0)].tolist()


def test_a_block_of_25_is_the_shortest_that_has_room():
    lengths = [len(objective().rearranged(block(30), (1, 0, n), 25).ids) for n in range(300)]
    assert max(lengths) == 25
    with pytest.raises(ValueError, match="data.sequence_length 24: accepted .* 25 or more"):
        objective().collate([block(20)], [(1, 0, 0)], 24)


def test_a_model_without_a_vector_of_the_mask_is_refused():
    with pytest.raises(ValueError, match="predicts <mask>.*mask_embedding=row"):
        SpanCorruptionConfig().build(Vocabulary(10, 9, Path()))


def test_whole_documents_are_not_measured():
    """Their targets cannot be drawn before they are cut into windows."""
    assert not isinstance(objective(), DocumentObjective)
    with pytest.raises(ValueError, match="'span-corruption' cannot draw .* without --lengths"):
        check_lengths(objective(), None, None, [], [64], one_text=False)


def test_validation_reads_the_default_lengths_whatever_training_reads():
    of_words = SpanCorruptionConfig(truncate=False, whole_words=True)
    assert of_words.for_validation() == SpanCorruptionConfig()
    plain = SpanCorruptionConfig().description
    assert plain == "every token predicted, a span of 25 % moved to the end"
    assert "a span of 25 % in whole words moved" in of_words.description

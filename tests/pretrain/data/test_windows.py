"""Windows of texts: the same targets at every length."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep.tokenizer import Tokenizer
from pretrain.data.batches import validation_key
from pretrain.data.windows import Windows
from pretrain.objectives.base import Vocabulary
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.objectives.tokens import FIRST_WORD_ID, IGNORED

LENGTHS = [3, 300, 5, 1, 64, 40, 63, 127, 2]
TOKENS = sum(LENGTHS)
VOCABULARY = FIRST_WORD_ID + TOKENS + 1


@pytest.fixture
def split():
    """Documents whose ids occur once in the split, so that an id says where it stands."""
    return split_of(LENGTHS)


def split_of(lengths):
    ids = FIRST_WORD_ID + np.arange(sum(lengths), dtype=np.uint16)
    return SimpleNamespace(
        document=np.split(ids, np.cumsum(lengths)[:-1]).__getitem__,
        lengths=np.array(lengths, dtype=np.int32),
        subsets=np.arange(len(lengths), dtype=np.uint8) % 3,
    )


def objective(**settings):
    return MaskedLM(MaskedLMConfig(**settings), VOCABULARY - 1, VOCABULARY)


def causal_objective():
    return CausalLMConfig().build(Vocabulary(VOCABULARY, VOCABULARY, None))


def windows_of(split, length, stride=None, one_text=False):
    return Windows(split, range(len(split.lengths)), length, stride or length, one_text)


def batches_of(split, length, rows, chosen=None, **reading):
    batches = windows_of(split, length, **reading).batches(chosen or objective(), rows)
    return [batch.arrays for batch in batches]


def targets_of(batches):
    """(id, subset, what the model reads in its place) of every target: with an id, its place."""
    found = []
    for arrays in batches:
        used = arrays["labels"] != IGNORED
        read = arrays["input_ids"].ravel()[arrays["target_positions"]]
        columns = arrays["labels"][used], arrays["subsets"][used], read[used]
        found += zip(*(column.tolist() for column in columns), strict=True)
    return sorted(found)


@pytest.mark.parametrize("settings", [{}, {"targets": "all"}])
def test_every_length_and_batch_size_has_the_same_targets(split, settings):
    expected = []
    for document, subset in enumerate(split.subsets.tolist()):
        ids = split.document(document).astype(np.int64)
        read, positions = objective(**settings).mask(ids, validation_key(document))
        expected += [(ids[at], subset, read[at]) for at in positions.tolist()]
    assert len(expected) == pytest.approx(TOKENS * (1 if settings else 0.15), abs=len(LENGTHS))
    for length in (2, 3, 17, 64, 128, 301, 1000):
        for rows in (1, 50):
            for reading in ({}, {"one_text": True}, {"stride": 1 + length // 3}):
                batches = batches_of(split, length, rows, objective(**settings), **reading)
                assert targets_of(batches) == sorted(expected), (length, rows, reading)


def test_short_documents_share_rows(split):
    full = batches_of(split, 64, 4)
    rows = sum(len(arrays["input_ids"]) for arrays in full)
    assert rows < len(windows_of(split, 64))
    assert any(arrays["document_ids"].max() > 1 for arrays in full)


@pytest.mark.parametrize("one_text", [False, True])
def test_documents_are_read_as_they_are_needed(split, one_text):
    """Memory grows with the window and the document, not with the corpus."""
    read = []
    whole = split.document
    split.document = lambda index: read.append(index) or whole(index)
    next(windows_of(split, 64, one_text=one_text).batches(objective(), 2))
    assert read == [0, 1]


def test_memory_does_not_grow_with_the_corpus():
    def peak(documents):
        split = SimpleNamespace(
            document=lambda index: np.full(500, FIRST_WORD_ID, dtype=np.uint16),
            lengths=np.full(documents, 500, dtype=np.int32),
            subsets=np.zeros(documents, dtype=np.uint8),
        )
        tracemalloc.start()
        for _ in windows_of(split, 300, 200, one_text=True).batches(causal_objective(), 4):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(160) < 1.1 * peak(20) < 500_000


def windows_with_targets(batches):
    """(tokens, targets) of every window, read from the arrays of a causal objective."""
    for arrays in batches:
        ids, used = arrays["input_ids"], arrays["labels"] != IGNORED
        target = np.zeros(ids.size, dtype=bool)
        target[arrays["target_positions"][used] + 1] = True
        rows = zip(ids, arrays["document_ids"].astype(int), target.reshape(ids.shape), strict=True)
        for row, numbers, targets in rows:
            for number in range(1, numbers.max() + 1):
                mine = numbers == number
                assert row[mine][0] == Tokenizer.bos_id
                yield row[mine][1:].tolist(), row[mine & targets].tolist()


def test_windows_begin_a_stride_apart_and_score_what_no_window_before_them_did():
    draw = np.random.default_rng(0)
    for _ in range(60):
        split = split_of(draw.integers(1, 60, draw.integers(1, 6)).tolist())
        length = int(draw.integers(2, 70))
        stride, one_text = int(draw.integers(1, length + 1)), bool(draw.integers(2))
        windows = windows_of(split, length, stride, one_text)
        rows = int(draw.integers(1, 4))
        reading = {"stride": stride, "one_text": one_text}
        batches = batches_of(split, length, rows, causal_objective(), **reading)
        assert max(len(arrays["input_ids"]) for arrays in batches) <= rows
        found = list(windows_with_targets(batches))
        expected = []
        ends = np.cumsum(split.lengths)
        texts = [(0, ends[-1])] if one_text else list(zip(ends - split.lengths, ends, strict=True))
        for begin, end in texts:
            scored, first = begin, begin
            while scored < end:
                last = min(first + length - 1, end)
                ids = FIRST_WORD_ID + np.arange(first, last)
                expected.append((ids.tolist(), ids[scored - first :].tolist()))
                assert scored in (begin, last) or scored - first >= length - 1 - stride
                scored, first = last, first + min(stride, length - 1)
        assert sorted(found) == sorted(expected)
        assert len(windows) == len(found)
        assert windows.ids == sum(len(tokens) + 1 for tokens, _ in found)
        ids = sorted(target for _, targets in found for target in targets)
        assert ids == list(range(FIRST_WORD_ID, FIRST_WORD_ID + int(ends[-1])))

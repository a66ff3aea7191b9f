"""Windows of documents: the same targets at every length."""

from types import SimpleNamespace

import numpy as np
import pytest

from data_prep.tokenizer import Tokenizer
from pretrain.data.batches import validation_key
from pretrain.data.windows import number_of_windows, window_batches
from pretrain.objectives.base import DocumentObjective
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.objectives.tokens import FIRST_WORD_ID, IGNORED
from tests.pretrain.objectives.toy import ToyConfig

LENGTHS = [3, 300, 5, 1, 64, 40, 63, 127, 2]
TOKENS = sum(LENGTHS)
VOCABULARY = FIRST_WORD_ID + TOKENS + 1


@pytest.fixture
def split():
    """Documents whose ids occur once in the split, so that an id says where it stands."""
    ids = FIRST_WORD_ID + np.arange(TOKENS, dtype=np.uint16)
    return SimpleNamespace(
        document=np.split(ids, np.cumsum(LENGTHS)[:-1]).__getitem__,
        lengths=np.array(LENGTHS, dtype=np.int32),
        subsets=np.arange(len(LENGTHS), dtype=np.uint8) % 3,
    )


def objective(**settings):
    return MaskedLM(MaskedLMConfig(**settings), VOCABULARY - 1, VOCABULARY)


def batches_of(split, length, rows, masked_lm=None):
    batches = window_batches(split, masked_lm or objective(), range(len(LENGTHS)), length, rows)
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
        for rows in (1, 2, 50):
            found = targets_of(batches_of(split, length, rows, objective(**settings)))
            assert found == sorted(expected), (length, rows)


@pytest.mark.parametrize("length", [2, 17, 64, 301])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_is_read_once_behind_the_s_of_its_window(split, length, rows):
    # Every token is a target, so the labels say what stands under the masks.
    split_batches = batches_of(split, length, rows, objective(targets="all"))
    document_of = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    seen, windows = [], 0
    for arrays in split_batches:
        ids = arrays["input_ids"].copy()
        assert ids.shape[0] <= rows
        assert ids.shape[1] == length
        used = arrays["labels"] != IGNORED
        ids.ravel()[arrays["target_positions"][used]] = arrays["labels"][used]
        for row, numbers in zip(ids, arrays["document_ids"].astype(int), strict=True):
            for number in range(1, numbers.max() + 1):
                start, *window = row[numbers == number].tolist()
                assert start == Tokenizer.bos_id
                assert window == list(range(window[0], window[0] + len(window)))
                places = np.array(window) - FIRST_WORD_ID
                assert len(set(document_of[places])) == 1
                first = places[0] - np.flatnonzero(document_of == document_of[places[0]])[0]
                assert first % (length - 1) == 0
                seen += window
                windows += 1
    assert sorted(seen) == list(range(FIRST_WORD_ID, FIRST_WORD_ID + TOKENS))
    assert windows == number_of_windows(split, range(len(LENGTHS)), length)


def test_short_documents_share_rows(split):
    full = batches_of(split, 64, 4)
    rows = sum(len(arrays["input_ids"]) for arrays in full)
    assert rows < number_of_windows(split, range(len(LENGTHS)), 64)
    assert any(arrays["document_ids"].max() > 1 for arrays in full)


def test_documents_are_read_as_they_are_needed(split):
    """Memory grows with the window and the document, not with the corpus."""
    read = []
    whole = split.document
    split.document = lambda index: read.append(index) or whole(index)
    next(window_batches(split, objective(), range(len(LENGTHS)), 64, 2))
    assert read == [0, 1]


def test_targets_of_a_block_as_a_whole_are_not_a_document_s(split):
    vocabulary = SimpleNamespace(mask_id=VOCABULARY - 1)
    assert isinstance(objective(), DocumentObjective)
    assert not isinstance(ToyConfig().build(vocabulary), DocumentObjective)

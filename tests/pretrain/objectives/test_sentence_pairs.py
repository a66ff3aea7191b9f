"""Pairs of segments: how they are laid out, and that nothing but the text tells their label."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from pretrain.objectives.base import Block
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.sentence_pairs import SentencePairsConfig, SentencePairsLM, _cut_second
from pretrain.objectives.tokens import IGNORED, PAD_ID

MASK_ID, END, LENGTH = 99_999, 90_000, 48
TASKS = ["sop", "nsp", "none"]


def objective(task="sop", **changed):
    """Nothing is hidden, so that the inputs are the text."""
    masks = {"keep_probability": 1.0, "random_probability": 0.0, **changed}
    return SentencePairsLM(SentencePairsConfig(pair_task=task, **masks), MASK_ID, END)


def block(index, longest=6):
    """Up to eight sentences; sentence n of the block has the ids 100 n + 1000 index + 4 and on."""
    draw = np.random.default_rng([index, 1])
    lengths = draw.integers(1, longest + 1, draw.integers(2, 9))
    starts = 1000 * index + 100 * np.arange(len(lengths)) + 4
    ids = [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    elsewhere = functools.partial(block, index + 40, longest)
    ids = np.concatenate(ids)
    return Block(ids, sentences=lengths, sample_other_document=lambda share: elsewhere())


def pairs(task, count, longest=6, seed=1):
    """(first segment, second segment, label, block) of so many blocks."""
    for index in range(count):
        read = block(index % 40, longest)
        arrays = objective(task).collate([read], [(seed, 0, index)], LENGTH)
        ids, document = arrays["input_ids"][0], arrays["document_ids"][0]
        size = int(document.sum())
        ends = np.flatnonzero(ids == 2)
        assert (ids[0], ends[1], document[:size].all()) == (0, size - 1, True)
        assert (ids[size:] == PAD_ID).all()
        segments = [int(ends[0] < place < size) for place in range(LENGTH)]
        assert arrays["segment_ids"][0].tolist() == segments
        first, second = ids[1 : ends[0]], ids[ends[0] + 1 : ends[1]]
        yield first, second, int(arrays["pair_labels"][0]), read


def test_sentence_order_swaps_half_of_the_pairs_and_loses_no_text():
    labels = []
    for first, second, label, read in pairs("sop", 600, longest=5):
        together = np.concatenate([second, first] if label else [first, second])
        assert together.tolist() == read.ids.tolist()
        assert len(second if label else first) in np.cumsum(read.sentences)[:-1]
        labels.append(label)
    assert np.mean(labels) == pytest.approx(0.5, abs=5 * 0.5 / 600**0.5)


def test_without_a_task_the_segments_stand_in_their_order():
    for first, second, label, read in pairs("none", 100, longest=5):
        assert label == 0
        assert np.concatenate([first, second]).tolist() == read.ids.tolist()


def test_next_sentence_takes_half_of_the_second_segments_from_another_document():
    labels = []
    for first, second, label, read in pairs("nsp", 600, longest=5):
        source = block(int(read.ids[0]) // 1000 + 40, 5) if label else read
        assert first.tolist() == read.ids[: len(first)].tolist()
        at = int(np.flatnonzero(source.ids == second[0])[0])
        assert at in np.cumsum(source.sentences)[:-1]
        assert label or at == len(first)
        assert second.tolist() == source.ids[at : at + len(second)].tolist()
        labels.append(label)
    assert np.mean(labels) == pytest.approx(0.5, abs=5 * 0.5 / 600**0.5)


@pytest.mark.parametrize("task", ["sop", "nsp"])
@pytest.mark.parametrize("longest", [6, 60], ids=["fits", "is cut"])
def test_the_lengths_of_the_segments_do_not_tell_the_label(task, longest):
    """Their distributions agree, by two-sample Kolmogorov-Smirnov statistics."""
    lengths = {0: [], 1: []}
    for first, second, label, _ in pairs(task, 1000, longest):
        assert len(first) + len(second) <= LENGTH - 3
        assert len(first)
        assert len(second)
        lengths[label].append((len(first), len(second)))
    zero, one = (np.array(lengths[label]) for label in (0, 1))
    for column in (np.s_[:, 0], np.s_[:, 1], None):
        a, b = (x.sum(axis=1) if column is None else x[column] for x in (zero, one))
        edges = np.arange(LENGTH + 1)
        shares = [np.searchsorted(np.sort(x), edges, "right") / len(x) for x in (a, b)]
        assert abs(shares[0] - shares[1]).max() < 1.95 * (1 / len(a) + 1 / len(b)) ** 0.5


@pytest.mark.parametrize("longest_ngram", [1, 3])
def test_special_tokens_are_never_hidden(longest_ngram):
    """The pair head reads `<s>`."""
    settings = SentencePairsConfig(probability=0.9, longest_ngram=longest_ngram)
    starts = np.ones(MASK_ID + 1, dtype=bool) if longest_ngram > 1 else None
    blocks, keys = [block(index) for index in range(40)], [(1, 0, index) for index in range(40)]
    arrays = SentencePairsLM(settings, MASK_ID, END, starts).collate(blocks, keys, LENGTH)
    labels = arrays["labels"][arrays["labels"] != IGNORED]
    assert len(labels) > 300
    assert (labels > 3).all()
    assert (arrays["input_ids"][:, 0] == 0).all()


def test_either_second_segment_has_the_same_length_and_ends_within_a_sentence():
    for index in range(300):
        read = block(index, longest=30)
        second = read.ids[read.sentences[0] :]
        cut = [
            _cut_second(read, second, np.random.RandomState(index), other=other)
            for other in (False, True)
        ]
        assert len(cut[0]) == len(cut[1])
        assert len(cut[0]) < len(second) or len(second) == 1


def test_two_long_segments_keep_as_much_in_either_order():
    """Also where the room is odd: the first has one token more, whichever it is."""
    read = Block(np.arange(4, 104), sentences=np.array([60, 40]))
    seen = set()
    for index in range(50):
        arrays = objective().collate([read], [(1, 0, index)], LENGTH)
        ids = arrays["input_ids"][0]
        end = int(np.flatnonzero(ids == 2)[0])
        assert end - 1 == 23  # of 45
        first = ids[1:end]
        assert (np.diff(first) == 1).all()
        seen.add((int(arrays["pair_labels"][0]), int(first[0])))
    # What is cut comes from the front and from the back.
    assert len(seen) > 10


def test_the_segments_meet_at_any_end_of_a_sentence_and_depend_on_the_key_alone():
    read = Block(np.arange(4, 44), sentences=np.full(8, 5))
    keys = [(1, 0, index) for index in range(700)]
    together = objective("none").collate([read] * 700, keys, LENGTH)
    sizes = (1 - together["segment_ids"]).sum(axis=1) - (together["document_ids"] == 0).sum(axis=1)
    counts = np.bincount(sizes - 2, minlength=40)[5:40:5]
    assert counts.sum() == 700
    assert abs(counts - 100).max() < 5 * 100**0.5
    hidden = objective("sop", keep_probability=0.1, random_probability=0.1)
    whole = hidden.collate([read] * 700, keys, LENGTH)
    for row in (0, 5, 699):
        alone = hidden.collate([read], [keys[row]], LENGTH)
        for name in ("input_ids", "segment_ids", "document_ids", "pair_labels"):
            assert np.array_equal(alone[name][0], whole[name][row])
    other = hidden.collate([read] * 700, [(2, 0, index) for index in range(700)], LENGTH)
    assert (other["pair_labels"] != whole["pair_labels"]).mean() > 0.4


class Stand:
    """In the place of a model of 7 ids, with a weight of each head."""

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randn(200, 7, generator=draw).requires_grad_()
        self.pairs = torch.randn(20, 2, generator=draw).requires_grad_()

    def __call__(
        self,
        input_ids,
        document_ids,
        target_positions,
        *,
        segment_ids=None,
        with_pairs=False,
        labels=None,
    ):
        logits = self.tokens[: len(target_positions)]
        if labels is not None:
            logits = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        if not with_pairs:
            return logits
        assert segment_ids.shape == input_ids.shape
        return logits, self.pairs[: len(input_ids)]


def batch_of(task, count=6):
    blocks = [block(index, 5) for index in range(count)]
    blocks = [
        dataclasses.replace(read, subsets=np.full(len(read.ids), number % 3))
        for number, read in enumerate(blocks)
    ]
    keys = [(1, 0, index) for index in range(count)]
    arrays = objective(task).collate(blocks, keys, LENGTH)
    # The stand-in knows 7 ids.
    arrays["labels"] = np.where(arrays["labels"] == IGNORED, IGNORED, arrays["labels"] % 7)
    return arrays, {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_is_two_sums_and_every_parameter_has_a_gradient(task):
    arrays, batch = batch_of(task)
    model = Stand()
    loss = objective(task).loss(model, batch)
    logits = model.tokens[: len(batch["labels"])]
    sums = [cross_entropy(logits, batch["labels"], ignore_index=IGNORED, reduction="sum")]
    if task != "none":
        sums.append(cross_entropy(model.pairs[:6], batch["pair_labels"], reduction="sum"))
    torch.testing.assert_close(loss, torch.stack(sums))
    loss.sum().backward()
    assert (model.pairs.grad[:6] != 0).all() == (task != "none")
    used = int((arrays["labels"] != IGNORED).sum())
    assert objective(task).targets(arrays) == ((used,) if task == "none" else (used, 6))
    assert objective(task).terms == ({"masked": 1.0} if task == "none" else {"masked": 1, task: 1})


@pytest.mark.parametrize("task", TASKS)
def test_an_evaluation_sums_each_term_by_the_subset_of_the_block(task):
    _, batch = batch_of(task)
    model = Stand()
    with torch.no_grad():
        sums = objective(task).evaluate(model, batch, 3)
        loss = objective(task).loss(model, batch)
    assert sums.shape == (3, len(loss), 3)
    torch.testing.assert_close(sums[..., 0].sum(dim=0), loss.double(), rtol=1e-6, atol=0)
    if task == "none":
        return
    right = model.pairs[:6].argmax(dim=1) == batch["pair_labels"]
    for subset in range(3):
        assert sums[subset, 1, 1:].tolist() == [int(right[subset::3].sum()), 2]


def test_windows_of_documents_are_measured_by_the_masked_tokens_alone():
    """`evaluate --lengths` cuts documents, not pairs."""
    read = Block(np.arange(4, 44), subsets=np.zeros(40, dtype=np.int64))
    measured = objective("nsp")
    arrays = measured.arrange([read], [measured.mask(read.ids, (0, 0, 0))], LENGTH)
    assert measured.targets(arrays) == ((arrays["labels"] != IGNORED).sum(), 0)
    arrays["labels"] = np.where(arrays["labels"] == IGNORED, IGNORED, arrays["labels"] % 7)
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with torch.no_grad():
        sums = measured.evaluate(Stand(), batch, 1)
    assert sums[0, :, 2].tolist() == [*measured.targets(arrays)]
    assert not sums[0, 1].any()


def test_random_labels_are_those_of_both_terms():
    blocks, keys = [block(index % 40, 5) for index in range(200)], [(1, 0, n) for n in range(200)]
    arrays = objective().collate(blocks, keys, LENGTH)
    corrupted = objective().corrupted(arrays, np.random.default_rng(0))
    assert (corrupted["pair_labels"] != arrays["pair_labels"]).mean() == pytest.approx(0.5, abs=0.2)
    used = arrays["labels"] != IGNORED
    assert (corrupted["labels"] != arrays["labels"])[used].mean() > 0.9
    assert objective().targets(corrupted) == objective().targets(arrays)


@pytest.mark.parametrize("task", TASKS)
def test_validation_keeps_the_task_and_has_the_masks_of_masked_lm(task):
    recipe = SentencePairsConfig(probability=0.4, longest_ngram=3, pair_task=task)
    chosen = recipe.for_validation()
    assert chosen.pair_task == task
    masks = dataclasses.asdict(MaskedLMConfig()) | {"name": "sentence-pairs", "pair_task": task}
    assert dataclasses.asdict(chosen) == masks

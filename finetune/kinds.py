"""The kinds of tasks: how examples become inputs, what the loss is, and what counts as right.

A kind is one class here and one line in `KINDS`. An example becomes one row or, where its text is
long and every part of it may hold the answer, several (`Row`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from data_prep.tokenizer import Tokenizer
from finetune.examples import Example
from finetune.task import Task

if TYPE_CHECKING:
    from torch import Tensor

Ids = npt.NDArray[np.int32]
Answers = Any
"""One for each example, in the form that a kind's scores take (scores.py)."""
Output = npt.NDArray[np.float32]
"""Logits of a row: [C], or [T, C] of a kind that labels tokens."""
IGNORED = -100
"""Label of a token that the loss leaves out."""
_STRIDE = 128
"""Tokens that two windows of a long text share (Devlin et al. 2019, for SQuAD)."""
_LONGEST_ANSWER = 30
"""Tokens (Devlin et al. 2019)."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One input of the model."""

    ids: Ids
    """[T], special tokens included."""
    target: npt.NDArray[Any]
    """What the loss reads: [], or [C] of a multi-label task, [T] of tags, [2] of spans."""
    source: int
    """Number of its example."""
    places: npt.NDArray[np.int64] | None = None
    """[T, 2]: first and last character of the example that each token stands for, or the number of
    its word; -1 where there is none."""
    is_cut: bool = False
    """Whether the example is longer than the row, and no other row has the rest."""


class Kind(Protocol):
    """One kind of tasks."""

    labels_tokens: bool
    """Whether there are logits for each token, rather than for the row."""

    def rows(
        self,
        task: Task,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        limit: int,
        separators: int,
    ) -> list[Row]:
        """Return the rows of examples, of at most `limit` tokens each."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, summed over the targets, in nats (a regression: squared error), in fp32.

        Args:
            logits: [B, C], or [B, T, C] of a kind that labels tokens.
            targets: those of the rows, stacked; a row of tags is filled up with IGNORED.
        """

    def targets(self, row: Row) -> int:
        """Return the number of a row's targets, which the loss is divided by."""

    def truth(self, task: Task, examples: Sequence[Example]) -> Answers:
        """Return the right answers, as the kind's scores take them."""

    def predictions(
        self,
        task: Task,
        examples: Sequence[Example],
        rows: Sequence[Row],
        outputs: Sequence[Output],
    ) -> Answers:
        """Return the model's answers, in the same form."""

    def constant(self, truth: Answers) -> Answers:
        """Return the best answer that is the same for every example."""


class _OfText:
    """Kinds whose answer is about the whole of one or more texts."""

    labels_tokens = False
    kind: type = np.int64

    def rows(
        self,
        task: Task,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        limit: int,
        separators: int,
    ) -> list[Row]:
        """Return a row for each example."""
        flat = iter(tokenizer.encode_batch([text for e in examples for text in e.texts]))
        found = []
        for number, example in enumerate(examples):
            texts = [next(flat) for _ in example.texts]
            is_cut = sum(map(len, texts)) + special_tokens(len(texts), separators) > limit
            ids = lay_out(texts, limit, tokenizer, separators)
            target: npt.NDArray[Any] = np.array(self.target(task, example), dtype=self.kind)
            found.append(Row(ids, target, number, is_cut=is_cut))
        return found

    def target(self, task: Task, example: Example) -> Answers:
        """Return what the loss reads of an example."""
        return example.label

    def targets(self, row: Row) -> int:
        """Return the number of a row's targets."""
        return row.target.size

    def truth(self, task: Task, examples: Sequence[Example]) -> Answers:
        """Return the right answers."""
        return np.array([self.target(task, e) for e in examples], dtype=self.kind)


class Classification(_OfText):
    """One class of several."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy."""
        import torch.nn.functional as F  # noqa: N812

        return F.cross_entropy(logits.float(), targets, reduction="sum")

    def predictions(
        self,
        task: Task,
        examples: Sequence[Example],
        rows: Sequence[Row],
        outputs: Sequence[Output],
    ) -> Answers:
        """Return the likeliest class of each example."""
        return np.stack(outputs).argmax(axis=1)

    def constant(self, truth: Answers) -> Answers:
        """The majority class: no constant is more accurate."""
        return np.full_like(truth, np.bincount(truth).argmax())


class Regression(_OfText):
    """A number."""

    kind = np.float32

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error."""
        import torch.nn.functional as F  # noqa: N812

        return F.mse_loss(logits.float().squeeze(-1), targets, reduction="sum")

    def predictions(
        self,
        task: Task,
        examples: Sequence[Example],
        rows: Sequence[Row],
        outputs: Sequence[Output],
    ) -> Answers:
        """Return the numbers."""
        return np.stack(outputs)[:, 0]

    def constant(self, truth: Answers) -> Answers:
        """The mean: no constant has a lower squared error."""
        return np.full_like(truth, truth.mean())


class MultiLabel(_OfText):
    """Any number of classes."""

    kind = np.float32

    def target(self, task: Task, example: Example) -> Answers:
        """Return what the loss reads of an example."""
        return [float(number in example.label) for number in range(task.classes)]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each label by itself."""
        import torch.nn.functional as F  # noqa: N812

        return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="sum")

    def truth(self, task: Task, examples: Sequence[Example]) -> Answers:
        """Return the right answers."""
        return super().truth(task, examples).astype(bool)

    def predictions(
        self,
        task: Task,
        examples: Sequence[Example],
        rows: Sequence[Row],
        outputs: Sequence[Output],
    ) -> Answers:
        """Return which labels are likelier than not: bool [N, C]."""
        return np.stack(outputs) > 0

    def constant(self, truth: Answers) -> Answers:
        """Every class that most examples have."""
        return np.broadcast_to(truth.mean(axis=0) > 0.5, truth.shape)


class Tags:
    """A tag for each word; the first token of a word has it, and its others do not count."""

    labels_tokens = True

    def rows(
        self,
        task: Task,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        limit: int,
        separators: int,
    ) -> list[Row]:
        """Return a row for each example."""
        encoded = tokenizer.encode_with_offsets([" ".join(e.texts) for e in examples])
        found = []
        for number, (example, (ids, offsets)) in enumerate(zip(examples, encoded, strict=True)):
            words = _words_of(example.texts, offsets)
            kept = limit - special_tokens(1, separators)
            first = np.diff(words, prepend=-1) > 0  # the first token of a word
            tags = np.asarray(example.label or [0] * len(example.texts), dtype=np.int64)
            target = np.where(first, tags[words], IGNORED)
            places = np.where(first, words, -1)
            row = [
                np.pad(x[:kept], 1, constant_values=fill)
                for x, fill in ((target, IGNORED), (places, -1))
            ]
            laid = np.array(tokenizer.lay_out([ids[:kept].tolist()], separators), dtype=np.int32)
            found.append(Row(laid, row[0], number, row[1], is_cut=len(ids) > kept))
        return found

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of the words' first tokens."""
        import torch.nn.functional as F  # noqa: N812

        flat = logits.float().flatten(0, 1)
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def targets(self, row: Row) -> int:
        """Return the number of a row's targets."""
        return int((row.target != IGNORED).sum())

    def truth(self, task: Task, examples: Sequence[Example]) -> Answers:
        """Return the right answers."""
        return [[task.labels[tag] for tag in example.label] for example in examples]

    def predictions(
        self,
        task: Task,
        examples: Sequence[Example],
        rows: Sequence[Row],
        outputs: Sequence[Output],
    ) -> Answers:
        """Words beyond the longest input are outside of every entity."""
        outside = "O" if "O" in task.labels else task.labels[0]
        found = [[outside] * len(example.texts) for example in examples]
        for row, output in zip(rows, outputs, strict=True):
            assert row.places is not None
            for word, tag in zip(row.places, output.argmax(axis=1), strict=True):
                if word >= 0:
                    found[row.source][word] = task.labels[tag]
        return found

    def constant(self, truth: Answers) -> Answers:
        """Return the answer that most examples have."""
        tags = [tag for row in truth for tag in row]
        most = max(sorted(set(tags)), key=tags.count)
        return [[most] * len(row) for row in truth]


class Spans:
    """Part of a text that answers a question; none: the logits point to `<s>` (Devlin et al. 2019).

    A text that is longer than the model's input is read in windows that overlap.
    """

    labels_tokens = True

    def rows(
        self,
        task: Task,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        limit: int,
        separators: int,
    ) -> list[Row]:
        """Return a row for each example."""
        encoded = iter(tokenizer.encode_with_offsets([t for e in examples for t in e.texts]))
        found = []
        for number, example in enumerate(examples):
            (question, _), (context, offsets) = next(encoded), next(encoded)
            question = question[: limit // 2]
            room = limit - special_tokens(2, separators) - len(question)
            before = 1 + len(question) + separators
            start = 0
            while True:
                part, own = context[start : start + room], offsets[start : start + room]
                ids = tokenizer.lay_out([question.tolist(), part.tolist()], separators)
                places = np.full((len(ids), 2), -1, dtype=np.int64)
                places[before : before + len(part)] = own
                target = _span_in(places, example.label)
                found.append(Row(np.array(ids, dtype=np.int32), target, number, places))
                if start + room >= len(context):
                    break
                start += room - min(_STRIDE, room // 2)
        return found

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of first and last token."""
        import torch.nn.functional as F  # noqa: N812

        starts, ends = logits.float().unbind(dim=-1)
        first = F.cross_entropy(starts, targets[:, 0], reduction="sum")
        return first + F.cross_entropy(ends, targets[:, 1], reduction="sum")

    def targets(self, row: Row) -> int:
        """Return the number of a row's targets."""
        return 2

    def truth(self, task: Task, examples: Sequence[Example]) -> Answers:
        """Return the right answers."""
        return [
            tuple(example.texts[1][start:end] for start, end in example.label) or ("",)
            for example in examples
        ]

    def predictions(
        self,
        task: Task,
        examples: Sequence[Example],
        rows: Sequence[Row],
        outputs: Sequence[Output],
    ) -> Answers:
        """The span with the largest sum of logits, unless no answer is likelier in every window."""
        best: list[tuple[float, str]] = [(-np.inf, "")] * len(examples)
        nothing = [np.inf] * len(examples)
        for row, output in zip(rows, outputs, strict=True):
            assert row.places is not None
            n, text = row.source, examples[row.source].texts[1]
            nothing[n] = min(nothing[n], float(output[0].sum()))
            score, first, last = _best_span(output, row.places[:, 0] >= 0)
            if score > best[n][0]:
                best[n] = score, text[row.places[first, 0] : row.places[last, 1]].strip()
        may_be_empty = "no-answer" in task.labels
        return [
            "" if may_be_empty and nothing[n] > score else answer
            for n, (score, answer) in enumerate(best)
        ]

    def constant(self, truth: Answers) -> Answers:
        """Return the answer that most examples have."""
        return [""] * len(truth)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "classification": Classification(),
        "regression": Regression(),
        "multi-label": MultiLabel(),
        "tags": Tags(),
        "spans": Spans(),
    }
)
"""By the name that `Task.kind` has."""


class Objective:
    """The training objective of a kind, of one term."""

    def __init__(self, kind: str) -> None:
        """Train what a kind of tasks asks for."""
        self.kind = KINDS[kind]
        self.terms: Mapping[str, float] = MappingProxyType({kind: 1.0})

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
        """Return the loss, summed over the batch's targets: [1]."""
        logits = model(batch["input_ids"], batch.get("document_ids"), batch.get("segment_ids"))
        return self.kind.loss(logits, batch["labels"]).unsqueeze(0)


def lay_out(
    texts: Sequence[Ids], max_tokens: int, tokenizer: Tokenizer, separators: int = 2
) -> Ids:
    """Return the input (`Tokenizer.lay_out`) of an example's texts.

    If it is too long, tokens are cut from the end of the longest text, one at a time.
    """
    lengths = [len(text) for text in texts]
    limit = max_tokens - special_tokens(len(texts), separators)
    while sum(lengths) > limit:
        lengths[int(np.argmax(lengths))] -= 1
    cut = [text[:length].tolist() for text, length in zip(texts, lengths, strict=True)]
    return np.array(tokenizer.lay_out(cut, separators), dtype=np.int32)


def special_tokens(texts: int, separators: int) -> int:
    """Return how many tokens `Tokenizer.lay_out` adds."""
    return 2 + separators * (texts - 1)


def _words_of(words: Sequence[str], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of the word that each token belongs to, by the tokens' last characters.

    A token that begins with the space before a word belongs to that word.
    """
    ends = np.cumsum([len(word) + 1 for word in words])
    last = np.maximum(offsets[:, 1] - 1, 0)
    return np.minimum(np.searchsorted(ends, last, side="right"), len(words) - 1)


def _span_in(
    places: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]]
) -> npt.NDArray[np.int64]:
    """Return first and last token of the first span if it is wholly there, else [0, 0]."""
    for start, end in spans[:1]:
        inside = np.flatnonzero((places[:, 1] > start) & (places[:, 0] < end) & (places[:, 0] >= 0))
        reaches = places[places[:, 0] >= 0]
        if len(inside) and len(reaches) and reaches[0, 0] <= start and end <= reaches[-1, 1]:
            return np.array([inside[0], inside[-1]], dtype=np.int64)
    return np.zeros(2, dtype=np.int64)


def _best_span(output: Output, inside: npt.NDArray[np.bool_]) -> tuple[float, int, int]:
    """Return the largest sum of a start's and an end's logits, with both tokens' numbers."""
    starts, ends = (np.where(inside, output[:, side], -np.inf) for side in (0, 1))
    best = (-np.inf, 0, 0)
    for length in range(min(_LONGEST_ANSWER, len(output))):
        sums = starts[: len(starts) - length] + ends[length:]
        first = int(sums.argmax())
        best = max(best, (float(sums[first]), first, first + length))
    return best

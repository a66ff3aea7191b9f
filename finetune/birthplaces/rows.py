"""Rows of ids for fine-tuning: `<s> question <mask> answer <mask>`, and batches of them.

The model predicts the first `<mask>`, the answer and the closing `<mask>`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from data_prep.tokenizer import Tokenizer
from finetune.birthplaces.questions import Question, shortened
from pretrain.data.lineage import Lineage
from pretrain.loop.protocols import Arrays, MicroBatch
from pretrain.objectives.base import Block, Ids
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.tokens import TokenObjective


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Rows, and what had to be done to encode their questions."""

    rows: list[Ids]
    """[n] each, special tokens included."""
    left_out: int
    """Questions that have no row: their answer has a character that the vocabulary lacks."""
    unknown: collections.Counter[str]
    """How often the questions have characters that the vocabulary lacks, which became `<unk>`."""

    @property
    def notes(self) -> list[str]:
        """What was counted, as sentences."""
        result = list[str]()
        if self.left_out:
            result.append(
                f"rows left out because the vocabulary lacks a character of the answer: "
                f"{self.left_out:,}"
            )
        if self.unknown:
            named = ", ".join(repr(character) for character, _ in self.unknown.most_common(5))
            result.append(
                "characters of questions that the vocabulary lacks, read as <unk>: "
                f"{self.unknown.total():,}, such as {named}"
            )
        return result


def encode(
    questions: Sequence[Question], tokenizer: Tokenizer, block: int, *, with_answers: bool
) -> Encoded:
    """Encode questions as rows.

    Args:
        questions: at least one.
        tokenizer: of characters.
        block: most ids of a row.
        with_answers: rows of training, `<s> question <mask> answer <mask>`; otherwise
            `<s> question <mask>`, one for every question.

    Raises:
        ValueError: a row is longer than the block, or every row was left out.
    """
    texts = tokenizer.encode_batch([question.text for question in questions])
    answers = tokenizer.encode_batch([question.answer or "" for question in questions])
    rows, left_out, unknown = list[Ids](), 0, collections.Counter[str]()
    for question, text, answer in zip(questions, texts, answers, strict=True):
        row = [tokenizer.bos_id, *text.tolist(), tokenizer.mask_id]
        if with_answers:
            row += [*answer.tolist(), tokenizer.mask_id]
        if len(row) > block:
            characters = len(row) - (3 if with_answers else 2)
            raise ValueError(
                f"{question.source}: {shortened(question.text)} has {characters} characters"
                f"{' with its answer' if with_answers else ''}; accepted: at most "
                f"{characters - len(row) + block}, because the model reads {block} tokens"
            )
        if with_answers and tokenizer.unk_id in answer:
            left_out += 1
            continue
        at = np.flatnonzero(text == tokenizer.unk_id)
        unknown.update(question.text[index] for index in at)
        rows.append(np.array(row, dtype=np.int64))
    if not rows:
        raise ValueError(
            f"{questions[0].source}: this and every other answer has a character that the "
            "vocabulary of the corpus lacks"
        )
    return Encoded(rows, left_out, unknown)


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerObjective(TokenObjective):
    """The tokens of a row from its first `<mask>` on are predicted. The model must be causal."""

    mask_id: int
    settings: CausalLMConfig = dataclasses.field(default_factory=CausalLMConfig)
    compiled: bool = False

    term = "answer"
    places_before = 1

    def collate(self, rows: Sequence[Ids], length: int) -> Arrays:
        """Return one micro-batch, as `arrange` makes it, of rows of at most `length` ids."""
        firsts = [int(np.argmax(row == self.mask_id)) for row in rows]
        read = [(row, np.arange(first, len(row))) for row, first in zip(rows, firsts, strict=True)]
        return self.arrange([Block(row) for row in rows], read, length)


@dataclasses.dataclass(frozen=True)
class AnswerBatches:
    """Batches of rows, for one rank. Each epoch has an order drawn from (seed, epoch)."""

    rows: Sequence[Ids]
    batch_size: int
    order_seed: int
    objective: AnswerObjective

    def seed(self, step: int) -> int:
        """Return the seed of dropout."""
        return self.order_seed

    def epoch(self, step: int) -> float:
        """Return the number of epochs read before a step."""
        return step * self.batch_size / len(self.rows)

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[MicroBatch]:
        """Return the step's batch as one micro-batch."""
        assert world_size == 1
        lineage = Lineage.begin(len(self.rows), self.order_seed)
        chosen, _ = lineage.blocks(step * self.batch_size, self.batch_size)
        rows = [self.rows[index] for index in chosen]
        lengths = [len(row) for row in rows]
        arrays = self.objective.collate(rows, max(lengths))
        return [MicroBatch(rank, arrays, sum(lengths), self.objective.targets(arrays))]

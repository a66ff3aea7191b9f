"""The protocols of a pretraining objective and of its settings.

An objective turns blocks of tokens into arrays (`collate`), and a model's outputs into sums: a loss
per term to train on (`loss`, see `pretrain.loop.protocols.Objective`), and nats, correct
predictions and targets to report (`evaluate`). A new objective is a file with its settings record
and its class, and a line in registry.py.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from pretrain.loop.protocols import Arrays, Model, Objective

if TYPE_CHECKING:
    from torch import Tensor

PAIR_SPECIAL_TOKENS = 3
"""Of a pair of segments, `<s> a </s> b </s>`."""
Ids = npt.NDArray[np.int64]
Key = tuple[int, int, int]
"""(seed, epoch, index of the block), each at least 0: every random draw of a block depends on these
alone."""


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """One item of a source, before the objective processes it."""

    ids: Ids
    """[n], special tokens included, but not in blocks of sentences."""
    document_ids: Ids | None = None
    """[n], from 1: the document of each id, where documents of a block do not see each other; None
    where the block is read as one document."""
    subsets: Ids | None = None
    """[n]: the subset of each id's document, where losses are reported by subset."""
    sentences: Ids | None = None
    """[s], at least two: lengths of the sentences, in a block of sentences. Such a block may have
    more ids than a model reads: an objective of pairs truncates them."""
    sample_other_document: "Callable[[float], Block] | None" = None
    """For a block of sentences: returns a block of another document of the split, chosen by a
    number in [0, 1). Raises ValueError if there is no other document."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What an objective needs to know of the corpus and the model."""

    size: int
    """Ids of the corpus; the last one is `<mask>`."""
    embedded: int
    """Ids below this one have a row in the model's token table: all, or all but `<mask>`."""
    folder: Path
    """The corpus, which has the tokenizer."""

    @property
    def mask_id(self) -> int:
        """The id of `<mask>`."""
        return self.size - 1


class ObjectiveSettings(Protocol):
    """An objective's section of a recipe: a frozen dataclass whose field `name` is its key."""

    causal: ClassVar[bool] = False
    """Whether the model must see no later tokens; otherwise it must see them."""
    pairs: ClassVar[bool] = False
    """Whether it reads pairs of segments from blocks of sentences, for a model with a pair head."""
    one_text: ClassVar[bool] = False
    """Whether it reads a block as one text: the documents of a block must see each other."""

    @property
    def name(self) -> str:
        """The key."""

    @property
    def description(self) -> str:
        """What is predicted, in a few words, such as "15 % of the tokens masked"."""

    @property
    def target_share(self) -> float:
        """Share of a block's positions that the head computes, at most."""

    def for_validation(self) -> "ObjectiveSettings":
        """Settings of every validation, so that losses of recipes compare: the defaults."""
        return type(self)()

    def build(self, vocabulary: Vocabulary) -> "PretrainingObjective":
        """The objective for the vocabulary of the corpus and the model."""


class PretrainingObjective(Objective, Protocol):
    """An objective on blocks of a corpus."""

    @property
    def settings(self) -> ObjectiveSettings:
        """Its settings."""

    def collate(self, blocks: Sequence[Block], keys: Sequence[Key], length: int) -> Arrays:
        """One micro-batch of fixed shapes.

        Args:
            blocks: B blocks of at most `length` ids. Where they have subsets, the arrays say of
                each target which subset it is from.
            keys: of each block's random draws.
            length: T, to which blocks are padded.
        """

    def targets(self, arrays: Arrays) -> tuple[int, ...]:
        """Number of targets of each term in a collated micro-batch, in the order of `terms`."""

    def evaluate(self, model: Model, batch: Mapping[str, "Tensor"], subsets: int) -> "Tensor":
        """Sums over the targets of a batch, by subset and term.

        Args:
            model: in evaluation mode.
            batch: collated from blocks with subsets.
            subsets: S, how many there are.

        Returns:
            [S, terms, 3] in fp64: loss in nats, correct predictions, targets.
        """

    def corrupted(self, arrays: Arrays, draw: np.random.Generator) -> Arrays:
        """The same micro-batch with random targets: the fault `fault.random_labels`."""


def padded(rows: Sequence[npt.NDArray[np.generic]], length: int, value: int) -> Ids:
    """Rows of at most `length` numbers as one array [B, length], filled up with `value`."""
    result = np.full((len(rows), length), value, dtype=np.int64)
    for row, numbers in zip(result, rows, strict=True):
        row[: len(numbers)] = numbers
    return result


def padded_document_ids(blocks: Sequence[Block], length: int) -> npt.NDArray[np.generic]:
    """Document of each token, [B, length], 0 for padding; bool where a row is one document."""
    rows = [b.document_ids if b.document_ids is not None else np.ones(len(b.ids)) for b in blocks]
    document_ids = padded(rows, length, 0)
    one_document = all(block.document_ids is None for block in blocks)
    # FlexAttention's kernels read two of them for each score.
    return document_ids.astype(bool if one_document else np.int32)

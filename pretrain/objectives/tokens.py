"""Common parts of the objectives that predict tokens of a block."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pretrain.loop.protocols import Arrays, Model
from pretrain.objectives.base import Block, Ids, Key, ObjectiveSettings, padded, padded_document_ids

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""The label of an unused target position; the model and torch's `cross_entropy` know it."""
FIRST_WORD_ID = 4
"""Ids below are `<s>`, `<pad>`, `</s>` and `<unk>`: never drawn as a replacement."""
PAD_ID = 1


class TokenObjective(ABC):
    """One term: the cross-entropy of some tokens of each block."""

    settings: ObjectiveSettings
    replacement_end: int
    """Random tokens are drawn from [FIRST_WORD_ID, replacement_end)."""
    term: ClassVar[str]
    """Name of the term."""

    @property
    def terms(self) -> Mapping[str, float]:
        """One term."""
        return {self.term: 1.0}

    def capacity(self, length: int) -> int:
        """Most targets of a block of `length` tokens."""
        return math.ceil(self.settings.target_share * length)

    def arrange(
        self, blocks: Sequence[Block], masked: Sequence[tuple[Ids, Ids]], length: int
    ) -> Arrays:
        """One micro-batch of targets that were chosen before.

        Args:
            blocks: B blocks of at most `length` ids.
            masked: of each block, what the model reads, [n], and the sorted positions of the
                tokens to predict, [m].
            length: T, to which blocks are padded.

        Returns:
            input_ids [B, T]; document_ids [B, T], 0 for padding, bool where rows are one document;
            target_positions [M] in the flattened batch and labels [M], with label IGNORED at
            position 0 where unused; and subsets [M] where the blocks have them. M is B * capacity,
            or more where a part of a document has more targets than a block can have.

        Raises:
            ValueError: a block's first token is a target, and there is no place before it.
        """
        found = [positions for _, positions in masked]
        before = int(self.settings.causal)  # places from where a token is predicted to its own
        if any(len(at) and at[0] < before for at in found):
            raise ValueError("a block that does not begin with <s>: nothing is before its target")
        capacity = max(self.capacity(length), *map(len, found))
        labels = [block.ids[at] for block, at in zip(blocks, found, strict=True)]
        in_batch = [row * length + at - before for row, at in enumerate(found)]
        arrays: Arrays = {
            "input_ids": padded([ids for ids, _ in masked], length, PAD_ID),
            "document_ids": padded_document_ids(blocks, length),
            "target_positions": padded(in_batch, capacity, 0).ravel(),
            "labels": padded(labels, capacity, IGNORED).ravel(),
        }
        pairs = zip(blocks, found, strict=True)
        subsets = [block.subsets[at] for block, at in pairs if block.subsets is not None]
        if subsets:
            arrays["subsets"] = padded(subsets, capacity, 0).ravel()
        return arrays

    def targets(self, arrays: Arrays) -> tuple[int, ...]:
        """Number of tokens to predict."""
        return (int((arrays["labels"] != IGNORED).sum()),)

    def corrupted(self, arrays: Arrays, draw: np.random.Generator) -> Arrays:
        """The same micro-batch with random tokens as labels."""
        labels = arrays["labels"]
        noise = draw.integers(FIRST_WORD_ID, self.replacement_end, labels.shape)
        return {**arrays, "labels": np.where(labels == IGNORED, IGNORED, noise)}

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy summed over the tokens to predict, in nats, computed in fp32: [1]."""
        return output_of(model, batch, labels=batch["labels"]).unsqueeze(0)

    def evaluate(self, model: Model, batch: Mapping[str, Tensor], subsets: int) -> Tensor:
        """Nats, correct predictions and tokens to predict of each subset: [S, 1, 3] in fp64."""
        logits = output_of(model, batch)
        return sums_by_subset(logits, batch["labels"], batch["subsets"], subsets).unsqueeze(1)


class DocumentObjective(TokenObjective):
    """Objective whose targets keep their positions, so that whole documents can be scored.

    `evaluate --lengths` needs it. `collate` is `arrange` with what `mask` draws for each block.
    """

    @abstractmethod
    def mask(self, ids: Ids, key: Key) -> tuple[Ids, Ids]:
        """Draw the targets of a block or of a document.

        Args:
            ids: [n], left unchanged.
            key: of the draw.

        Returns:
            What the model reads in place of the ids, [n], and the sorted positions of the tokens to
            predict, [m].
        """

    def collate(self, blocks: Sequence[Block], keys: Sequence[Key], length: int) -> Arrays:
        """One micro-batch of fixed shapes.

        Args:
            blocks: B blocks of at most `length` ids.
            keys: of each block's draw.
            length: T, to which blocks are padded.

        Returns:
            As `arrange`, M = B * capacity.
        """
        masked = [self.mask(block.ids, key) for block, key in zip(blocks, keys, strict=True)]
        return self.arrange(blocks, masked, length)


def sums_by_subset(logits: Tensor, labels: Tensor, subset_of: Tensor, subsets: int) -> Tensor:
    """Nats, correct predictions and labels that are not IGNORED of each subset: [S, 3] in fp64."""
    import torch
    from torch.nn.functional import cross_entropy

    losses = cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
    parts = (losses, logits.argmax(dim=-1) == labels, labels != IGNORED)
    columns = torch.stack([part.double() for part in parts], dim=1)
    sums = torch.zeros((subsets, 3), dtype=torch.float64, device=labels.device)
    return sums.index_add(0, subset_of, columns)


def output_of(model: Model, batch: Mapping[str, Tensor], **options: Tensor | bool) -> Tensor:
    """The logits at the target positions of a batch, [M, V]; with `labels`, their summed loss."""
    positions = batch["target_positions"]
    return model(batch["input_ids"], batch.get("document_ids"), positions, **options)

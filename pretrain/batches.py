"""A step's batch as a pure function of corpus, lineage and step.

Global batch `step` holds the blocks at places [step * G, (step + 1) * G) of the order. It is cut
into G / B micro-batches; rank r of R takes number k * R + r in its k-th turn. Nothing here depends
on what ran before: a restart, or other ranks, see the same batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from data_prep.blocks import complete
from data_prep.corpus import Corpus
from data_prep.tokenizer import Tokenizer
from pretrain.config import FaultConfig
from pretrain.objectives.masked import FIRST_WORD_ID, IGNORED, MaskedLM
from pretrain.order import Lineage

VALIDATION_SEED = 0
"""Validation masks are the same for every run, so that perplexities compare."""


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What one rank sees in one forward pass."""

    index: int
    """Among the micro-batches of the global batch: keys the dropout of this pass."""
    arrays: dict[str, npt.NDArray[np.generic]]
    tokens: int
    """Real input tokens."""
    targets: int
    """Tokens that the loss is summed over."""


class Blocks:
    """Blocks of one corpus split: `<s>` and as many whole documents as fit."""

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        """Cut the split into blocks, from lengths alone.

        Raises:
            ValueError: no document is short enough for a block.
        """
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.ranges = complete(corpus.lengths, sequence_length)
        if not len(self.ranges):
            raise ValueError(
                f"{corpus.folder}: no document of split {corpus.split!r} fits into "
                f"data.sequence_length {sequence_length}; the shortest has "
                f"{int(corpus.lengths.min())} tokens and needs one more for <s>"
            )

    @property
    def share_of_tokens(self) -> float:
        """How much of the split the blocks hold; the rest stands in documents too long for them."""
        fits = self.corpus.lengths < self.sequence_length
        return float(self.corpus.lengths[fits].sum() / self.corpus.lengths.sum())

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.ranges)

    def ids(self, block: int) -> npt.NDArray[np.int64]:
        """Token ids of one block, at most `sequence_length`."""
        first, end = self.ranges[block]
        parts = [self.corpus.document(index) for index in range(first, end)]
        return np.concatenate([[Tokenizer.bos_id], *parts]).astype(np.int64)


def collate(
    blocks: Blocks,
    objective: MaskedLM,
    chosen: Sequence[int],
    keys: Sequence[Sequence[int]],
    index: int,
) -> MicroBatch:
    """Micro-batch `index` made of the chosen blocks."""
    arrays = objective.collate([blocks.ids(b) for b in chosen], keys, blocks.sequence_length)
    return MicroBatch(
        index=index,
        arrays=arrays,
        tokens=int(arrays["attention_mask"].sum()),
        targets=int((arrays["labels"] != IGNORED).sum()),
    )


@dataclasses.dataclass(frozen=True)
class PretrainingBatches:
    """Training batches of a run."""

    blocks: Blocks
    objective: MaskedLM
    lineage: Lineage
    global_batch_size: int
    micro_batch_size: int
    fault: FaultConfig
    recipe_seed: int

    def seed(self, step: int) -> int:
        """The seed that orders, masks and drops out in this step."""
        return self.lineage.seed_at(step * self.global_batch_size)

    def epoch(self, step: int) -> float:
        """Epochs of the corpus read before this step."""
        return step * self.global_batch_size / len(self.blocks)

    def micro_batches(self, step: int, rank: int, ranks: int) -> list[MicroBatch]:
        """What `rank` of `ranks` reads in `step`, in turn."""
        size = self.micro_batch_size
        chosen, epochs = self.lineage.blocks(
            step * self.global_batch_size, self.global_batch_size, len(self.blocks)
        )
        seed = self.seed(step)
        result = []
        for index in range(rank, self.global_batch_size // size, ranks):
            part = slice(index * size, (index + 1) * size)
            keys = [(seed, int(e), int(b)) for e, b in zip(epochs[part], chosen[part], strict=True)]
            batch = collate(self.blocks, self.objective, chosen[part].tolist(), keys, index)
            if self.fault.strikes(step, seed, self.recipe_seed):
                batch = self._spoiled(batch, step)
            result.append(batch)
        return result

    def _spoiled(self, batch: MicroBatch, step: int) -> MicroBatch:
        labels = batch.arrays["labels"]
        draw = np.random.default_rng([step, batch.index])
        noise = draw.integers(FIRST_WORD_ID, self.objective.replacement_end, labels.shape)
        spoiled = np.where(labels == IGNORED, IGNORED, noise)
        return dataclasses.replace(batch, arrays={**batch.arrays, "labels": spoiled})


def validation_batches(
    blocks: Blocks, objective: MaskedLM, limit: int, size: int, rank: int, ranks: int
) -> list[MicroBatch]:
    """This rank's share of `limit` blocks spread over the split (0: all), with fixed masks.

    Every rank gets the same number of micro-batches, as ZeRO 3 needs: where there are too few, a
    last one without targets.
    """
    count = min(limit, len(blocks)) if limit else len(blocks)
    # Spread, for neighbours come from one input file and are alike.
    spread = [number * len(blocks) // count for number in range(count)]
    total = -(-count // size)
    result = []
    for turn in range(-(-total // ranks)):
        index = turn * ranks + rank
        chosen = spread[index * size : (index + 1) * size]
        if chosen:
            keys = [(VALIDATION_SEED, 0, block) for block in chosen]
            result.append(collate(blocks, objective, chosen, keys, index))
        else:
            spare = collate(blocks, objective, [0], [(VALIDATION_SEED, 0, 0)], index)
            nothing = np.full_like(spare.arrays["labels"], IGNORED)
            result.append(
                MicroBatch(index, {**spare.arrays, "labels": nothing}, tokens=0, targets=0)
            )
    return result

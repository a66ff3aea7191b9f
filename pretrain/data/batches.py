"""Batches as pure functions of corpora, order and step.

Global batch `step` holds the `size(step)` blocks from position `first_block(step)` of the order on.
It is cut into micro-batches of B blocks; rank r of R takes number k * R + r as its k-th one. Where
R does not divide their number, the last ones of some ranks are empty: of blocks that others read.
Nothing here depends on what ran before: after a restart, or with another number of ranks, the
batches are the same.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from pretrain.config.run import Sizes
from pretrain.config.sections import BatchConfig, FaultConfig
from pretrain.data.blocks import Blocks
from pretrain.data.lineage import digest
from pretrain.data.order import Order
from pretrain.data.sources import SOURCES, ConcatenatedBlocks
from pretrain.loop.protocols import Batches, MicroBatch
from pretrain.objectives.base import Block, Key, ObjectiveSettings, PretrainingObjective
from pretrain.objectives.tokens import PAD_ID

_VALIDATION_SEED = 0
_DAMAGE = 1e4
"""Factor on the gradient of a step that reads the block of `fault.damaged_block`."""


def _collate(
    source: Blocks | ConcatenatedBlocks,
    objective: PretrainingObjective,
    blocks: Sequence[Block],
    keys: Sequence[Key],
    index: int,
) -> MicroBatch:
    arrays = objective.collate(blocks, keys, source.sequence_length)
    # A row may end behind its text, where padding is input that no token of the text sees.
    is_read = (arrays["document_ids"] != 0) & (arrays["input_ids"] != PAD_ID)
    return MicroBatch(index, arrays, int(np.count_nonzero(is_read)), objective.targets(arrays))


@dataclasses.dataclass(frozen=True)
class PretrainingBatches:
    """Training batches of a run."""

    source: Blocks | ConcatenatedBlocks
    objective: PretrainingObjective
    order: Order
    batch: BatchConfig
    """Of the segment; its micro-batches are those of all steps that are asked for."""
    fault: FaultConfig
    recipe_seed: int
    sizes: Sizes
    """Of the run."""

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[MicroBatch]:
        """The micro-batches of one rank in a step, in order.

        A step has one seed, of the order, the objective's draws and the dropout. Its epochs are, of
        several corpora, the mean over all their blocks.
        """
        size, place = self.batch.micro_batch_size, self.sizes.first_block(step)
        chosen, epochs = self.order.blocks(place, self.sizes.size(step))
        seed, epoch = self.order.seed_at(place), self.order.epoch(place)
        batch_digest = digest(chosen, epochs)
        is_damaged = bool(((chosen == self._damaged_block) & (epochs == 0)).any())
        total, result = len(chosen) // size, []
        for index in range(rank, math.ceil(total / world_size) * world_size, world_size):
            first = index % total * size
            part = slice(first, first + size)
            names = list(zip(epochs[part].tolist(), chosen[part].tolist(), strict=True))
            blocks = [self.source[block] for _, block in names]
            keys = [(seed, epoch, block) for epoch, block in names]
            batch = _collate(self.source, self.objective, blocks, keys, index)
            if self.fault.strikes(step, seed, self.recipe_seed):
                draw = np.random.default_rng([step, index])
                arrays = self.objective.corrupted(batch.arrays, draw)
                batch = dataclasses.replace(batch, arrays=arrays)
            batch = dataclasses.replace(
                batch,
                seed=seed,
                epoch=epoch,
                batch_digest=batch_digest,
                gradient_scale=_DAMAGE if is_damaged else 1.0,
            )
            result.append(batch if index < total else batch.emptied())
        return result

    @cached_property
    def _damaged_block(self) -> int:
        """The block of `fault.damaged_block`, whatever the order has become; -1: none."""
        if not self.fault.damaged_block:
            return -1
        totals = [lineage.total for lineage in self.order.lineages]
        order = Order.begin(self.order.mixture, totals, self.recipe_seed)
        (block, *_), _ = order.blocks(self.sizes.first_block(self.fault.damaged_block), 1)
        return int(block)


def segmented_batches(
    parts: Sequence[tuple[int, Batches]], step: int, rank: int, world_size: int
) -> Sequence[MicroBatch]:
    """What one rank reads in a step, of the batches of its segment.

    Args:
        parts: (end step of a segment, its batches), ascending, all in one order of blocks.
        step: after the end, one of the last segment.
        rank: of the process.
        world_size: number of ranks.
    """
    batches = next((batches for end, batches in parts if step < end), parts[-1][1])
    return batches(step, rank, world_size)


def validation_batches(
    source: Blocks,
    objective: PretrainingObjective,
    limit: int,
    size: int,
    rank: int,
    world_size: int,
    first_subset: int = 0,
) -> Iterator[MicroBatch]:
    """This rank's share of `limit` blocks spread over the split (0: all), the same in every run.

    Every rank gets the same number of micro-batches, as ZeRO 3 needs: where there are too few, a
    last one without targets, whose sums do not count. Subsets are numbered from `first_subset` on.
    """
    chosen_blocks = evenly_spaced(len(source), limit)
    total = -(-len(chosen_blocks) // size)
    for turn in range(-(-total // world_size)):
        index = turn * world_size + rank
        chosen = chosen_blocks[index * size : (index + 1) * size]
        read = chosen or [0]
        blocks = [
            dataclasses.replace(source[n], subsets=source.subsets(n) + first_subset) for n in read
        ]
        keys = [validation_key(n) for n in read]
        batch = _collate(source, objective, blocks, keys, index)
        yield batch if chosen else batch.emptied()


def check_targets(source: Blocks, objective: PretrainingObjective, limit: int) -> None:
    """Refuse to validate on blocks that have no targets. Stops at the first block that has one.

    Args:
        source: of the validation split, of a packing that the objective reads.
        objective: for validation.
        limit: as in `validation_batches`.

    Raises:
        ValueError: names the corpus, the length and the cause.
    """
    chosen, tokens = evenly_spaced(len(source), limit), 0
    for index in chosen:
        block, keys = source[index], [validation_key(index)]
        if any(_collate(source, objective, [block], keys, 0).targets):
            return
        tokens += len(block.ids)
    raise ValueError(
        f"{source.corpus.folder}: split {source.corpus.split!r} has nothing to predict: its "
        f"{len(chosen)} blocks of at most {source.sequence_length} tokens hold {tokens} tokens, "
        f"and none of them is a target ({validation_note(objective.settings)}); use more "
        "validation documents, or longer blocks"
    )


def check_packing(packing: type[Blocks], settings: ObjectiveSettings, latents: int = 0) -> None:
    """Refuse to read documents as pairs, sentences as documents, or several texts as one.

    Args:
        packing: the kind of blocks.
        settings: of the objective.
        latents: of the model; above 0 it reads a block as one text.

    Raises:
        ValueError: names both, and the packings that fit.
    """
    fitting = [kind for kind in SOURCES.values() if kind.pairs == settings.pairs]
    if settings.one_text or latents > 0:
        fitting = [kind for kind in fitting if not kind.documents_apart]
    if packing in fitting:
        return
    reader, reads = f"objective {settings.name}", "a block as one text"
    if packing.pairs != settings.pairs:
        reads = "pairs of segments" if settings.pairs else "no pairs of segments"
    elif not settings.one_text:
        reader = f"a model with {latents} latents"
    raise ValueError(
        f"packing {packing.name} does not fit {reader}, which reads {reads}; accepted: packing "
        f"{' or '.join(kind.name for kind in fitting)}"
    )


def validation_note(settings: ObjectiveSettings) -> str:
    """What every validation of an objective predicts, for people."""
    return f"validation: {settings.for_validation().description}, the same draws for every model"


def evenly_spaced(total: int, limit: int) -> list[int]:
    """Indices of at most `limit` of `total` blocks or documents; 0: of all.

    Neighbours come from one input file and are alike, so the chosen ones are spread.
    """
    count = min(limit, total) if limit else total
    return [number * total // count for number in range(count)]


def validation_key(index: int) -> Key:
    """The key of the draws of one block or document, the same in every validation."""
    return _VALIDATION_SEED, 0, index

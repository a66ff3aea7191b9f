"""A step's batch as a pure function of corpus, lineage and step.

Global batch `step` holds the `size(step)` blocks of the order from place `first_block(step)` on. It
is cut into micro-batches of B; rank r of R takes number k * R + r in its k-th turn. Nothing here
depends on what ran before: a restart, or other ranks, see the same batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.blocks import best_fit, complete
from data_prep.corpus import Corpus
from data_prep.files import new_folder
from data_prep.tokenizer import Tokenizer
from pretrain.config.run import BatchConfig, FaultConfig, MaskingConfig
from pretrain.data.order import Lineage, digest
from pretrain.loop import MicroBatch
from pretrain.objectives.masked import FIRST_WORD_ID, IGNORED, MaskedLM

VALIDATION_SEED = 0
VALIDATION_MASKING = MaskingConfig()
VALIDATION_MASKS = (
    f"validation masks: {100 * VALIDATION_MASKING.probability:g} % of the tokens, the same for "
    "every model"
)
"""Validation hides the same tokens for every model, whatever a recipe trains with, so that
perplexities compare: of two runs, and of a run and its exported model."""


class Blocks:
    """Blocks of one corpus split.

    Packed "complete", a block is `<s>` and as many whole documents as fit, in the corpus's order,
    and is read as one text. Packed "best-fit", it is documents from anywhere, each with its `<s>`
    and each a text by itself.
    """

    def __init__(self, corpus: Corpus, sequence_length: int, packing: str = "complete") -> None:
        """Cut the split into blocks, from lengths alone; or read how it was cut before.

        The outcome is kept in the corpus's folder, so that the ranks of a machine share its memory
        and a restart takes no time.

        Raises:
            ValueError: no document is short enough for a block.
        """
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.packing = packing
        self.one_text = packing == "complete"
        tables = _tables(corpus, sequence_length, packing)
        self._ranges = tables["ranges"]
        if not self.one_text:
            self._documents = tables["documents"]
        if not len(self._ranges):
            raise ValueError(
                f"{corpus.folder}: no document of split {corpus.split!r} fits into "
                f"data.sequence_length {sequence_length}; the shortest has "
                f"{int(corpus.lengths.min())} tokens and needs one more for <s>"
            )

    def __reduce__(self) -> tuple[type[Blocks], tuple[Corpus, int, str]]:
        """Pickles small: another process reads the tables by itself."""
        return Blocks, (self.corpus, self.sequence_length, self.packing)

    @property
    def share_of_tokens(self) -> float:
        """How much of the split the blocks hold; the rest stands in documents too long for them."""
        fits = self.corpus.lengths < self.sequence_length
        return float(self.corpus.lengths[fits].sum() / self.corpus.lengths.sum())

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._ranges)

    @property
    def fill(self) -> float:
        """Share of the blocks' places that hold a token."""
        lengths = self.corpus.lengths
        tokens = int(lengths[lengths < self.sequence_length].sum())
        starts = len(self) if self.one_text else len(self._documents)
        return (tokens + starts) / (len(self) * self.sequence_length)

    def documents(self, block: int) -> list[int]:
        """The documents of one block, in its order."""
        first, end = self._ranges[block].tolist()
        return list(range(first, end)) if self.one_text else self._documents[first:end].tolist()

    def ids(self, block: int) -> npt.NDArray[np.int64]:
        """Token ids of one block, at most `sequence_length`."""
        parts: list[npt.ArrayLike] = []
        for number, document in enumerate(self.documents(block)):
            if number == 0 or not self.one_text:
                parts.append([Tokenizer.bos_id])
            parts.append(self.corpus.document(document))
        return np.concatenate(parts).astype(np.int64)

    def document_numbers(self, block: int) -> npt.NDArray[np.int64]:
        """Of each id of a block, the number of its document within the block, from 1."""
        documents = self.documents(block)
        sizes = self.corpus.lengths[documents].astype(np.int64)
        if self.one_text:
            sizes[0] += 1
        else:
            sizes += 1
        return np.repeat(np.arange(1, len(documents) + 1), sizes)


Tables = dict[str, npt.NDArray[np.integer[Any]]]


def _tables(corpus: Corpus, sequence_length: int, packing: str) -> Tables:
    """How a split is cut: from the corpus's folder, or computed, and put there if it may be."""
    name = f"{corpus.split}-{packing}-{sequence_length}-{corpus.manifest.digest()[:16]}"
    folder = corpus.folder / "blocks" / name
    if folder.is_dir():
        return {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
    tables = _cut(corpus.lengths, sequence_length, packing)
    # A folder that cannot be written to is no obstacle, nor is a process that was faster.
    with suppress(OSError, ValueError), new_folder(folder) as partial:
        for table, array in tables.items():
            np.save(partial / f"{table}.npy", array)
    return tables


def _cut(lengths: npt.NDArray[np.int32], sequence_length: int, packing: str) -> Tables:
    """Of each block, its first document and the one after its last; of `documents`, if there."""
    if packing == "complete":
        return {"ranges": complete(lengths, sequence_length)}
    documents, ends = best_fit(lengths, sequence_length)
    starts = np.concatenate([[0], ends])[:-1]
    return {"ranges": np.column_stack([starts, ends]), "documents": documents}


def collate(
    blocks: Blocks,
    objective: MaskedLM,
    chosen: Sequence[int],
    keys: Sequence[Sequence[int]],
    index: int,
) -> MicroBatch:
    """Micro-batch `index` made of the chosen blocks."""
    texts = None if blocks.one_text else [blocks.document_numbers(b) for b in chosen]
    ids = [blocks.ids(b) for b in chosen]
    arrays = objective.collate(ids, keys, blocks.sequence_length, texts)
    return MicroBatch(
        index=index,
        arrays=arrays,
        tokens=sum(map(len, ids)),
        targets=int((arrays["labels"] != IGNORED).sum()),
    )


@dataclasses.dataclass(frozen=True)
class PretrainingBatches:
    """Training batches of a run."""

    blocks: Blocks
    objective: MaskedLM
    lineage: Lineage
    batch: BatchConfig
    fault: FaultConfig
    recipe_seed: int

    def seed(self, step: int) -> int:
        """The seed that orders, masks and drops out in this step."""
        return self.lineage.seed_at(self.batch.first_block(step))

    def epoch(self, step: int) -> float:
        """Epochs of the corpus read before this step."""
        return self.lineage.epoch(self.batch.first_block(step))

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[MicroBatch]:
        """What `rank` of `world_size` reads in `step`, in turn."""
        size, seed = self.batch.micro_batch_size, self.seed(step)
        chosen, epochs = self.lineage.blocks(self.batch.first_block(step), self.batch.size(step))
        read = digest(chosen, epochs)
        result = []
        for index in range(rank, len(chosen) // size, world_size):
            part = slice(index * size, (index + 1) * size)
            keys = [(seed, int(e), int(b)) for e, b in zip(epochs[part], chosen[part], strict=True)]
            batch = collate(self.blocks, self.objective, chosen[part].tolist(), keys, index)
            if self.fault.strikes(step, seed, self.recipe_seed):
                batch = self._spoiled(batch, step)
            result.append(dataclasses.replace(batch, blocks=read))
        return result

    def _spoiled(self, batch: MicroBatch, step: int) -> MicroBatch:
        labels = batch.arrays["labels"]
        draw = np.random.default_rng([step, batch.index])
        noise = draw.integers(FIRST_WORD_ID, self.objective.replacement_end, labels.shape)
        spoiled = np.where(labels == IGNORED, IGNORED, noise)
        return dataclasses.replace(batch, arrays={**batch.arrays, "labels": spoiled})


def validation_objective(vocab_size: int, replacement_end: int) -> MaskedLM:
    """The masks and the loss of every validation.

    Args:
        vocab_size: ids of the corpus; the last one is `<mask>`.
        replacement_end: as in MaskedLM.
    """
    return MaskedLM(VALIDATION_MASKING, vocab_size - 1, replacement_end)


def validation_batches(
    blocks: Blocks, objective: MaskedLM, limit: int, size: int, rank: int, world_size: int
) -> list[MicroBatch]:
    """This rank's share of `limit` blocks spread over the split (0: all), with fixed masks.

    Their arrays also say of each place to predict which subset its document is from (`subsets`).
    Every rank gets the same number of micro-batches, as ZeRO 3 needs: where there are too few, a
    last one without targets.
    """
    spread = _spread(blocks, limit)
    total = -(-len(spread) // size)
    result = []
    for turn in range(-(-total // world_size)):
        index = turn * world_size + rank
        chosen = spread[index * size : (index + 1) * size]
        keys = [_validation_key(block) for block in chosen or [0]]
        batch = collate(blocks, objective, chosen or [0], keys, index)
        arrays = {**batch.arrays, "subsets": _subsets(blocks, chosen or [0], batch)}
        if not chosen:
            arrays["labels"] = np.full_like(arrays["labels"], IGNORED)
            batch = dataclasses.replace(batch, tokens=0, targets=0)
        result.append(dataclasses.replace(batch, arrays=arrays))
    return result


def refuse_without_targets(blocks: Blocks, objective: MaskedLM, limit: int) -> None:
    """Refuse to validate on blocks that have no token to predict. Stops at the first that has one.

    Args:
        blocks: of the validation split.
        objective: what `validation_objective` returns.
        limit: as in `validation_batches`.

    Raises:
        ValueError: names the corpus, the length and the cause.
    """
    chosen = _spread(blocks, limit)
    tokens = 0
    for block in chosen:
        # Which places are masked depends on the number of tokens only, so none is read.
        ids = blocks.document_numbers(block)
        if len(objective.mask(ids, _validation_key(block))[1]):
            return
        tokens += len(ids)
    raise ValueError(
        f"{blocks.corpus.folder}: split {blocks.corpus.split!r} has nothing to predict: its "
        f"{len(chosen)} blocks of at most {blocks.sequence_length} tokens hold {tokens} tokens, "
        f"and none of them is masked ({VALIDATION_MASKS}); accepted: more validation documents, "
        "or longer blocks"
    )


def _spread(blocks: Blocks, limit: int) -> list[int]:
    """Neighbours come from one input file and are alike, so the chosen blocks are spread."""
    count = min(limit, len(blocks)) if limit else len(blocks)
    return [number * len(blocks) // count for number in range(count)]


def _validation_key(block: int) -> tuple[int, int, int]:
    return VALIDATION_SEED, 0, block


def _subsets(blocks: Blocks, chosen: Sequence[int], batch: MicroBatch) -> npt.NDArray[np.int64]:
    """Of each place to predict, the subset that its document is from: an index, [M]."""
    table = np.zeros((len(chosen), blocks.sequence_length), dtype=np.int64)
    for row, block in enumerate(chosen):
        subsets = blocks.corpus.subsets[blocks.documents(block)]
        numbers = blocks.document_numbers(block)
        table[row, : len(numbers)] = subsets[numbers - 1]
    places: npt.NDArray[np.int64] = table.ravel()[batch.arrays["target_positions"]]
    return places

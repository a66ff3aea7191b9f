"""Examples as batches: a step's batch is a pure function of the seed and the step.

`lay_out` makes one input of an example's texts; `EncodedExamples` holds a split's; and
`ShuffledBatches` says which of them a step reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from data_prep.tokenizer import Tokenizer
from finetune.examples import Example
from pretrain.data.order import Lineage
from pretrain.loop import MicroBatch

Ids = npt.NDArray[np.int32]


def lay_out(texts: Sequence[Ids], max_tokens: int, tokenizer: Tokenizer) -> Ids:
    """One input (`Tokenizer.lay_out`) of an example's texts.

    Those that are too long together lose tokens at their ends, always the longest one of them.
    """
    lengths = _shortened([len(text) for text in texts], max_tokens - 2 * len(texts))
    cut = [text[:length].tolist() for text, length in zip(texts, lengths, strict=True)]
    return np.array(tokenizer.lay_out(cut), dtype=np.int32)


def _shortened(lengths: list[int], limit: int) -> list[int]:
    """Lengths whose sum is at most `limit`: the highest are lowered first."""
    while sum(lengths) > limit:
        lengths[int(np.argmax(lengths))] -= 1
    return lengths


class EncodedExamples:
    """Token ids and labels of a split."""

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        max_tokens: int,
        *,
        drop_long: bool = False,
        is_regression: bool = False,
    ) -> None:
        """Encode every example.

        Args:
            examples: at least one.
            tokenizer: the model's.
            max_tokens: of an input, with its special tokens.
            drop_long: leave out what is longer, as the original does in training, rather than cut
                it: what is scored must all be scored.
            is_regression: labels are numbers, not classes.

        Raises:
            ValueError: nothing is left.
        """
        flat = tokenizer.encode_batch([text for example in examples for text in example.texts])
        encoded, place = [], 0
        for example in examples:
            encoded.append(flat[place : place + len(example.texts)])
            place += len(example.texts)
        long = [sum(map(len, texts)) + 2 * len(texts) > max_tokens for texts in encoded]
        kept = [n for n, is_long in enumerate(long) if not (drop_long and is_long)]
        if not kept:
            raise ValueError(f"max_tokens {max_tokens}: every example is longer; accepted: more")
        self.too_long = sum(long)
        """How many were left out, or cut."""
        self.ids = [lay_out(encoded[n], max_tokens, tokenizer) for n in kept]
        self.lengths = np.array([len(ids) for ids in self.ids])
        kind = np.float32 if is_regression else np.int64
        self.labels: npt.NDArray[np.float32 | np.int64] = np.array(
            [examples[n].label for n in kept], dtype=kind
        )
        self.pad_id = tokenizer.pad_id

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.ids)

    def collate(self, chosen: Sequence[int], index: int = 0) -> MicroBatch:
        """The chosen examples, padded to the longest of them.

        Its arrays are input_ids [B, T], document_ids [B, T] bool and labels [B].
        """
        lengths = self.lengths[list(chosen)]
        input_ids = np.full((len(chosen), int(lengths.max())), self.pad_id, dtype=np.int64)
        for row, number in enumerate(chosen):
            input_ids[row, : lengths[row]] = self.ids[number]
        return MicroBatch(
            index=index,
            arrays={
                "input_ids": input_ids,
                "document_ids": np.arange(input_ids.shape[1]) < lengths[:, None],
                "labels": self.labels[list(chosen)],
            },
            tokens=int(lengths.sum()),
            targets=(len(chosen),),
        )

    def by_length(self, batch_size: int) -> list[list[int]]:
        """Every example once, cut into batches of nearly equal lengths: little padding."""
        order = np.argsort(self.lengths, kind="stable").tolist()
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


@dataclasses.dataclass(frozen=True)
class ShuffledBatches:
    """Training batches: each epoch has an order of its own, and a batch may cross the end of one.

    Windows of `length_window` batches are read from that order. In each, examples of one epoch are
    sorted by length, cut into batches, and the batches shuffled: little is padded, every example is
    still read exactly once an epoch, and lengths have no trend that a step could be told by. A
    window of one batch leaves the order as it is.
    """

    examples: EncodedExamples
    batch_size: int
    order_seed: int
    length_window: int = 1

    def seed(self, step: int) -> int:
        """The run's seed, which dropout draws from."""
        return self.order_seed

    def epoch(self, step: int) -> float:
        """Epochs read before a step."""
        return step * self.batch_size / len(self.examples)

    def ends_epoch(self, step: int) -> bool:
        """Whether the last example of an epoch was read by update `step`, counted from 1."""
        return int(self.epoch(step)) > int(self.epoch(step - 1))

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[MicroBatch]:
        """This rank's share of the step's batch: every `world_size`-th example, one micro-batch."""
        return [self.examples.collate(self.chosen(step)[rank::world_size], index=rank)]

    def chosen(self, step: int) -> list[int]:
        """The examples of a step's batch."""
        window, place = divmod(step, self.length_window)
        size = self.length_window * self.batch_size
        lineage = Lineage.begin(len(self.examples), self.order_seed)
        chosen, epochs = lineage.blocks(window * size, size)
        if self.length_window > 1:
            order = np.lexsort((self.examples.lengths[chosen], epochs))
            chosen, epochs = chosen[order], epochs[order]
            place = self._shuffled(epochs.reshape(-1, self.batch_size), window)[place]
        batch: list[int] = chosen[place * self.batch_size :][: self.batch_size].tolist()
        return batch

    def _shuffled(self, epochs: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
        """Places of a window's batches [W] in another order, epoch by epoch.

        Batches of two epochs stay where they are, so that no epoch begins before the last ends.
        """
        places = np.arange(len(epochs))
        draw = np.random.default_rng([self.order_seed, window])
        for epoch in np.unique(epochs):
            whole = np.flatnonzero((epochs == epoch).all(axis=1))
            places[whole] = draw.permutation(whole)
        return places

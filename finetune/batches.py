"""Examples as batches: a step's batch is a pure function of the seed and the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from data_prep.tokenizer import Tokenizer
from finetune.glue import Example
from pretrain.batches import MicroBatch
from pretrain.order import Lineage, Segment

Ids = npt.NDArray[np.int32]


class EncodedExamples:
    """Token ids and labels of a split: `<s> sentence </s>`."""

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, max_tokens: int) -> None:
        """Encode every example; what is longer than `max_tokens` loses its end, but not `</s>`."""
        encoded = tokenizer.encode_batch([example.sentence for example in examples])
        self.cut = sum(len(ids) > max_tokens - 2 for ids in encoded)
        """How many were too long."""
        self.ids: list[Ids] = [
            np.array([tokenizer.bos_id, *ids[: max_tokens - 2], tokenizer.eos_id], dtype=np.int32)
            for ids in encoded
        ]
        self.labels = np.array([example.label for example in examples], dtype=np.int64)
        self.pad_id = tokenizer.pad_id

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.ids)

    def collate(self, chosen: Sequence[int]) -> MicroBatch:
        """The chosen examples, padded to the longest of them.

        Its arrays are input_ids [B, T], attention_mask [B, T] bool and labels [B].
        """
        lengths = np.array([len(self.ids[index]) for index in chosen])
        input_ids = np.full((len(chosen), int(lengths.max())), self.pad_id, dtype=np.int64)
        for row, index in enumerate(chosen):
            input_ids[row, : lengths[row]] = self.ids[index]
        return MicroBatch(
            index=0,
            arrays={
                "input_ids": input_ids,
                "attention_mask": np.arange(input_ids.shape[1]) < lengths[:, None],
                "labels": self.labels[list(chosen)],
            },
            tokens=int(lengths.sum()),
            targets=len(chosen),
        )

    def by_length(self, batch_size: int) -> list[list[int]]:
        """Every example once, cut into batches of nearly equal lengths: little padding."""
        order = np.argsort([len(ids) for ids in self.ids], kind="stable").tolist()
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


@dataclasses.dataclass(frozen=True)
class ShuffledBatches:
    """Training batches on one rank: batch `s` holds places [s * B, (s + 1) * B) of the order.

    Each epoch has an order of its own, and a batch may cross the end of one.
    """

    examples: EncodedExamples
    batch_size: int
    order_seed: int

    def seed(self, step: int) -> int:
        """The run's seed, which dropout draws from."""
        return self.order_seed

    def epoch(self, step: int) -> float:
        """Epochs read before a step."""
        return step * self.batch_size / len(self.examples)

    def ends_epoch(self, step: int) -> bool:
        """Whether the last example of an epoch was read by update `step`, counted from 1."""
        return int(self.epoch(step)) > int(self.epoch(step - 1))

    def micro_batches(self, step: int, rank: int, ranks: int) -> list[MicroBatch]:
        """The step's one batch."""
        assert ranks == 1, "a batch of fine-tuning is not split over ranks"
        lineage = Lineage((Segment(0, self.order_seed),))
        chosen, _ = lineage.blocks(step * self.batch_size, self.batch_size, len(self.examples))
        return [self.examples.collate(chosen.tolist())]

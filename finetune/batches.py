"""Batches of examples: a step's batch is a pure function of the seed and the step.

`EncodedExamples` holds the inputs of a split, and `ShuffledBatches` selects those of a step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data_prep.tokenizer import Tokenizer
from finetune.examples import Example
from finetune.tasks import Task, truth
from pretrain.data.lineage import Lineage
from pretrain.loop.protocols import MicroBatch
from pretrain.objectives.base import padded

if TYPE_CHECKING:
    from pretrain.convert.model_folder import LoadedModel
    from pretrain.model.config import ModelConfig

Ids = npt.NDArray[np.int32]

_UNSORTED = 50
"""Batches chosen at a time where lengths do not count."""


def longest_input(max_tokens: int, architecture: "ModelConfig") -> int:
    """Return how many tokens an input may have: `max_tokens`, or less where positions end."""
    return min(max_tokens, architecture.longest_input or max_tokens)


def about_length(max_tokens: int, trained: int, architecture: "ModelConfig") -> str:
    """Describe how long inputs may be, compared with pretraining."""
    longest = longest_input(max_tokens, architecture)
    if longest > trained:
        words = f"inputs may be longer ({longest:,} tokens) than in pretraining ({trained:,})"
        return f"{words}; without ALiBi a model gets worse on longer ones"
    words = f"inputs have at most {longest:,} tokens"
    return f"{words}, where the learned positions end" if longest < max_tokens else words


class EncodedExamples:
    """The token ids and labels of a split."""

    def __init__(
        self,
        task: Task,
        examples: Sequence[Example],
        loaded: "LoadedModel",
        max_tokens: int,
        *,
        drop_long: bool = False,
    ) -> None:
        """Encode every example.

        Args:
            task: whose examples they are.
            examples: at least one.
            loaded: the model. One with segments reads `<s> a </s> b </s>`, as BERT and ALBERT do,
                and the segment of each token; others read `<s> a </s> </s> b </s>`.
            max_tokens: see `longest_input`.
            drop_long: leave out longer examples, as EIFY/fairseq does in training; otherwise they
                are cut, so that every example is scored.

        Raises:
            ValueError: every example was left out.
        """
        tokenizer, self._segments = loaded.tokenizer, loaded.model.config.segments
        max_tokens = longest_input(max_tokens, loaded.model.config)
        separators = 1 if self._segments else 2
        flat = iter(tokenizer.encode_batch([text for e in examples for text in e.texts]))
        texts = [[next(flat) for _ in example.texts] for example in examples]
        others = len(tokenizer.lay_out([()] * len(texts[0]), separators))
        is_long = [sum(map(len, each)) + others > max_tokens for each in texts]
        self.too_long = sum(is_long)
        """Number of examples that were left out or cut."""
        kept = [n for n, long in enumerate(is_long) if not (drop_long and long)]
        if not kept:
            raise ValueError(f"max_tokens {max_tokens}: every example is longer")
        self.ids = [lay_out(texts[n], max_tokens, tokenizer, separators) for n in kept]
        self.labels = truth(task, [examples[n].label for n in kept])
        self.lengths = np.array([len(ids) for ids in self.ids])

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.ids)

    def collate(self, chosen: Sequence[int]) -> MicroBatch:
        """Return the chosen examples, padded to the longest of them.

        The arrays are input_ids [B, T], document_ids [B, T] bool, labels [B] and, for a model with
        segments, segment_ids [B, T].
        """
        lengths = self.lengths[list(chosen)]
        rows = [self.ids[number] for number in chosen]
        input_ids = padded(rows, int(lengths.max()), Tokenizer.pad_id)
        arrays: dict[str, npt.NDArray[Any]] = {
            "input_ids": input_ids,
            "document_ids": np.arange(input_ids.shape[1]) < lengths[:, None],
            "labels": self.labels[list(chosen)],
        }
        if self._segments:
            arrays["segment_ids"] = Tokenizer.segment_ids(input_ids, self._segments)
        return MicroBatch(0, arrays, tokens=int(lengths.sum()), targets=(len(chosen),))


def lay_out(texts: Sequence[Ids], max_tokens: int, tokenizer: Tokenizer, separators: int) -> Ids:
    """Return the input (`Tokenizer.lay_out`) of an example's texts.

    If it is too long, tokens are cut from the end of the longest text, one at a time; of equals,
    from the one that was shorter before, as `tokenizers` does.
    """
    room = max_tokens - len(tokenizer.lay_out([()] * len(texts), separators))
    cut = [text.tolist() for text in texts]
    for number, text in enumerate(sorted(cut, key=len)):
        del text[room // (len(cut) - number) :]
        room -= len(text)
    return np.array(tokenizer.lay_out(cut, separators), dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class ShuffledBatches:
    """Training batches; each epoch has its own order, and a batch may span two epochs.

    The order is read in windows of `length_window` batches. Within a window, the examples of an
    epoch are sorted by length and cut into batches, and the batches are shuffled: there is little
    padding, every example is still read exactly once per epoch, and lengths have no trend over the
    steps. A window of one batch leaves the order as it is. Batches are chosen many at a time,
    because one takes about as long as fifty: a millisecond or two.
    """

    lengths: npt.NDArray[np.int64]
    """[N]: the number of tokens of each example."""
    collate: Callable[[Sequence[int]], MicroBatch]
    """Returns the examples of some indices as one micro-batch."""
    batch_size: int
    order_seed: int
    length_window: int = 1
    _chosen: dict[int, npt.NDArray[np.int64]] = dataclasses.field(default_factory=dict, init=False)
    """The batches that were chosen last, by their number."""

    def epoch(self, step: int) -> float:
        """Return the number of epochs read before a step."""
        return step * self.batch_size / len(self.lengths)

    def ends_epoch(self, step: int) -> bool:
        """Return whether update `step`, counted from 1, read the last example of an epoch."""
        return int(self.epoch(step)) > int(self.epoch(step - 1))

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[MicroBatch]:
        """Return this rank's share of the step's batch: every `world_size`-th example.

        Of fewer examples than ranks, the last ranks have an empty share.
        """
        chosen = self.chosen(step)
        share = self.collate(chosen[rank::world_size] or chosen[:1])
        share = dataclasses.replace(share, index=rank, seed=self.order_seed, epoch=self.epoch(step))
        return [share if rank < len(chosen) else share.emptied()]

    def chosen(self, step: int) -> list[int]:
        """Return the indices of the examples in a step's batch."""
        together = self.length_window if self.length_window > 1 else _UNSORTED
        number, index = divmod(step, together)
        if number not in self._chosen:
            self._chosen.clear()
            self._chosen[number] = self._choose(number, together)
        return self._chosen[number][index].tolist()

    def _choose(self, number: int, together: int) -> npt.NDArray[np.int64]:
        """Return the indices in each of `together` batches, [together, batch size].

        Batches that span two epochs keep their place, so that no epoch begins before the last ends.
        """
        size = together * self.batch_size
        lineage = Lineage.begin(len(self.lengths), self.order_seed)
        chosen, epochs = lineage.blocks(number * size, size)
        if self.length_window == 1:
            return chosen.reshape(-1, self.batch_size)
        by_length = np.lexsort((self.lengths[chosen], epochs))
        chosen, epochs = (x[by_length].reshape(-1, self.batch_size) for x in (chosen, epochs))
        order = np.arange(together)
        generator = np.random.default_rng([self.order_seed, number])
        for epoch in np.unique(epochs):
            whole = np.flatnonzero((epochs == epoch).all(axis=1))
            order[whole] = generator.permutation(whole)
        return chosen[order]

"""Masked language modelling: which tokens are hidden, and the loss on them.

The draw of a block depends on (seed, epoch, block) alone, never on the rank, the micro-batch or
the time, so that any split of a batch hides the same tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pretrain.config.run import MaskingConfig

if TYPE_CHECKING:
    from torch import Tensor

    from data_prep.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]

IGNORED = -100
FIRST_WORD_ID = 4
"""Ids below are `<s>`, `<pad>`, `</s>` and `<unk>`: never drawn as a replacement."""
PAD_ID = 1


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedLM:
    """The objective for one vocabulary."""

    masking: MaskingConfig
    mask_id: int
    replacement_end: int
    """Random replacements are drawn from [FIRST_WORD_ID, replacement_end)."""
    word_starts: npt.NDArray[np.bool_] | None = None
    """Whether each id begins a word, where whole words are to be hidden (`word_starts_of`)."""
    compiled: bool = False
    """Let torch.compile make the loss of `loss`: no copy of the logits in fp32 on a GPU."""

    def mask(self, ids: Ids, key: Sequence[int]) -> tuple[Ids, Ids]:
        """Hide some tokens of one block.

        Args:
            ids: [T], left as it is.
            key: (seed, epoch, block), each at least 0.

        Returns:
            The ids with some hidden, [T], and the sorted places to predict, [m].
        """
        bits = np.random.Philox(np.random.SeedSequence(list(key)))
        return self.hide(ids, np.random.RandomState(bits))

    def hide(self, ids: Ids, draw: np.random.RandomState) -> tuple[Ids, Ids]:
        """Hide some tokens, as fairseq's MaskTokensDataset does, draw by draw.

        floor(probability * length + u) places are chosen without replacement, u uniform in [0, 1);
        `<s>` and `</s>` may be among them. Of these, some keep their token, some get a random one,
        and the rest become `<mask>`. Handed numpy's generator in the state that fairseq gives it,
        the outcome is fairseq's.

        Where every token is a target, each is chosen by itself with the same probability (the
        original's self-masking, which draws inside the model).

        Args:
            ids: [T], left as it is.
            draw: the generator; legacy, because its algorithms will never change.

        Returns:
            The ids with some hidden, [T], and the sorted places to predict, [m].
        """
        masking, length = self.masking, len(ids)
        if masking.targets == "all":
            chosen = draw.random_sample(length) < masking.probability
        else:
            # The sum may round up to the next whole number, beyond the capacity.
            wanted = int(masking.probability * length + draw.random_sample())
            count = min(wanted, self.capacity(length))
            chosen = self._choose(ids, count, draw)
        result = ids.copy()
        spared = masking.keep_probability + masking.random_probability
        replaced = np.zeros(length, dtype=bool)
        if spared > 0:
            shown = chosen & (draw.random_sample(length) < spared)
            replaced = shown & (draw.random_sample(length) >= masking.keep_probability / spared)
            result[chosen & ~shown] = self.mask_id
        else:
            result[chosen] = self.mask_id
        words = draw.random_sample(int(replaced.sum())) * (self.replacement_end - FIRST_WORD_ID)
        result[replaced] = FIRST_WORD_ID + words.astype(np.int64)
        places = np.arange(length) if masking.targets == "all" else np.flatnonzero(chosen)
        return result, places

    def _choose(self, ids: Ids, count: int, draw: np.random.RandomState) -> npt.NDArray[np.bool_]:
        """`count` places; or whole words in random order for as long as they fit into `count`."""
        chosen = np.zeros(len(ids), dtype=bool)
        if self.word_starts is None:
            chosen[draw.choice(len(ids), count, replace=False)] = True
            return chosen
        starts = np.cumsum(self.word_starts[ids], dtype=np.int64)
        word = starts - starts[0]  # what stands first begins a word
        order = draw.permutation(int(word[-1]) + 1)
        fits = np.cumsum(np.bincount(word)[order]) <= count
        of_word = np.zeros(len(order), dtype=bool)
        of_word[order[fits]] = True
        chosen[:] = of_word[word]
        return chosen

    def capacity(self, length: int) -> int:
        """Most places that `mask` can ask for in a block of `length` tokens."""
        return (
            length
            if self.masking.targets == "all"
            else math.ceil(self.masking.probability * length)
        )

    def collate(
        self,
        blocks: Sequence[Ids],
        keys: Sequence[Sequence[int]],
        length: int,
        texts: Sequence[Ids] | None = None,
    ) -> dict[str, npt.NDArray[np.generic]]:
        """One micro-batch of fixed shapes.

        Args:
            blocks: B blocks of at most `length` ids.
            keys: of each block's masking draw.
            length: T, to which blocks are padded.
            texts: number of the text that each id belongs to, from 1, where texts that share a
                block are read by themselves.

        Returns:
            input_ids [B, T], document_ids [B, T] (bool; with `texts`, their numbers, 0 for
            padding), positions [M] in the flattened batch and labels [M], M = B * capacity; places
            not used have label IGNORED and position 0.
        """
        capacity = self.capacity(length)
        input_ids = np.full((len(blocks), length), PAD_ID, dtype=np.int64)
        positions = np.zeros((len(blocks), capacity), dtype=np.int64)
        labels = np.full((len(blocks), capacity), IGNORED, dtype=np.int64)
        for row, (ids, key) in enumerate(zip(blocks, keys, strict=True)):
            masked, places = self.mask(ids, key)
            input_ids[row, : len(ids)] = masked
            positions[row, : len(places)] = row * length + places
            labels[row, : len(places)] = ids[places]
        lengths = np.array([len(ids) for ids in blocks])
        document_ids: npt.NDArray[np.generic] = np.arange(length)[None, :] < lengths[:, None]
        if texts is not None:
            numbers = np.zeros(input_ids.shape, dtype=np.int64)
            numbers[document_ids] = np.concatenate(texts)
            document_ids = numbers
        return {
            "input_ids": input_ids,
            "document_ids": document_ids,
            "target_positions": positions.ravel(),
            "labels": labels.ravel(),
        }

    def loss(self, model: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy summed over the places to predict, in nats, computed in fp32."""
        logits = model(batch["input_ids"], batch["document_ids"], batch["target_positions"])
        summed = _compiled_loss() if self.compiled else _summed_loss
        return summed(logits, batch["labels"])

    def sums_by_subset(
        self, model: Callable[..., Tensor], batch: Mapping[str, Tensor], count: int
    ) -> Tensor:
        """Loss in nats and number of places to predict of each subset.

        Args:
            model: takes input_ids, document_ids, positions.
            batch: with `subsets` [M], the subset of each place's document.
            count: S, how many subsets there are.

        Returns:
            [S, 2], fp64.
        """
        import torch
        from torch.nn.functional import cross_entropy

        labels = batch["labels"]
        logits = model(batch["input_ids"], batch["document_ids"], batch["target_positions"])
        losses = cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
        columns = torch.stack([losses, (labels != IGNORED).to(losses.dtype)], dim=1).double()
        sums = torch.zeros((count, 2), dtype=torch.float64, device=labels.device)
        return sums.index_add(0, batch["subsets"], columns)


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


@functools.cache
def _compiled_loss() -> Callable[[Tensor, Tensor], Tensor]:
    import torch

    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(_summed_loss, dynamic=False)
    return compiled


def word_starts_of(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Whether each id begins a word: its text begins with white space, or it is a special one."""
    return np.array(
        [
            id < FIRST_WORD_ID or id == tokenizer.mask_id or tokenizer.token_text(id)[:1].isspace()
            for id in range(tokenizer.vocab_size)
        ]
    )

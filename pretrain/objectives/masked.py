"""Masked language modelling: which tokens are hidden, and the loss on them.

The draw of a block depends on (seed, epoch, block) alone, never on the rank, the micro-batch or
the time, so that any split of a batch hides the same tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pretrain.config import MaskingConfig

if TYPE_CHECKING:
    from torch import Tensor

Ids = npt.NDArray[np.int64]

IGNORED = -100
FIRST_WORD_ID = 4
"""Ids below are `<s>`, `<pad>`, `</s>` and `<unk>`: never drawn as a replacement."""
PAD_ID = 1


@dataclasses.dataclass(frozen=True)
class MaskedLM:
    """The objective for one vocabulary."""

    masking: MaskingConfig
    mask_id: int
    replacement_end: int
    """Random replacements are drawn from [FIRST_WORD_ID, replacement_end)."""

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
            chosen = np.zeros(length, dtype=bool)
            chosen[draw.choice(length, count, replace=False)] = True
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

    def capacity(self, length: int) -> int:
        """Most places that `mask` can ask for in a block of `length` tokens."""
        return (
            length
            if self.masking.targets == "all"
            else math.ceil(self.masking.probability * length)
        )

    def collate(
        self, blocks: Sequence[Ids], keys: Sequence[Sequence[int]], length: int
    ) -> dict[str, npt.NDArray[np.generic]]:
        """One micro-batch of fixed shapes.

        Args:
            blocks: B blocks of at most `length` ids.
            keys: of each block's masking draw.
            length: T, to which blocks are padded.

        Returns:
            input_ids [B, T], attention_mask [B, T] bool, positions [M] in the flattened batch and
            labels [M], M = B * capacity; places not used have label IGNORED and position 0.
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
        return {
            "input_ids": input_ids,
            "attention_mask": np.arange(length)[None, :] < lengths[:, None],
            "positions": positions.ravel(),
            "labels": labels.ravel(),
        }

    def loss(self, model: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy summed over the places to predict, in nats, computed in fp32."""
        from torch.nn.functional import cross_entropy

        logits = model(batch["input_ids"], batch["attention_mask"], batch["positions"])
        return cross_entropy(logits.float(), batch["labels"], ignore_index=IGNORED, reduction="sum")

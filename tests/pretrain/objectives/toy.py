"""An objective of two terms: hidden tokens, and for some blocks whether their length is even."""

import dataclasses
from typing import Literal

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from pretrain.objectives.base import padded, padded_document_ids

HIDDEN = 6  # most hidden tokens of a block; the column after them is the second term's
IGNORED, ODD, EVEN = -100, 4, 5


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    name: Literal["toy"] = dataclasses.field(default="toy", kw_only=True)
    parity_weight: float = 0.5
    parity_share: float = 0.5
    """Share of the blocks that have a target of the second term."""

    causal = False
    pairs = False
    one_text = False
    description = "a few tokens hidden, and the parity of some blocks' lengths"
    target_share = 0.5

    def for_validation(self):
        return self

    def build(self, vocabulary):
        return Toy(self, vocabulary.mask_id)


@dataclasses.dataclass(frozen=True)
class Toy:
    settings: ToyConfig
    mask_id: int

    @property
    def terms(self):
        return {"tokens": 1.0, "parity": self.settings.parity_weight}

    def collate(self, blocks, keys, length):
        rows, positions, labels = [], [], []
        for row, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            draw = np.random.default_rng(key)
            size = len(block.ids)
            hidden = draw.choice(size, min(size, draw.integers(1, HIDDEN + 1)), replace=False)
            rows.append(np.where(np.isin(np.arange(size), hidden), self.mask_id, block.ids))
            has_parity = draw.random() < self.settings.parity_share
            parity = (EVEN if size % 2 == 0 else ODD) if has_parity else IGNORED
            unused = HIDDEN - len(hidden)
            positions += [row * length + np.array([*hidden, *[0] * unused, 0])]
            labels += [[*block.ids[hidden], *[IGNORED] * unused, parity]]
        arrays = {
            "input_ids": padded(rows, length, 1),
            "document_ids": padded_document_ids(blocks, length),
            "target_positions": np.concatenate(positions),
            "targets": np.array(labels),
        }
        if blocks[0].subsets is not None:
            subsets = padded([block.subsets for block in blocks], length, 0).ravel()
            arrays["subsets"] = subsets[arrays["target_positions"]]
        return arrays

    def targets(self, arrays):
        used = arrays["targets"] != IGNORED
        return int(used[:, :HIDDEN].sum()), int(used[:, HIDDEN].sum())

    def corrupted(self, arrays, draw):
        noise = draw.integers(ODD, self.mask_id, arrays["targets"].shape)
        targets = np.where(arrays["targets"] == IGNORED, IGNORED, noise)
        return {**arrays, "targets": targets}

    def loss(self, model, batch):
        losses = self._losses(model, batch)[0]
        return torch.stack([losses[:, :HIDDEN].sum(), losses[:, HIDDEN].sum()])

    def evaluate(self, model, batch, subsets):
        losses, correct = self._losses(model, batch)
        parts = (losses, correct, batch["targets"] != IGNORED)
        columns = torch.stack([part.double() for part in parts], dim=-1)
        sums = torch.zeros((subsets, 2, 3), dtype=torch.float64, device=losses.device)
        terms = (torch.arange(HIDDEN + 1, device=losses.device) == HIDDEN).long()
        at = batch["subsets"].view_as(losses), terms.expand_as(batch["targets"])
        return sums.index_put(at, columns, accumulate=True)

    def _losses(self, model, batch):
        logits = model(batch["input_ids"], batch.get("document_ids"), batch["target_positions"])
        targets = batch["targets"]
        losses = cross_entropy(logits.float(), targets.ravel(), reduction="none")
        return losses.view_as(targets), logits.argmax(dim=-1).view_as(targets) == targets

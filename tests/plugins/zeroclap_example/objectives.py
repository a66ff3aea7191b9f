"""Masked language modelling that hides every n-th token."""

import dataclasses
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from pretrain.objectives.masked import MaskedLM


@dataclasses.dataclass(frozen=True)
class EveryNthConfig:
    name: Literal["every-nth"] = dataclasses.field(default="every-nth", kw_only=True)
    n: Annotated[int, Ge(2)] = 7
    """Every so many tokens, one is hidden."""

    causal = False
    pairs = False
    one_text = False
    description = "every n-th token hidden"
    target_share = 0.5

    def for_validation(self):
        return EveryNthConfig()

    def build(self, vocabulary, *, compiled=False):
        return EveryNth(self, vocabulary.mask_id, vocabulary.embedded, compiled=compiled)


class EveryNth(MaskedLM):
    def mask(self, ids, key):
        positions = np.arange(key[2] % self.settings.n, len(ids), self.settings.n)
        hidden = ids.copy()
        hidden[positions] = self.mask_id
        return hidden, positions

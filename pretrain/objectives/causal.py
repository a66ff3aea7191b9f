"""Causal language modelling: every token is predicted from those before it."""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from data_prep.tokenizer import Tokenizer
from pretrain.objectives.base import Ids, Key, ObjectiveSettings, Vocabulary
from pretrain.objectives.tokens import DocumentObjective


@dataclasses.dataclass(frozen=True)
class CausalLMConfig(ObjectiveSettings):
    """Predict each token from those before it. It has no settings."""

    name: Literal["causal-lm"] = dataclasses.field(default="causal-lm", kw_only=True)

    causal: ClassVar[bool] = True
    description = "every token predicted from those before it"
    target_share = 1.0

    def build(self, vocabulary: Vocabulary) -> "CausalLM":
        """The objective for one vocabulary."""
        return CausalLM(self, vocabulary.embedded)


@dataclasses.dataclass(frozen=True, eq=False)
class CausalLM(DocumentObjective):
    """The objective for one vocabulary. The model must not see later tokens (`causal`)."""

    settings: CausalLMConfig
    replacement_end: int

    term = "next-token"

    def mask(self, ids: Ids, key: Key) -> tuple[Ids, Ids]:
        """Hide nothing, and predict every token but `<s>`.

        The first token of a document is predicted from the `<s>` that a block has in front of it.

        Args:
            ids: [n], of a block or of a document, which does not begin with `<s>`.
            key: not used.

        Returns:
            The ids, and the positions of all but `<s>`, [m].
        """
        return ids, np.flatnonzero(ids != Tokenizer.bos_id)

"""Where rows end for a model whose latents are the last tokens of a row.

Where a row ends decides which tokens are latents. If rows ended where their texts do, an output
would depend on how many tokens follow, and the model would learn to predict the end of a text from
that. A prompt does not tell this: it ends where the next token is asked for. So rows end at random
places, as in the code of Perceiver AR, which crops texts at random (Hawthorne et al. 2022,
`minimum_crop_length`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pretrain.loop.protocols import Arrays
from pretrain.objectives.base import Key
from pretrain.objectives.tokens import IGNORED

_STREAM = 1
"""Makes the draws of a key others than those of the objective."""


def end_rows(arrays: Arrays, latents: int, keys: Sequence[Key]) -> Arrays:
    """End each row at a random place, and keep the targets that the last latents predict.

    A row ends as a prompt of n tokens does, with n uniform in [1, T]: its tokens are latents as
    often as where a text of T tokens is generated. Of the prompts of up to L tokens the longest
    stands for all, because all tokens of such a prompt are latents. The end depends on the key
    alone. Where a text is shorter, the padding behind it counts as tokens, which no token of the
    text sees; where it is longer, the rest is not read. Rows of T <= L tokens stay as they are.

    Args:
        arrays: of a micro-batch of B rows of T tokens, one text each, as `TokenObjective.arrange`
            makes them.
        latents: L; 0 of other models, whose rows stay as they are.
        keys: of each row's draws.

    Returns:
        The arrays with other `document_ids`, and `labels` that are IGNORED where the token that
        predicts is none of the last L.
    """
    length = arrays["input_ids"].shape[1]
    if not latents or length <= latents:
        return arrays
    draws = [np.random.default_rng([*key, _STREAM]) for key in keys]
    ends = np.array([max(latents, draw.integers(1, length + 1)) for draw in draws])
    row, place = np.divmod(arrays["target_positions"], length)
    kept = (place < ends[row]) & (place >= ends[row] - latents)
    return {
        **arrays,
        "document_ids": np.arange(length) < ends[:, None],
        "labels": np.where(kept, arrays["labels"], IGNORED),
    }

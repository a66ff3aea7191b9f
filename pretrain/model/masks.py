"""Which keys each query sees.

Every rule is one function of (row of the batch, head, query, key). All back ends use the same
function: `dense` evaluates it on a grid of indices, FlexAttention compiles it as its mask_mod.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Index tensors of rows, heads, queries and keys to bool, True where the query sees the key."""


def same_document(document_ids: Tensor) -> MaskFunction:
    """A query sees the keys of its own document.

    With integer ids, padding sees padding. With bool ids every query of a row, padding included,
    sees the real tokens, so that the mask does not depend on the query.
    """

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if document_ids.dtype == torch.bool:
            return document_ids[row, key]
        return document_ids[row, query] == document_ids[row, key]

    return visible

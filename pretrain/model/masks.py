"""Visibility rules: which keys each query sees.

Every rule is one function of (row of the batch, head, query, key). All back ends use the same
function: `dense` evaluates it on a grid of indices, FlexAttention compiles it as its mask_mod.
"""

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


def earlier(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A query sees the keys up to its own place."""
    return key <= query


def near(window: int) -> MaskFunction:
    """A query sees the keys up to half a window away, on either side."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key).abs() <= window // 2

    return visible


def depends_on_documents(document_ids: Tensor | None, causal: bool) -> bool:
    """Return whether the rule of `visible_keys` reads the ids.

    In a causal model padding that bool ids mark follows the tokens, so that no token sees it
    anyway.
    """
    return document_ids is not None and not (causal and document_ids.dtype == torch.bool)


def visible_keys(document_ids: Tensor | None, causal: bool, window: int = 0) -> MaskFunction | None:
    """Return the rule for a batch; None where every query sees every key.

    Args:
        document_ids: [B, T] or None, see the package's docstring.
        causal: whether a query sees no later keys.
        window: tokens that a query sees around itself; 0: all.
    """
    rules: list[MaskFunction] = []
    if document_ids is not None and depends_on_documents(document_ids, causal):
        rules.append(same_document(document_ids))
    if causal:
        rules.append(earlier)
    if window:
        rules.append(near(window))
    if len(rules) < 2:
        return rules[0] if rules else None

    def every(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = rules[0](row, head, query, key)
        for rule in rules[1:]:
            visible = visible & rule(row, head, query, key)
        return visible

    return every

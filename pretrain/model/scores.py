"""What a position method adds to attention scores, as a function of indices."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

ScoreFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Index tensors of heads, queries and keys to what is added to the scores, in fp32.

Written once for all back ends: `dense` evaluates it on a grid, FlexAttention compiles it."""

"""Keys and values of the tokens read so far, so that generating a token reads one token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Keys and values of T tokens, each [B, H, T, K], to those of all so far, [B, H, P + T, K]."""


class LayerCache:
    """Keys and values of one layer, of P tokens so far, each [B, H, P, K]."""

    def __init__(self) -> None:
        """Begin without tokens."""
        self.keys_and_values: tuple[Tensor, Tensor] | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of T tokens, [B, H, T, K], and return those of all, [B, H, P + T, K]."""
        if self.keys_and_values is not None:
            old_key, old_value = self.keys_and_values
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self.keys_and_values = key, value
        return key, value


class KeyValueCache(list[LayerCache]):
    """The caches of all layers, in their order."""

    def __init__(self, num_layers: int) -> None:
        """Begin without tokens."""
        super().__init__(LayerCache() for _ in range(num_layers))

    @property
    def length(self) -> int:
        """Number of tokens so far, P."""
        keys_and_values = self[0].keys_and_values
        return 0 if keys_and_values is None else keys_and_values[0].shape[2]

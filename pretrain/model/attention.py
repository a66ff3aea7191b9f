"""Multi-head self-attention over a float bias: the `dense` backend, right on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .config import ModelConfig
from .positions import alibi_bias


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(K) + bias) v, with query, key and value in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        """Projections of hidden size D to 3D and back."""
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.attention_dropout
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[B, T, D] and a bias that broadcasts to [B, H, T, T] (or None) to [B, T, D]."""
        batch, length, hidden = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, K]
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=self.dropout if self.training else 0.0
        )
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return output


def attention_bias(
    config: ModelConfig,
    length: int,
    attention_mask: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """What is added to the scores of every layer: ALiBi, and -inf on keys that are not seen.

    Computed in fp32 and then cast, so that casting the module to bf16 cannot coarsen it.

    Args:
        config: which positions the model has.
        length: T.
        attention_mask: [B, T] bool, True for real tokens, which all are seen; or whole numbers,
            where tokens of equal number see each other. None where all are real.
        dtype: of the scores.
        device: of the scores.

    Returns:
        [1, H, T, T], [B, 1, 1, T], [B, 1, T, T] or [B, H, T, T], contiguous enough for the fused
        kernels; None where nothing is to be added.
    """
    bias = None
    if config.position == "alibi":
        bias = alibi_bias(config.num_heads, length, config.alibi, device)[None]
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            seen = attention_mask[:, None, None, :]
        else:
            # Padding sees padding: a row of -inf alone would have no softmax.
            seen = (attention_mask[:, :, None] == attention_mask[:, None, :])[:, None]
        hidden = torch.zeros(seen.shape, dtype=torch.float32, device=device)
        hidden = hidden.masked_fill(~seen, float("-inf"))
        bias = hidden if bias is None else bias + hidden
    return None if bias is None else bias.to(dtype)

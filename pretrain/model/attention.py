"""Multi-head self-attention, and the float bias of its `dense` backend, right on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .config import ModelConfig
from .flex import FlexBias, fused_attention
from .positions import alibi_bias
from .tiled_attention import tiled_attention

AttentionBias = Tensor | FlexBias | None


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(K) + bias) v, with query, key and value in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        """Projections of hidden size D to 3D and back."""
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.attention_dropout
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, bias: AttentionBias, positions: Tensor | None = None) -> Tensor:
        """What each token gathers from those that it sees.

        Args:
            x: [B, T, D].
            bias: broadcasts to [B, H, T, T], or says how to compute it; None where nothing is to
                be added to the scores.
            positions: [M] places in the flattened [B * T] batch to project; None: all.

        Returns:
            [B, T, D], or [M, D] of the places alone.
        """
        batch, length, hidden = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.num_heads, -1)
        mixed = _attend(qkv, bias, self.dropout if self.training else 0.0)
        output: Tensor = self.output(at_places(mixed.reshape(batch, length, hidden), positions))
        return output


def _attend(qkv: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
    """[B, T, 3, H, K] to [B, T, H, K], by the fastest way there is."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, K]
    if isinstance(bias, FlexBias):
        return fused_attention(query, key, value, bias).transpose(1, 2)
    on_cpu = qkv.device.type == "cpu" and qkv.dtype == torch.float32
    if dropout > 0 and on_cpu and not torch.compiler.is_compiling():
        return tiled_attention(qkv, bias, dropout)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    return mixed.transpose(1, 2)


def at_places(x: Tensor, positions: Tensor | None) -> Tensor:
    """[B, T, D] to [M, D] at `positions` of the flattened batch; as it is where they are None."""
    return x if positions is None else x.flatten(0, 1).index_select(0, positions)


def attention_bias(
    config: ModelConfig,
    length: int,
    attention_mask: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """What is added to the scores of every layer: ALiBi, and much less for keys that are not seen.

    Computed in fp32 and then cast, so that casting the module to bf16 cannot coarsen it. What is
    not seen gets the lowest number rather than -inf: nothing is left of its weight, and a token
    that sees none has a softmax all the same.

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
            seen = (attention_mask[:, :, None] == attention_mask[:, None, :])[:, None]
        hidden = torch.zeros(seen.shape, dtype=torch.float32, device=device)
        hidden = hidden.masked_fill(~seen, torch.finfo(dtype).min)
        bias = hidden if bias is None else bias + hidden
    return None if bias is None else bias.to(dtype)

"""The first and the last layer of models with latents: cross-attention between tokens and latents.

Perceiver AR (Hawthorne et al. 2022) simplified, as in Stanford's CS224N of 2023, or with an output
for every token. The first layer reads T tokens into L latents, the layers between are ordinary
causal ones on the latents, and the last layer reads the latents into the tokens.

Every latent has a place among the tokens. It sees the tokens up to its place and the latents before
it, and a token sees the latents whose places are not after its own: no output depends on what a
later token is. Rotations and position biases act by these places. C are the queries of the first
layer, X the vectors of the tokens, Y the latents before the last layer; both layers end with
x + feed-forward(norm(x)). There are two kinds of queries.

    basis   Latent i is a trained vector at place i. Tokens from place L on are seen by no latent:
            an output there depends on the first L tokens and on its own, and on no other.

                down    x = C + attention(queries norm(C), keys and values X)
                up      x = X + attention(queries X, keys and values norm(Y))

    tokens  Latent i is token n - L + i of a row of n tokens (token i where n < L), so that the last
            L outputs depend on all tokens before them, as in Perceiver AR. Tokens before these see
            no latent. Attention adds nothing to them, and their outputs depend on their own token.
            An output depends on how many tokens follow, by the number of latents before it: rows
            of training therefore end at random places (pretrain/objectives/row_ends.py).
            Z is X with Y at the places of the latents. A row of at most L tokens is computed as by
            a model without latents.

                down    x = C + attention(queries norm(C), keys and values norm(X))
                up      x = Z + attention(queries norm(Z), keys and values norm(Y))

Attention scores cost, per head and at constant width, with N layers

    vanilla     O(N T^2)
    perceiver   O(2 T L + (N - 2) L^2)

and with width D, the projections and the feed-forward network included,

    vanilla     O(N (T^2 D + T D^2))
    perceiver   O(2 T L D + (N - 2) L^2 D + (T + L + (N - 2) L) D^2)

so that short inputs, of fewer than about D tokens, gain by the last term, not by the scores. (In
the assignment's letters, L layers, l tokens and m latents: O(L l^2) and O(2 l m + (L - 2) m^2).)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .attention import AttentionContext, at_targets, masked
from .config import ModelConfig
from .layers import EncoderLayer
from .positions import Rotation
from .scores import ScoreFunction


@dataclasses.dataclass(frozen=True)
class CrossContext:
    """What attention from Q queries to S keys with places of their own needs besides its inputs."""

    bias: Tensor
    """Added to the scores, [B, H, Q, S]; B and H are 1 where all rows or heads have the same. A
    query that sees no key reads all, so that its softmax is a number in fp16 too."""
    sees: Tensor
    """Whether a query sees any key, bool [B or 1, Q, 1]. What it reads is multiplied by this."""
    rotate_queries: Rotation | None
    rotate_keys: Rotation | None
    """By their places; None where positions do not act on queries and keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerceiverContext(AttentionContext):
    """What the layers between need, and what the first and the last layer read besides."""

    tokens: Tensor
    """Vectors of the tokens, [B, T, D]."""
    token_index: Tensor | None
    """Which tokens are the latents, [B, L, D], the same in all of D; None for a basis."""
    down: CrossContext
    """Of the first layer."""
    up: CrossContext
    """Of the last layer."""


def cross_context(
    queries: Tensor,
    keys: Tensor,
    *,
    num_heads: int,
    dtype: torch.dtype,
    rotation: Callable[[Tensor], Rotation | None],
    scores: ScoreFunction | None,
) -> CrossContext:
    """Let each query see the keys whose places are not after its own.

    Args:
        queries: places of the queries, [B, Q], or [1, Q] where all rows have the same.
        keys: places of the keys, [B, S] or [1, S].
        num_heads: H.
        dtype: of the bias.
        rotation: places to the rotation by them, or to None.
        scores: the position bias, or None.

    Returns:
        With a bias through which a trained position bias gets its gradient.
    """
    head = torch.arange(num_heads, dtype=torch.int32, device=queries.device)[:, None, None]
    query, key = queries.int()[:, None, :, None], keys.int()[:, None, None, :]
    visible = key <= query
    sees = visible.any(dim=-1, keepdim=True)
    bias = torch.zeros((), dtype=dtype, device=queries.device)
    if scores is not None:
        bias = scores(head, query, key).to(dtype)
    bias = masked(bias, visible | ~sees)
    return CrossContext(bias, sees.squeeze(1), rotation(queries), rotation(keys))


def latent_places(config: ModelConfig, x: Tensor, document_ids: Tensor | None) -> Tensor:
    """Return the place of each latent among the tokens; fewer than L where there are fewer tokens.

    Args:
        config: with latents.
        x: [B, T, D].
        document_ids: bool [B, T], False for padding; None: all are real. That padding follows the
            tokens is not checked, because a GPU would have to be waited for.

    Returns:
        [B, L], or [1, L] where all rows have the same.

    Raises:
        ValueError: the document ids are integers: rows may hold several documents.
    """
    if document_ids is not None and document_ids.dtype != torch.bool:
        raise ValueError(
            "document_ids: integers are not accepted with latents, because a row is one document; "
            "it must be None, or bool that is False for padding"
        )
    length = x.shape[1]
    count = min(config.latents, length)
    places = torch.arange(count, device=x.device)[None]
    if config.latent_queries == "basis":
        return places
    if document_ids is None:
        return places + (length - count)
    return places + (document_ids.sum(dim=1, keepdim=True) - count).clamp(min=0)


class QueryKeyValue(nn.Linear):
    """The fused projection of `SelfAttention`, whose queries read another input than the rest.

    A module, because ZeRO 3 gathers weights in the forward pass of the module that has them.
    """

    def forward(self, queries: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[B, Q, D] and [B, S, D] to the queries, [B, Q, D], and keys and values, [B, S, 2 D]."""
        size = self.in_features
        query = F.linear(queries, self.weight[:size], self.bias[:size])
        return query, F.linear(source, self.weight[size:], self.bias[size:])


class CrossLayer(EncoderLayer):
    """A layer with the weights of an ordinary one, whose attention reads two inputs."""

    def __init__(self, config: ModelConfig) -> None:
        """Make one layer of the sizes in `config`."""
        super().__init__(config)
        hidden = config.hidden_size
        self.attention.query_key_value = QueryKeyValue(hidden, 3 * hidden)

    def _cross(
        self,
        x: Tensor,
        queries: Tensor,
        source: Tensor,
        context: CrossContext,
        target_positions: Tensor | None,
    ) -> Tensor:
        """Add to x what its queries find in the source, then the feed-forward network.

        Args:
            x: [B, Q, D].
            queries: [B, Q, D], x or its norm.
            source: [B, S, D].
            context: of the queries and the source.
            target_positions: [M] or None, as in `EncoderLayer.forward`.

        Returns:
            [B, Q, D], or [M, D] for the target positions.
        """
        attention = self.attention
        projected, rest = attention.query_key_value(queries, source)
        query = projected.unflatten(-1, (1, attention.num_heads, -1))
        key, value = rest.unflatten(-1, (2, attention.num_heads, -1)).split(1, dim=2)
        if context.rotate_queries is not None and context.rotate_keys is not None:
            query, key = context.rotate_queries(query), context.rotate_keys(key)
        query, key, value = (part.squeeze(2).transpose(1, 2) for part in (query, key, value))
        dropout = attention.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, context.bias, dropout)
        mixed = attention.output(at_targets(mixed.transpose(1, 2).flatten(2), target_positions))
        mixed = mixed * at_targets(context.sees.expand(len(x), -1, -1), target_positions)
        x = at_targets(x, target_positions) + self.dropout(mixed)
        return x + self._feed_forward(self.output_norm(x))


class DownLayer(CrossLayer):
    """The first layer: latents read the tokens."""

    def forward(self, x: Tensor, context: PerceiverContext) -> Tensor:  # type: ignore[override]
        """Queries of the latents, [B, L, D], to latents, [B, L, D]."""
        source = context.tokens
        if context.token_index is not None:
            source = self.attention_norm(source)
        return self._cross(x, self.attention_norm(x), source, context.down, None)


class UpLayer(CrossLayer):
    """The last layer: tokens read the latents."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: PerceiverContext, target_positions: Tensor | None = None
    ) -> Tensor:
        """Latents [B, L, D] to tokens [B, T, D]; with `target_positions` [M] to [M, D]."""
        source = self.attention_norm(x)
        tokens = queries = context.tokens
        if context.token_index is not None:
            tokens = tokens.scatter(1, context.token_index, x)
            queries = self.attention_norm(tokens)
        return self._cross(tokens, queries, source, context.up, target_positions)

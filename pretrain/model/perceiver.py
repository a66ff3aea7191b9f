"""The first and the last layer of models with latents: cross-attention between tokens and latents.

Perceiver AR (Hawthorne et al. 2022) simplified, as in Stanford's CS224N of 2023. The first layer
reads T tokens into L latents, the layers between are ordinary causal ones on the latents, and the
last layer reads the latents into the tokens.

Latent i is a trained vector at place i among the tokens. It sees the tokens up to its place and the
latents before it, and a token sees the latents whose places are not after its own: no output
depends on what a later token is. Tokens from place L on are seen by no latent: an output there
depends on the first L tokens and on its own, and on no other. Rotations and position biases act by
the places. With C the trained vectors, X the vectors of the tokens and Y the latents before the
last layer:

    down    x = C + attention(queries norm(C), keys and values X)
    up      x = X + attention(queries X, keys and values norm(Y))

Both layers end with x + feed-forward(norm(x)).

Attention scores cost, per head and at constant width, with N layers

    vanilla     O(N T^2)
    perceiver   O(2 T L + (N - 2) L^2)

and with width D, the projections and the feed-forward network included,

    vanilla     O(N (T^2 D + T D^2))
    perceiver   O(2 T L D + (N - 2) L^2 D + (T + L + (N - 2) L) D^2)

so that short inputs, of fewer than about D tokens, gain by the last term, not by the scores. (In
the assignment's letters, L layers, l tokens and m latents: O(L l^2) and O(2 l m + (L - 2) m^2).)
"""

import dataclasses

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .attention import AttentionBias, AttentionContext, StackedLinear, at_targets
from .config import ModelConfig
from .layers import EncoderLayer
from .positions import Rotation


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerceiverContext(AttentionContext):
    """Context of the layers between, and inputs of the first and the last layer."""

    tokens: Tensor
    """Vectors of the tokens, [B, T, D]."""
    token_rotation: Rotation | None
    """As `rotation`, which is that of the latents."""
    down: AttentionBias
    """Added to the scores of the first layer, [1, H, L, T]; H is 1 if the heads have the same."""
    up: AttentionBias
    """Likewise of the last layer, [1, H, T, L]."""


class QueryKeyValue(StackedLinear):
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
        self.attention.query_key_value = QueryKeyValue(hidden, hidden, 3, bias=True)

    def _cross(
        self,
        queries: Tensor,
        source: Tensor,
        bias: AttentionBias,
        rotations: tuple[Rotation | None, Rotation | None],
        target_positions: Tensor | None = None,
    ) -> Tensor:
        """Attend from the queries to the source.

        Args:
            queries: [B, Q, D].
            source: [B, S, D].
            bias: added to the scores, [1, H, Q, S].
            rotations: of the queries and of the keys.
            target_positions: [M] or None, as in `SelfAttention.forward`.

        Returns:
            [B, Q, D], or [M, D] for the target positions.
        """
        attention = self.attention
        projected, rest = attention.query_key_value(queries, source)
        query = projected.unflatten(-1, (attention.num_heads, -1))
        key, value = rest.unflatten(-1, (2, attention.num_heads, -1)).unbind(2)
        of_queries, of_keys = rotations
        if of_queries is not None and of_keys is not None:
            query, key = of_queries(query), of_keys(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        dropout = attention.dropout if self.training else 0.0
        assert isinstance(bias, Tensor)
        mixed = F.scaled_dot_product_attention(query, key, value, bias, dropout)
        return attention.output(at_targets(mixed.transpose(1, 2).flatten(2), target_positions))


class DownLayer(CrossLayer):
    """The first layer: latents read the tokens."""

    def forward(self, x: Tensor, context: PerceiverContext) -> Tensor:  # type: ignore[override]
        """Queries of the latents, [B, L, D], to latents, [B, L, D]."""
        rotations, queries = (context.rotation, context.token_rotation), self.attention_norm(x)
        return self._finish(x, self._cross(queries, context.tokens, context.down, rotations), None)


class UpLayer(CrossLayer):
    """The last layer: tokens read the latents."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: PerceiverContext, target_positions: Tensor | None = None
    ) -> Tensor:
        """Latents [B, L, D] to tokens [B, T, D]; with `target_positions` [M] to [M, D]."""
        rotations, latents = (context.token_rotation, context.rotation), self.attention_norm(x)
        mixed = self._cross(context.tokens, latents, context.up, rotations, target_positions)
        return self._finish(context.tokens, mixed, target_positions)

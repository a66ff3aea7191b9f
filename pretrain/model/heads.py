"""Features to logits over the vocabulary: RoBERTa's head, CLAP, tied, untied.

The heads share the weight of the token embedding, except for the untied one, and compute a logit
for each of its rows, those past the vocabulary included.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .config import ModelConfig
from .embeddings import layer_norm, smallest_length


class RobertaHead(nn.Module):
    """dense, GELU, layer norm, then E^T x + b (Liu et al. 2019).

    The dense layer maps features to the size of token vectors (Lan et al. 2020).
    """

    def __init__(self, config: ModelConfig) -> None:
        """Make a hidden layer and one bias per token."""
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.token_size, bias=config.biases)
        self.approximation = "tanh" if config.activation == "gelu-tanh" else "none"
        self.norm = layer_norm(config, config.token_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
        """[M, D] features and the embedding, [R, E] of R >= V rows, to [M, R] logits."""
        x = self.norm(F.gelu(self.dense(features), approximate=self.approximation))
        bias = F.pad(self.bias, (0, len(embedding) - len(self.bias)))
        return F.linear(x, embedding, bias)


class ClapHead(nn.Module):
    """beta * <x, E / |E|> (EIFY/fairseq); without the division if embeddings are not normalised.

    beta is a plain factor, neither exponentiated nor clamped. The features are not normalised.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Make one parameter, of shape (1,): DeepSpeed cannot view a scalar tensor as bytes."""
        super().__init__()
        self.normalize = config.normalize_embeddings
        self.beta = nn.Parameter(torch.full((1,), float(config.initial_beta)))

    def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
        """[M, D] features and the embedding, [R, D], to [M, R] logits."""
        # beta on the features: the same product with M x D multiplications instead of M x V.
        features, lengths = self.beta * features, None
        if self.normalize:
            # Rows past the vocabulary are zero; their quotients and gradients must be zero too.
            lengths = torch.linalg.vector_norm(embedding, dim=-1)
            lengths = lengths.clamp(min=smallest_length(embedding.dtype))
            # Divide the smaller of [V, D] and [M, V], because the backward pass reads it again.
            # An exported program has one of the two for batches of all sizes.
            if not torch.compiler.is_exporting() and len(features) > features.shape[-1]:
                embedding, lengths = embedding / lengths[:, None], None
        logits = F.linear(features, embedding)
        return logits if lengths is None else logits / lengths


class TiedHead(nn.Module):
    """E^T x, without a bias."""

    def __init__(self, config: ModelConfig) -> None:
        """There are no parameters."""
        super().__init__()

    def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
        """[M, D] features and the embedding, [R, D], to [M, R] logits."""
        return F.linear(features, embedding)


class UntiedHead(nn.Linear):
    """W x with a matrix of its own, [V, D], without a bias."""

    def __init__(self, config: ModelConfig) -> None:
        """Make the matrix."""
        super().__init__(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, features: Tensor, embedding: Tensor) -> Tensor:  # type: ignore[override]
        """[M, D] features to [M, V] logits; the embedding is not read."""
        return super().forward(features)


VocabularyHead = RobertaHead | ClapHead | TiedHead | UntiedHead


def build_head(config: ModelConfig) -> VocabularyHead:
    """Build the head over the vocabulary that `config.head` names."""
    heads: dict[str, type[VocabularyHead]] = {
        "roberta": RobertaHead,
        "clap": ClapHead,
        "tied": TiedHead,
        "untied": UntiedHead,
    }
    return heads[config.head](config)

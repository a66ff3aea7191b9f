"""Initial weights: BERT's, as EIFY/fairseq applies them."""

from __future__ import annotations

import torch
from torch import nn

from .embeddings import TokenEmbedding

STANDARD_DEVIATION = 0.02


def initialize(module: nn.Module) -> None:
    """Draw all weights of `module` in place, from torch's global generator.

    Linear and embedding weights come from N(0, 0.02). Biases are zero, layer norms one and zero.
    The padding row, where the model has one, and rows past the vocabulary are zero.
    """
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.weight.normal_(0.0, STANDARD_DEVIATION)
                part.bias.zero_()
            elif isinstance(part, nn.Embedding):
                rows = part.vocab_size if isinstance(part, TokenEmbedding) else part.num_embeddings
                part.weight[:rows].normal_(0.0, STANDARD_DEVIATION)
                part.weight[rows:].zero_()
                if part.padding_idx is not None:
                    part.weight[part.padding_idx].zero_()

"""Initial weights: BERT's, and as EIFY/fairseq applies them."""

import torch
from torch import Tensor, nn

from .embeddings import TokenEmbedding

STANDARD_DEVIATION = 0.02


def initialize(module: nn.Module, kind: str = "normal") -> None:
    """Draw all weights of `module` in place, from torch's global generator.

    Linear and embedding weights come from N(0, 0.02); with "truncated-normal", numbers beyond two
    standard deviations are drawn again (Devlin et al. 2019). Biases are zero, layer norms one and
    zero. The padding row, where the model has one, and rows past the vocabulary are zero. The basis
    of latents keeps the draw of `Encoder`.
    """
    if next(module.parameters()).is_meta:
        return  # sizes alone are asked for, and torch takes long to draw nothing
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Linear):
                _draw(part.weight, kind)
                if part.bias is not None:
                    part.bias.zero_()
            elif isinstance(part, nn.Embedding):
                rows = part.vocab_size if isinstance(part, TokenEmbedding) else part.num_embeddings
                _draw(part.weight[:rows], kind)
                part.weight[rows:].zero_()
                if part.padding_idx is not None:
                    part.weight[part.padding_idx].zero_()


def _draw(weight: Tensor, kind: str) -> None:
    if kind == "normal":
        weight.normal_(0.0, STANDARD_DEVIATION)
    else:
        limit = 2 * STANDARD_DEVIATION
        nn.init.trunc_normal_(weight, 0.0, STANDARD_DEVIATION, -limit, limit)

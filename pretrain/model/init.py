"""Initial weights: BERT's, as the original applies them."""

from __future__ import annotations

import torch
from torch import nn

STANDARD_DEVIATION = 0.02


def initialize(module: nn.Module) -> None:
    """Draw every weight below `module` anew, in place.

    Linear and embedding weights from N(0, 0.02), biases zero, layer norms one and zero; `<pad>`'s
    row zero where the model has such a row. Draws from torch's global generator.
    """
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.weight.normal_(0.0, STANDARD_DEVIATION)
                part.bias.zero_()
            elif isinstance(part, nn.Embedding):
                part.weight.normal_(0.0, STANDARD_DEVIATION)
                if part.padding_idx is not None:
                    part.weight[part.padding_idx].zero_()

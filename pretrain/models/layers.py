"""How much each layer of a model changes its input (Lan et al. 2020, figure 1)."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pretrain.data.batches import spread, validation_batches
from pretrain.data.sources import Source
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.base import PretrainingObjective
from pretrain.objectives.masked import MaskedLM


@dataclasses.dataclass(frozen=True)
class LayerChange:
    """The input x and the output y of one layer, as means over tokens."""

    distance: float
    """L2 norm of y - x."""
    cosine: float
    """Cosine similarity of x and y."""
    degrees: float
    """Angle between x and y."""


@dataclasses.dataclass(frozen=True)
class LayerChanges:
    """All layers of one model."""

    length: int
    """Most tokens of a block."""
    blocks: int
    tokens: int
    """That the means are over; padding is left out."""
    layers: list[LayerChange]


def layer_changes(
    model: LanguageModel,
    objective: PretrainingObjective,
    source: Source,
    limit: int,
    micro_batch_size: int = 8,
) -> LayerChanges:
    """Compare the input and the output of every layer.

    The model reads the blocks of its validation, but no token is masked: in models whose mask is
    the zero vector, a masked token has no angle.

    Args:
        model: any device, evaluation mode.
        objective: for validation.
        source: blocks of the validation split.
        limit: most blocks; 0: all.
        micro_batch_size: blocks per forward pass.

    Raises:
        ValueError: the model has latents, so that a layer's input and output differ in length.
    """
    device = next(model.parameters()).device
    objective = _without_masks(objective)
    sums = torch.zeros(model.config.num_layers, 3, dtype=torch.float64, device=device)
    tokens = 0
    for micro_batch in validation_batches(source, objective, limit, micro_batch_size, 0, 1):
        batch = micro_batch.to(device)
        is_token = torch.from_numpy(micro_batch.arrays["document_ids"]).to(device) > 0
        with torch.no_grad():
            states = model.encoder.hidden_states(
                batch["input_ids"],
                batch.get("document_ids"),
                batch.get("segment_ids"),
                with_final_norm=False,
            )
        states = [state[is_token] for state in states]
        pairs = zip(states, states[1:], strict=False)
        sums += torch.stack([_summed_changes(x, y) for x, y in pairs])
        tokens += int(is_token.sum())
    layers = [LayerChange(*means) for means in (sums / tokens).tolist()]
    return LayerChanges(source.sequence_length, len(spread(len(source), limit)), tokens, layers)


def _without_masks(objective: PretrainingObjective) -> PretrainingObjective:
    if not isinstance(objective, MaskedLM):
        return objective
    settings = dataclasses.replace(objective.settings, keep_probability=1.0, random_probability=0.0)
    return dataclasses.replace(objective, settings=settings)


def _summed_changes(x: Tensor, y: Tensor) -> Tensor:
    """[tokens, D] twice to sums over tokens of distance, cosine and degrees, [3] in fp64."""
    # Near 1 the arc cosine of a number in fp32 is off by some hundredths of a degree.
    x, y = x.double(), y.double()
    cosine = F.cosine_similarity(x, y, dim=-1)
    degrees = cosine.clamp(-1, 1).acos() * (180 / math.pi)
    distance = torch.linalg.vector_norm(y - x, dim=-1)
    return torch.stack([distance, cosine, degrees], dim=-1).sum(dim=0)

"""The objectives that a recipe can name: `objective.name` picks the settings record."""

from __future__ import annotations

from pretrain.objectives.base import ObjectiveSettings
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.masked import MaskedLMConfig

SETTINGS_BY_NAME: dict[str, type[ObjectiveSettings]] = {
    "masked-lm": MaskedLMConfig,
    "causal-lm": CausalLMConfig,
}

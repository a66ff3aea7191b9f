"""The objectives that a recipe can name: `objective.name` picks the settings record."""

from pretrain.objectives.base import ObjectiveSettings
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.sentence_pairs import SentencePairsConfig
from pretrain.objectives.spans import SpanCorruptionConfig

_KINDS = (MaskedLMConfig, CausalLMConfig, SpanCorruptionConfig, SentencePairsConfig)
SETTINGS_BY_NAME: dict[str, type[ObjectiveSettings]] = {kind().name: kind for kind in _KINDS}

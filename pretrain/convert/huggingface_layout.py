"""What transformers calls our weights and settings: read by the export and by the import."""

from __future__ import annotations

from collections.abc import Mapping

from pretrain.inference.model_folder import HEADS
from pretrain.model.config import ClassificationConfig, ModelConfig

Names = Mapping[str, tuple[str, ...]]
"""Their name of each of our weights; several stand one above the other in ours."""

CLASSIFIER = "classifier"
"""transformers' attribute, and our name of a head whose folder tells no other."""
POSITIONS = "encoder.embeddings.positions.table.weight"
TOKEN_TYPES = "roberta.embeddings.token_type_embeddings.weight"
UNUSED_POSITIONS = 2
"""Rows of the position table that no token reads, here and there; there they count as positions."""


def is_plain_roberta(config: ModelConfig, head: ClassificationConfig | None = None) -> bool:
    """Whether transformers' own RoBERTa computes exactly this model, under this head."""
    return (
        config.position == "learned"
        and config.head == "roberta"
        and config.mask_embedding == "row"
        and config.embedding_norm
        and config.embedding_scale == "one"
        and not config.normalize_embeddings
        and (head is None or head.pooling == "first")
    )


def roberta_names(config: ModelConfig, head: str | None, language_model: bool) -> Names:
    """Names of a RoBERTa of theirs.

    Args:
        config: of the model.
        head: the classification head that it has, by our name; None where it has none.
        language_model: whether it has a head over the vocabulary.
    """
    embeddings = "roberta.embeddings."
    result: dict[str, tuple[str, ...]] = {
        "encoder.embeddings.tokens.weight": (f"{embeddings}word_embeddings.weight",),
        POSITIONS: (f"{embeddings}position_embeddings.weight",),
    }
    modules = {"encoder.embeddings.norm": f"{embeddings}LayerNorm"}
    if language_model:
        result["head.bias"] = ("lm_head.bias",)
        modules |= {"head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm"}
    if head is not None:
        modules[f"{HEADS}{head}.dense"] = f"{CLASSIFIER}.dense"
        modules[f"{HEADS}{head}.projection"] = f"{CLASSIFIER}.out_proj"
    for layer in range(config.num_layers):
        ours, theirs = f"encoder.layers.{layer}.", f"roberta.encoder.layer.{layer}."
        modules |= {
            f"{ours}attention.output": f"{theirs}attention.output.dense",
            f"{ours}attention_norm": f"{theirs}attention.output.LayerNorm",
            f"{ours}expand": f"{theirs}intermediate.dense",
            f"{ours}contract": f"{theirs}output.dense",
            f"{ours}output_norm": f"{theirs}output.LayerNorm",
        }
        for kind in ("weight", "bias"):
            result[f"{ours}attention.query_key_value.{kind}"] = tuple(
                f"{theirs}attention.self.{part}.{kind}" for part in ("query", "key", "value")
            )
    for ours, theirs in modules.items():
        for kind in ("weight", "bias"):
            result[f"{ours}.{kind}"] = (f"{theirs}.{kind}",)
    return result


def own_names(weights: Mapping[str, object], head: str | None) -> Names:
    """The language model's weights by their own names, and those of one classification head."""
    prefix = f"{HEADS}{head}."
    result = {name: (name,) for name in weights if not name.startswith(HEADS)}
    for name in weights:
        if head is not None and name.startswith(prefix):
            result[name] = (f"{CLASSIFIER}.{name.removeprefix(prefix)}",)
    return result


def unnamed(classes: int) -> tuple[str, ...]:
    """What transformers calls classes without names."""
    return tuple(f"LABEL_{index}" for index in range(classes))


def problem_types(classes: int) -> tuple[str | None, ...]:
    """What `problem_type` may be for so many classes, the one to write first."""
    return ("regression" if classes == 1 else "single_label_classification", None)

"""fairseq checkpoints (.pt) to model folders: RoBERTa, with the ALiBi and CLAP of EIFY/fairseq.

Nothing in a checkpoint is executed. It is read with `weights_only=True`; the settings of an old
one, an argparse.Namespace, are accepted by an allow-list of that one class.

Order: `read`, then its parts: settings (`architecture`), vocabulary, weights (`import_weights`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.tokenizer import Tokenizer
from pretrain.convert import fairseq_layout as layout
from pretrain.convert.weights import empty_weights, head_of, joined, load_pickled, weights_in
from pretrain.model.classification import ClassificationConfig
from pretrain.model.config import ModelConfig
from pretrain.models.model_folder import HEADS, ModelContents, refuse_oversized

_ABANDONED: Mapping[str, object] = {"encoder_l2norm": False, "encoding_repeat": 1, "vae_beta": 0}
"""Like NOT_MODELLED, for experiments in the history of EIFY/fairseq that its code has dropped."""

_TRAINING_ONLY = ("activation_dropout", "encoder_layerdrop")
"""Settings that our model lacks, and that change nothing once the model is trained."""


def read(path: Path, vocabulary: Tokenizer | None = None) -> ModelContents:
    """Read the model of a checkpoint, with its classification heads.

    Half-precision weights become fp32. Three things have no place in our model and are kept in the
    provenance: `self_masking_probability`, where EIFY/fairseq zeroed random tokens in every forward
    pass (here masks belong to the batches), `training_only` settings, and `tokens_without_row`.

    Args:
        path: a checkpoint of a RoBERTa, written by fairseq or EIFY/fairseq.
        vocabulary: of the model; a fairseq checkpoint holds none.

    Raises:
        ValueError: the file is not a checkpoint, is damaged, asks for code to be run, or does not
            say what its model is; the model is not one that we have; weights or vocabulary do not
            fit.
    """
    content = load_pickled(path, [argparse.Namespace])
    try:
        return _contents(content, path.name, vocabulary)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _contents(content: object, source: str, vocabulary: Tokenizer | None) -> ModelContents:
    if not isinstance(content, dict):
        raise ValueError(f"holds no fairseq checkpoint but {type(content).__name__}")
    settings = _settings(content)
    weights = _upgrade(_model_weights(content))
    config = architecture(settings, weights[layout.TOKENS].shape[0])
    heads = _heads(weights, settings, _plain(content.get("extra_state")).get(layout.LABELS))
    refuse_oversized(config, heads, sum(weight.nbytes for weight in weights.values()))
    provenance = {
        "source": source,
        "format": "fairseq",
        "updates": _updates(content),
        **_not_carried_over(settings),
    }
    if vocabulary and (without := _tokens_without_row(config, vocabulary)):
        provenance["tokens_without_row"] = without
    return ModelContents(config, import_weights(weights, config), vocabulary, provenance, heads)


def _model_weights(content: Mapping[str, Any]) -> Mapping[str, Tensor]:
    return weights_in(content.get("model"), "holds no fairseq checkpoint: `model`")


def _upgrade(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the names that fairseq has used since 2020."""
    result = {}
    for name, weight in weights.items():
        if name.startswith("decoder."):
            name = "encoder." + name.removeprefix("decoder.")
        name = name.replace(".emb_layer_norm.", ".layernorm_embedding.")
        if ".self_attn.in_proj_" in name and weight.ndim:
            for part, piece in zip("qkv", weight.chunk(3), strict=False):
                result[name.replace(".in_proj_", f".{part}_proj.")] = piece
        else:
            result[name] = weight
    if layout.TOKENS not in result or result[layout.TOKENS].ndim != 2:
        raise ValueError(f"holds no RoBERTa model: no matrix {layout.TOKENS} among its weights")
    return result


def _plain(section: object) -> dict[str, Any]:
    """Return a section of settings as a mapping; empty where there is none."""
    if isinstance(section, argparse.Namespace):
        section = vars(section)
    return section if isinstance(section, dict) else {}


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's settings. None means unset, as in fairseq."""
    settings = _plain(content.get("args")) or _plain(_plain(content.get("cfg")).get("model"))
    if not settings:
        raise ValueError(
            "holds no settings (cfg, args). Positions, scale and normalisation leave no trace in "
            "the weights, and are not guessed"
        )
    return {name: value for name, value in settings.items() if value is not None}


def _flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"model.{name}: {value!r} is not accepted; it must be true or false")
    return value


def architecture(settings: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """Read every architectural choice from fairseq's settings of a model.

    Missing settings have the defaults of EIFY/fairseq (models/roberta/model.py,
    base_architecture). The defaults of the settings that it adds describe fairseq's RoBERTa.

    Args:
        settings: `cfg["model"]` of a checkpoint, or its `args`.
        vocab_size: rows of the token embedding.

    Raises:
        ValueError: a size is missing, or a setting is one that our model does not have.
    """
    for name, accepted in (*layout.NOT_MODELLED.items(), *_ABANDONED.items()):
        if settings.get(name, accepted) != accepted:
            raise ValueError(
                f"model.{name}: {settings[name]!r} cannot be converted; accepted: {accepted!r}"
            )
    if missing := [name for name in layout.SIZES.values() if name not in settings]:
        raise ValueError(f"its settings lack model.{', model.'.join(missing)}")
    clap = _flag(settings, "contrastive_pretraining", False)
    alibi = _flag(settings, "encoder_alibi", False)
    asymmetrical = _flag(settings, "encoder_alibi_asymmetrical", False)
    return ModelConfig(
        vocab_size=vocab_size,
        position=_position(settings, alibi),
        alibi="symmetric" if alibi and not asymmetrical else "offset",
        head="clap" if clap else "roberta",
        normalize_embeddings=clap and _flag(settings, "l2norm_embedding", True),
        embedding_scale="one" if _flag(settings, "no_scale_embedding", True) else "sqrt-hidden",
        embedding_norm=_flag(settings, "layernorm_embedding", True),
        mask_embedding="zero" if _flag(settings, "zero_masking", False) else "row",
        initial_beta=settings.get("initial_beta", 1.0),
        dropout=settings.get("dropout", 0.1),
        attention_dropout=settings.get("attention_dropout", 0.1),
        layer_norm_epsilon=layout.LAYER_NORM_EPSILON,
        **{ours: settings[theirs] for ours, theirs in layout.SIZES.items()},
    )


def _position(settings: Mapping[str, Any], alibi: bool) -> str:
    if _flag(settings, "no_token_positional_embeddings", False):
        return "alibi" if alibi else "none"
    if alibi:
        raise ValueError(
            "model.encoder_alibi: true is not accepted beside position embeddings; "
            "model.no_token_positional_embeddings must be true as well"
        )
    return "learned" if _flag(settings, "encoder_learned_pos", True) else "sinusoidal"


def _heads(
    weights: Mapping[str, Tensor], settings: Mapping[str, Any], labels: object
) -> dict[str, ClassificationConfig]:
    """Describe the classification heads; the shapes of their weights tell their classes."""
    classes = _classes(weights)
    activation = settings.get("pooler_activation_fn", "tanh")
    if classes and activation != "tanh":
        raise ValueError(
            f"model.pooler_activation_fn: {activation!r} cannot be converted; accepted: 'tanh'"
        )
    named = labels if isinstance(labels, dict) else {}
    dropout = settings.get("pooler_dropout", 0.0)
    result = {}
    for name, count in classes.items():
        own = named.get(name, [])
        own = tuple(own) if isinstance(own, list) else own
        result[name] = ClassificationConfig(count, own, dropout=dropout)
    return result


def _classes(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of classes of each classification head."""
    result = {}
    for head in dict.fromkeys(head_of(name) for name in weights if name.startswith(HEADS)):
        weight = weights.get(f"{HEADS}{head}.out_proj.weight")
        # A missing or misshapen one is reported with all other weights.
        result[head] = weight.shape[0] if weight is not None and weight.ndim == 2 else 1
    return result


def _updates(content: Mapping[str, Any]) -> int | None:
    history = content.get("optimizer_history")
    last = _plain(history[-1]) if isinstance(history, list) and history else {}
    updates = last.get("num_updates")
    return updates if isinstance(updates, int) else None


def _not_carried_over(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for the provenance, settings about the training that the model does not keep."""
    notes: dict[str, Any] = {}
    training_only = {name: settings[name] for name in _TRAINING_ONLY if settings.get(name)}
    if training_only:
        notes["training_only"] = training_only
    if _flag(settings, "zero_masking", False) and settings.get("mask_prob"):
        notes["self_masking_probability"] = settings["mask_prob"]
    return notes


def _tokens_without_row(config: ModelConfig, vocabulary: Tokenizer) -> list[str]:
    """Return tokens other than `<mask>` that the embedding of a zero-mask model lacks.

    The published zero-clap models have 50262 rows for the 50265 ids of their data. `<mask>` has no
    row, nor have madeupword0001 and 0002, which pad the vocabulary to a multiple of eight and occur
    in no text. The model takes any id beyond its rows for the mask.

    Raises:
        ValueError: the vocabulary does not fit the rows.
    """
    rows, zero = config.vocab_size, config.mask_embedding == "zero"
    last = vocabulary.mask_id if zero else vocabulary.vocab_size
    missing = [vocabulary.token_text(id) for id in range(rows, last)]
    fits = all(zero and token.startswith("madeupword") for token in missing)
    if rows > last or not fits:
        accepted = f"{rows + zero}, <mask> included" + (
            ", and more madeupwords, which need no row" if zero else ""
        )
        raise ValueError(
            f"its embedding of {rows} rows does not fit the vocabulary of {vocabulary.vocab_size} "
            f"ids; accepted: one of {accepted}"
        )
    return missing


def import_weights(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename fairseq's weights to ours, in fp32.

    Each of ours is one of theirs, or several concatenated, so that gradients can be imported too.

    Args:
        weights: of a language model and of any classification heads; the copy of the token
            embedding that fairseq keeps for the head over the vocabulary may be missing.
        config: of the language model.

    Raises:
        ValueError: weights are missing, left over, misshapen or not finite (a few are named), or
            the head over the vocabulary is not tied to the token embedding.
    """
    heads = {name: ClassificationConfig(count) for name, count in _classes(weights).items()}
    left_out = (layout.VERSION, layout.DEVICE_MARKER, layout.TIED)
    own = {name: weight for name, weight in weights.items() if name not in left_out}
    if layout.BETA in own and own[layout.BETA].ndim == 0:
        own[layout.BETA] = own[layout.BETA].reshape(1)
    empty = empty_weights(config, heads)
    result = joined(own, layout.names(empty, heads), empty)
    tied = weights.get(layout.TIED)
    if tied is not None and not torch.equal(tied.float(), own[layout.TOKENS].float()):
        raise ValueError(f"{layout.TIED} is not the token embedding; accepted: tied weights")
    return result

"""fairseq checkpoints (.pt) to model folders: RoBERTa with the ALiBi and CLAP of EIFY/fairseq.

Nothing that a checkpoint holds is ever executed: it is read with `weights_only=True`, and the
settings of an old one, an argparse.Namespace, through an allow-list of that one class.

Order: `read`, and what it is made of: the file, its settings (`architecture`), its vocabulary, its
weights (`import_weights`).
"""

from __future__ import annotations

import argparse
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from data_prep.tokenizer import Tokenizer
from pretrain.convert.fairseq_layout import (
    BETA,
    DEVICE_MARKER,
    LABELS,
    LAYER_NORM_EPSILON,
    NOT_MODELLED,
    TIED,
    TOKENS,
    VERSION,
    names,
)
from pretrain.inference.model_folder import HEADS, ModelContents
from pretrain.model.config import ClassificationConfig, ModelConfig
from pretrain.model.heads import ClassificationHead
from pretrain.model.language_model import LanguageModel

_ABANDONED: Mapping[str, object] = MappingProxyType(
    {"encoder_l2norm": False, "encoding_repeat": 1, "vae_beta": 0}
)
"""As NOT_MODELLED, of experiments that EIFY/fairseq has in its history, not in its code."""

_TRAINING_ONLY = ("activation_dropout", "encoder_layerdrop")
"""Settings that our model lacks and that change nothing once it is trained."""


def read(path: Path, vocabulary: Tokenizer | None = None) -> ModelContents:
    """The model of a checkpoint, with its classification heads.

    Half-precision weights become fp32. Three things have no place in a model of ours and are kept
    in the provenance: `self_masking_probability` where the original zeroed tokens by chance at
    every forward pass (here, masks belong to the batches), `training_only` settings, and
    `tokens_without_row`.

    Args:
        path: written by EIFY/fairseq, or by fairseq for a RoBERTa.
        vocabulary: the model's; a fairseq checkpoint holds none.

    Raises:
        ValueError: no checkpoint or a damaged one; one that asks for code to be run, that does not
            say what its model is, or holds one that ours cannot be; weights or a vocabulary that do
            not fit.
    """
    content = _load(path)
    try:
        return _contents(content, path.name, vocabulary)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _contents(
    content: Mapping[str, Any], source: str, vocabulary: Tokenizer | None
) -> ModelContents:
    settings = _settings(content)
    weights = _upgrade(_model_weights(content))
    config = architecture(settings, weights[TOKENS].shape[0])
    heads = _heads(weights, settings, _plain(content.get("extra_state")).get(LABELS))
    provenance = {
        "source": source,
        "format": "fairseq",
        "updates": _updates(content),
        **_not_carried_over(settings),
    }
    if vocabulary and (without := _tokens_without_row(config, vocabulary)):
        provenance["tokens_without_row"] = without
    return ModelContents(config, import_weights(weights, config), vocabulary, provenance, heads)


def _load(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; accepted: a checkpoint written by fairseq (.pt)")
    try:
        _compare_checksums(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # whatever damaged bytes make torch and pickle stumble over
        reason = "is no checkpoint of fairseq's, or is cut short or damaged"
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            reason = (
                f"was not read, it asks for {refused[1]}, which could run code; accepted: tensors, "
                "plain values and argparse.Namespace"
            )
        raise ValueError(f"{path}: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no fairseq checkpoint but {type(content).__name__}")
    return content


def _compare_checksums(path: Path) -> None:
    """Refuse a damaged archive, which torch does not: a flipped bit would become a weight.

    Checkpoints older than torch 1.6 are no zip archives, and have no checksums.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(damaged)


def _model_weights(content: Mapping[str, Any]) -> Mapping[str, Tensor]:
    weights = content.get("model")
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(weight, Tensor) for name, weight in weights.items()
    ):
        raise ValueError("holds no weights under `model`; accepted: a fairseq checkpoint")
    return weights


def _upgrade(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names that fairseq has given them since 2020."""
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
    if TOKENS not in result or result[TOKENS].ndim != 2:
        raise ValueError(f"holds no RoBERTa model: no matrix {TOKENS} among its weights")
    return result


def _plain(section: object) -> dict[str, Any]:
    """A section of settings as a mapping; empty where there is none."""
    if isinstance(section, argparse.Namespace):
        section = vars(section)
    return section if isinstance(section, dict) else {}


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The model's settings. None means unset, as with fairseq."""
    settings = _plain(content.get("args")) or _plain(_plain(content.get("cfg")).get("model"))
    if not settings:
        raise ValueError(
            "holds no settings (cfg, args). Positions, scale and normalisation leave no trace in "
            "the weights; they are not guessed"
        )
    return {name: value for name, value in settings.items() if value is not None}


def _flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"model.{name}: {value!r} is not accepted; it must be true or false")
    return value


def architecture(settings: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """Every architectural choice, of fairseq's settings of a model.

    What they leave out has the default of EIFY/fairseq (models/roberta/model.py,
    base_architecture). The defaults of the settings that it adds make the RoBERTa of fairseq.

    Args:
        settings: `cfg["model"]` of a checkpoint, or its `args`.
        vocab_size: rows of the token embedding.

    Raises:
        ValueError: a size is missing, or a setting is one that our model does not have.
    """
    for name, accepted in (*NOT_MODELLED.items(), *_ABANDONED.items()):
        if settings.get(name, accepted) != accepted:
            raise ValueError(
                f"model.{name}: {settings[name]!r} cannot be converted; accepted: {accepted!r}"
            )
    sizes = {
        "hidden_size": "encoder_embed_dim",
        "num_layers": "encoder_layers",
        "num_heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_embed_dim",
        "max_positions": "max_positions",
    }
    if missing := [name for name in sizes.values() if name not in settings]:
        raise ValueError(f"its settings do not say model.{', model.'.join(missing)}")
    clap = _flag(settings, "contrastive_pretraining", False)
    position = _position(settings)
    symmetric = position == "alibi" and not _flag(settings, "encoder_alibi_asymmetrical", False)
    return ModelConfig(
        vocab_size=vocab_size,
        position=position,
        alibi="symmetric" if symmetric else "offset",
        head="clap" if clap else "roberta",
        normalize_embeddings=clap and _flag(settings, "l2norm_embedding", True),
        embedding_scale="one" if _flag(settings, "no_scale_embedding", True) else "sqrt-hidden",
        embedding_norm=_flag(settings, "layernorm_embedding", True),
        mask_embedding="zero" if _flag(settings, "zero_masking", False) else "row",
        initial_beta=settings.get("initial_beta", 1.0),
        dropout=settings.get("dropout", 0.1),
        attention_dropout=settings.get("attention_dropout", 0.1),
        layer_norm_epsilon=LAYER_NORM_EPSILON,
        **{ours: settings[theirs] for ours, theirs in sizes.items()},
    )


def _position(settings: Mapping[str, Any]) -> str:
    added = not _flag(settings, "no_token_positional_embeddings", False)
    if _flag(settings, "encoder_alibi", False):
        if added:
            raise ValueError(
                "model.encoder_alibi: true is not accepted beside position embeddings; "
                "model.no_token_positional_embeddings must be true as well"
            )
        return "alibi"
    if not added:
        return "none"
    return "learned" if _flag(settings, "encoder_learned_pos", True) else "sinusoidal"


def _heads(
    weights: Mapping[str, Tensor], settings: Mapping[str, Any], labels: object
) -> dict[str, ClassificationConfig]:
    """What the classification heads are: their classes by the shape of their weights."""
    heads = {name: _classes(weights, name) for name in _head_names(weights)}
    activation = settings.get("pooler_activation_fn", "tanh")
    if heads and activation != "tanh":
        raise ValueError(
            f"model.pooler_activation_fn: {activation!r} cannot be converted; accepted: 'tanh'"
        )
    named = labels if isinstance(labels, dict) else {}
    dropout = settings.get("pooler_dropout", 0.0)
    result = {}
    for name, classes in heads.items():
        own = named.get(name, [])
        own = tuple(own) if isinstance(own, list) else own
        result[name] = ClassificationConfig(classes, own, dropout=dropout)
    return result


def _head_names(weights: Mapping[str, Tensor]) -> list[str]:
    found = (name.split(".")[1] for name in weights if name.startswith(HEADS))
    return list(dict.fromkeys(found))


def _classes(weights: Mapping[str, Tensor], head: str) -> int:
    weight = weights.get(f"{HEADS}{head}.out_proj.weight")
    # A missing or misshapen one is named with all other weights.
    return weight.shape[0] if weight is not None and weight.ndim == 2 else 1


def _updates(content: Mapping[str, Any]) -> int | None:
    history = content.get("optimizer_history")
    last = _plain(history[-1]) if isinstance(history, list) and history else {}
    updates = last.get("num_updates")
    return updates if isinstance(updates, int) else None


def _not_carried_over(settings: Mapping[str, Any]) -> dict[str, Any]:
    """For the provenance: settings that say something of the weights and nothing of the model."""
    notes: dict[str, Any] = {}
    training_only = {name: settings[name] for name in _TRAINING_ONLY if settings.get(name)}
    if training_only:
        notes["training_only"] = training_only
    if _flag(settings, "zero_masking", False) and settings.get("mask_prob"):
        notes["self_masking_probability"] = settings["mask_prob"]
    return notes


def _tokens_without_row(config: ModelConfig, vocabulary: Tokenizer) -> list[str]:
    """Tokens of the vocabulary, `<mask>` aside, that the embedding of a zero-mask model lacks.

    The published zero-clap models have 50262 rows for the 50265 ids of their data: no `<mask>` and
    no madeupword0001 and 0002, which fill the vocabulary up to a multiple of eight and occur in no
    text. The model takes any id beyond its rows for the mask.

    Raises:
        ValueError: the vocabulary does not fit the rows.
    """
    rows, zero = config.vocab_size, config.mask_embedding == "zero"
    last = vocabulary.mask_id if zero else vocabulary.vocab_size
    missing = [vocabulary.token_text(id) for id in range(rows, last)]
    fits = all(zero and token.startswith("madeupword") for token in missing)
    if rows > last or not fits:
        accepted = f"{rows + zero}, <mask> included" + (
            ", and madeupwords beside them that have no row" if zero else ""
        )
        raise ValueError(
            f"its embedding of {rows} rows does not fit the vocabulary of {vocabulary.vocab_size} "
            f"ids; accepted: one of {accepted}"
        )
    return missing


def import_weights(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights by our names, of those by fairseq's; fp32.

    Each is one of theirs or several joined, and nothing else: gradients can be imported as well.

    Args:
        weights: of a language model and of any classification heads; the copy of the token
            embedding that fairseq keeps for the head over the vocabulary may be left out.
        config: of the language model.

    Raises:
        ValueError: weights are missing, left over, misshapen or not finite (a few are named), or
            the head over the vocabulary is not tied to the token embedding.
    """
    heads = {name: ClassificationConfig(_classes(weights, name)) for name in _head_names(weights)}
    own = {
        name: weight.detach()
        for name, weight in weights.items()
        if name not in (VERSION, DEVICE_MARKER, TIED)
    }
    _check(own, _shapes(config, heads))
    if TIED in weights and not torch.equal(weights[TIED].float(), own[TOKENS].float()):
        raise ValueError(f"{TIED} is not the token embedding; accepted: tied weights")
    result = {}
    for ours, theirs in names(config, heads).items():
        parts = [own[name].float() for name in theirs]
        # cat copies, so that no two weights share a storage, which safetensors would refuse
        result[ours] = torch.cat([part.reshape(part.shape or (1,)) for part in parts])
    return result


def _shapes(
    config: ModelConfig, heads: Mapping[str, ClassificationConfig]
) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's weights by fairseq's names."""
    with torch.device("meta"):
        ours = dict(LanguageModel(config).state_dict())
        for name, head in heads.items():
            module = ClassificationHead(config.hidden_size, head)
            ours |= {f"{HEADS}{name}.{key}": weight for key, weight in module.state_dict().items()}
    result: dict[str, tuple[int, ...]] = {}
    for mine, theirs in names(config, heads).items():
        rows, *rest = ours[mine].shape
        result |= {name: (rows // len(theirs), *rest) for name in theirs}
    # A scalar there; of shape (1,) here.
    return result | ({BETA: ()} if config.head == "clap" else {})


def _check(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    known = [name for name in shapes if name in weights]
    faults = {
        "missing": [name for name in shapes if name not in weights],
        "left over": [name for name in weights if name not in shapes],
        "misshapen": [
            f"{name} {tuple(weights[name].shape)} rather than {shapes[name]}"
            for name in known
            if weights[name].shape != shapes[name]
        ],
        "no floating-point numbers": [
            name for name in known if not weights[name].is_floating_point()
        ],
        "not finite": [name for name in known if not weights[name].isfinite().all()],
    }
    found = [f"{kind}: {_some(wrong)}" for kind, wrong in faults.items() if wrong]
    if found:
        raise ValueError(f"its weights do not fit its settings; {'; '.join(found)}")


def _some(wrong: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(wrong) - limit} more" if len(wrong) > limit else ""
    return ", ".join(wrong[:limit]) + more

"""Import fairseq checkpoints (.pt): RoBERTa, with the ALiBi and CLAP of EIFY/fairseq.

Nothing in a checkpoint is executed. It is read with `weights_only=True`; an allow-list accepts
argparse.Namespace, the settings of old checkpoints.

Order: names, settings, `read_checkpoint`, weights.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from data_prep.common.files import named_errors
from data_prep.common.records import check_value
from data_prep.tokenizer import Tokenizer
from pretrain.convert import weights as tensors
from pretrain.convert.contents import CLASSIFIER, ModelContents
from pretrain.convert.names import check_modelled
from pretrain.model.classification import ClassificationConfig
from pretrain.model.config import ModelConfig

_ENCODER = "encoder.sentence_encoder."
_LM_HEAD = "encoder.lm_head"
_TOKENS = _ENCODER + "embed_tokens.weight"
_TIED = _LM_HEAD + ".weight"
_BETA = _LM_HEAD + ".beta"
_HEADS = "classification_heads."
_LEFT_OUT = (_ENCODER + "version", _ENCODER + "embed_positions._float_tensor")
"""A format number and a device marker, which fairseq saves among the weights."""

_LAYER = _ENCODER + "layers.{}."
_MODULES = {
    "encoder.embeddings.tokens": _ENCODER + "embed_tokens",
    "encoder.embeddings.positions.table": _ENCODER + "embed_positions",
    "encoder.embeddings.norm": _ENCODER + "layernorm_embedding",
    "encoder.layers.{}.attention.query_key_value": _LAYER + "self_attn.q_proj|k_proj|v_proj",
    "encoder.layers.{}.attention.output": _LAYER + "self_attn.out_proj",
    "encoder.layers.{}.attention_norm": _LAYER + "self_attn_layer_norm",
    "encoder.layers.{}.expand": _LAYER + "fc1",
    "encoder.layers.{}.contract": _LAYER + "fc2",
    "encoder.layers.{}.output_norm": _LAYER + "final_layer_norm",
    "head.dense": _LM_HEAD + ".dense",
    "head.norm": _LM_HEAD + ".layer_norm",
    "head": _LM_HEAD,
    f"{CLASSIFIER}dense": CLASSIFIER + "dense",
    f"{CLASSIFIER}projection": CLASSIFIER + "out_proj",
}

_SIZES: Mapping[str, str] = {
    "hidden_size": "encoder_embed_dim",
    "num_layers": "encoder_layers",
    "num_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_embed_dim",
    "max_positions": "max_positions",
}
_NOT_MODELLED: dict[str, object] = {
    "activation_fn": "gelu",
    "adaptive_input": False,
    "encoder_layers_to_keep": None,
    "encoder_normalize_before": False,
    "ffn_blocks_to_remove": -1,
    "mha_heads_to_keep": -1,
    "quant_noise_pq": 0,
    "quant_noise_scalar": 0,
    "spectral_norm_classification_head": False,
    "untie_weights_roberta": False,
    # Experiments in the history of EIFY/fairseq that its code has dropped.
    **{"encoder_l2norm": False, "encoding_repeat": 1, "vae_beta": 0},
}
"""Settings that change a model's outputs, with the only supported value."""


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
    check_modelled(settings, _NOT_MODELLED)
    if missing := [name for name in _SIZES.values() if name not in settings]:
        raise ValueError(f"its settings lack {', '.join(missing)}")
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
        layer_norm_epsilon=1e-5,
        **{ours: settings[theirs] for ours, theirs in _SIZES.items()},
    )


def _flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    value: bool = settings.get(name, default)
    check_value(name, value, isinstance(value, bool), "true or false")
    return value


def _position(settings: Mapping[str, Any], alibi: bool) -> str:
    if _flag(settings, "no_token_positional_embeddings", False):
        return "alibi" if alibi else "none"
    accepted = "false beside position embeddings; no_token_positional_embeddings removes these"
    check_value("encoder_alibi", alibi, not alibi, accepted)
    return "learned" if _flag(settings, "encoder_learned_pos", True) else "sinusoidal"


def read_checkpoint(
    path: Path, vocabulary: Tokenizer | None = None, head: str = ""
) -> ModelContents:
    """Read the model of a checkpoint.

    Half-precision weights become fp32. Settings of training alone are ignored, such as `mask_prob`,
    by which EIFY/fairseq zeroed random tokens in every forward pass.

    Args:
        path: a checkpoint of a RoBERTa, written by fairseq or EIFY/fairseq.
        vocabulary: of the model; a fairseq checkpoint holds none.
        head: the classification head to read in place of the head over the vocabulary.

    Raises:
        ValueError: the file is not a checkpoint, is damaged, asks for code to be run, or has no
            settings or no such head; the model is not supported; weights or vocabulary do not fit.
    """
    content = tensors.load_pickled(path, [argparse.Namespace])
    with named_errors(path):
        return _contents(content, path.name, vocabulary, head)


def _contents(
    content: object, source: str, vocabulary: Tokenizer | None, head: str
) -> ModelContents:
    if not isinstance(content, dict):
        raise ValueError(f"holds no fairseq checkpoint but {type(content).__name__}")
    found = _section(content.get("args")) or _section(_section(content.get("cfg")).get("model"))
    # None means unset, as in fairseq.
    settings = {name: value for name, value in found.items() if value is not None}
    if not settings:
        raise ValueError(
            "holds no settings (cfg, args), as fairseq writes them. Positions, scale and "
            "normalisation leave no trace in the weights, and are not guessed"
        )
    weights = _upgrade(
        tensors.weights_in(content.get("model"), "holds no fairseq checkpoint: `model`")
    )
    config = architecture(settings, weights[_TOKENS].shape[0])
    weights, others = _with_one_head(weights, head)
    classifier = _classifier(weights, settings) if head else None
    history = content.get("optimizer_history")
    last = _section(history[-1]) if isinstance(history, list) and history else {}
    updates = last.get("num_updates")
    provenance: dict[str, Any] = {
        "source": source,
        "format": "fairseq",
        "updates": updates if isinstance(updates, int) else None,
        **({"task": head} if head else {}),
    }
    if vocabulary is not None:
        _check_vocabulary(config, vocabulary)
    notes = [f"classification heads were left out: {', '.join(others)} (--head)"] if others else []
    own = import_weights(weights, config, classifier)
    return ModelContents(config, own, vocabulary, provenance, classifier, tuple(notes))


def _section(section: object) -> dict[str, Any]:
    """Return a section of settings as a mapping; empty where there is none."""
    if isinstance(section, argparse.Namespace):
        section = vars(section)
    return section if isinstance(section, dict) else {}


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
    if _TOKENS not in result or result[_TOKENS].ndim != 2:
        raise ValueError(f"holds no RoBERTa model: no matrix {_TOKENS} among its weights")
    return result


def _with_one_head(weights: Mapping[str, Tensor], head: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights with one head, and the names of the other classification heads.

    Raises:
        ValueError: there is no such head.
    """
    in_heads = {name: name.split(".")[1] for name in weights if name.startswith(_HEADS)}
    heads = sorted(set(in_heads.values()))
    if head and head not in heads:
        known = ", ".join(heads) or "none"
        raise ValueError(f"has no classification head {head!r}; it has {known}")
    mine = f"{_HEADS}{head}."
    kept = {
        name.replace(mine, CLASSIFIER): weight
        for name, weight in weights.items()
        if (name.startswith(mine) if name in in_heads else not (head and _LM_HEAD in name))
    }
    return kept, [name for name in heads if name != head]


def _classifier(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> ClassificationConfig:
    """Describe the classification head; the shape of its weights gives the classes."""
    check_modelled(settings, {"pooler_activation_fn": "tanh"})
    projection = weights.get(f"{CLASSIFIER}out_proj.weight")
    # A missing or misshapen one is reported with all other weights.
    classes = projection.shape[0] if projection is not None and projection.ndim == 2 else 1
    return ClassificationConfig(classes, dropout=settings.get("pooler_dropout", 0.0))


def _check_vocabulary(config: ModelConfig, vocabulary: Tokenizer) -> None:
    """Raise ValueError if the vocabulary does not fit the rows of the embedding.

    The published zero-clap models have 50262 rows for the 50265 ids of their data. `<mask>` has no
    row, nor have madeupword0001 and 0002, which pad the vocabulary to a multiple of eight and occur
    in no text. The model takes any id beyond its rows for the mask.
    """
    rows, zero = config.vocab_size, config.mask_embedding == "zero"
    last = vocabulary.mask_id if zero else vocabulary.vocab_size
    missing = map(vocabulary.token_text, range(rows, last))
    if rows > last or not all(zero and token.startswith("madeupword") for token in missing):
        accepted = f"{rows + zero}, <mask> included"
        if zero:
            accepted += ", and more madeupwords, which need no row"
        raise ValueError(
            f"its embedding of {rows} rows does not fit the vocabulary of {vocabulary.vocab_size} "
            f"ids; accepted: one of {accepted}"
        )


def import_weights(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    classifier: ClassificationConfig | None = None,
) -> dict[str, Tensor]:
    """Rename fairseq's weights to ours, in fp32.

    Each of ours is one of theirs, or several concatenated, so that gradients can be imported too.

    Args:
        weights: of a language model; the copy of the token embedding that fairseq keeps for the
            head over the vocabulary may be missing. With a classification head, under
            `classifier.`, there is no head over the vocabulary.
        config: of the language model.
        classifier: of the classification head.

    Raises:
        ValueError: weights are missing, left over, misshapen or not finite (a few are named), or
            the head over the vocabulary is not tied to the token embedding.
    """
    own = {name: weight for name, weight in weights.items() if name not in _LEFT_OUT}
    tensors.drop_copies(own, {_TIED: _TOKENS})
    if _BETA in own and own[_BETA].ndim == 0:
        own[_BETA] = own[_BETA].reshape(1)
    empty = tensors.empty_weights(config, classifier)
    if classifier is not None:
        empty = {name: weight for name, weight in empty.items() if not name.startswith("head.")}
    return tensors.joined(own, tensors.renamed(empty, _MODULES), empty)

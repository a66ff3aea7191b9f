"""Model folders to fairseq checkpoints (.pt) that EIFY/fairseq, and where it can fairseq, loads."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.files import AtomicFile
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
from pretrain.inference.model_folder import ModelContents
from pretrain.model.config import ClassificationConfig, ModelConfig


def write(path: Path, contents: ModelContents) -> None:
    """Write a checkpoint that EIFY/fairseq loads: with its hub interface, to evaluate or fine-tune.

    fairseq itself loads it as well where the model has neither ALiBi nor CLAP nor a zero mask; it
    would pass over these settings in silence. What has to be handed over besides is `dict.txt`, in
    the folder that `data` names: a line for each id from 4 on, `<mask>` left out, in the
    vocabulary's order, so that there are as many lines as rows of the embedding less 4 (less 5
    where the mask has a row). Classes' labels are not part of a fairseq model; they are kept in
    `extra_state`, where `read` finds them. Optimiser state is not written.

    Raises:
        ValueError: the file is there already, or fairseq cannot have such a model.
    """
    if path.exists():
        raise ValueError(f"{path}: is there already; accepted: a new file")
    config, heads = contents.config, contents.classification_heads
    try:
        settings = export_settings(config, heads)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be written for fairseq: {error}") from None
    updates = contents.provenance.get("updates", contents.provenance.get("step"))
    labels = {name: list(head.labels) for name, head in heads.items() if head.labels}
    checkpoint = {
        "args": None,
        "cfg": settings,
        "model": export_weights(contents.weights, config, heads),
        "criterion": None,
        "optimizer_history": [
            {
                "criterion_name": "MaskedLmLoss",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {"best": None},
                "num_updates": updates if isinstance(updates, int) else 0,
            }
        ],
        "task_state": {},
        "extra_state": {
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
            **({LABELS: labels} if labels else {}),
        },
        "last_optimizer_state": None,
    }
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    file = AtomicFile(path)
    try:
        file.write(buffer.getbuffer())
        file.commit()
    finally:
        file.discard()


def export_settings(
    config: ModelConfig, heads: Mapping[str, ClassificationConfig]
) -> dict[str, Any]:
    """The sections of fairseq's settings that its loaders read.

    A key that a caller of fairseq overrides (`data`, `bpe`) has to be there to be overridden; one
    that fairseq itself does not know (`omit_mask`) must not be, or it refuses the file.

    Raises:
        ValueError: fairseq cannot have such a model.
    """
    _refuse_what_fairseq_lacks(config, heads)
    clap, zero = config.head == "clap", config.mask_embedding == "zero"
    alibi = config.position == "alibi"
    model = {
        "_name": "roberta",
        "encoder_layers": config.num_layers,
        "encoder_embed_dim": config.hidden_size,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_attention_heads": config.num_heads,
        "max_positions": config.max_positions,
        "max_source_positions": config.max_positions,
        "no_token_positional_embeddings": config.position in ("alibi", "none"),
        "encoder_learned_pos": config.position != "sinusoidal",
        "encoder_alibi": alibi,
        "encoder_alibi_asymmetrical": alibi and config.alibi == "offset",
        "layernorm_embedding": config.embedding_norm,
        "no_scale_embedding": config.embedding_scale == "one",
        "l2norm_embedding": config.normalize_embeddings if clap else True,
        "contrastive_pretraining": clap,
        "initial_beta": config.initial_beta,
        "zero_masking": zero,
        "mask_prob": 0.0,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": 0.0,
        "pooler_dropout": next((head.dropout for head in heads.values()), 0.0),
        "pooler_activation_fn": "tanh",
        "encoder_layerdrop": 0.0,
        "quant_noise_pq_block_size": 8,
        # The heads of a checkpoint are thrown away without it.
        "load_checkpoint_heads": bool(heads),
        **NOT_MODELLED,
    }
    task = {
        "_name": "masked_lm",
        "data": ".",
        "sample_break_mode": "complete",
        "tokens_per_sample": config.max_positions,
        "seed": 1,
        **({"omit_mask": True} if zero else {}),
    }
    return {
        "_name": None,
        "common": {"seed": 1},
        "model": model,
        "task": task,
        "criterion": {"_name": "masked_lm", "tpu": False},
        "optimizer": {"_name": "adam"},
        "bpe": None,
        "tokenizer": None,
    }


def _refuse_what_fairseq_lacks(
    config: ModelConfig, heads: Mapping[str, ClassificationConfig]
) -> None:
    if config.normalize_embeddings and config.head == "roberta":
        raise ValueError("normalised embeddings are accepted with the CLAP head alone")
    if config.layer_norm_epsilon != LAYER_NORM_EPSILON:
        raise ValueError(
            f"layer_norm_epsilon: {config.layer_norm_epsilon} is not accepted; it must be "
            f"{LAYER_NORM_EPSILON}"
        )
    for name, head in heads.items():
        if head.pooling != "first":
            raise ValueError(f"head {name}: pooling {head.pooling!r}; accepted: 'first'")
    if len(dropouts := {head.dropout for head in heads.values()}) > 1:
        raise ValueError(f"heads have dropout {sorted(dropouts)}; accepted: the same for all")


def export_weights(
    weights: Mapping[str, Tensor], config: ModelConfig, heads: Iterable[str] = ()
) -> OrderedDict[str, Tensor]:
    """Weights by fairseq's names, of those by ours; all that its strict loading wants.

    Args:
        weights: of the language model and its classification heads, fp32.
        config: of the language model.
        heads: names of the classification heads.
    """
    result = OrderedDict({VERSION: torch.tensor([3.0])})
    if config.position == "sinusoidal":
        result[DEVICE_MARKER] = torch.zeros(1)
    for ours, theirs in names(config, heads).items():
        parts = weights[ours].detach().chunk(len(theirs))
        result |= {name: part.clone() for name, part in zip(theirs, parts, strict=True)}
    if config.head == "clap":
        result[BETA] = result[BETA].reshape(())
    # The same tensor, stored once.
    result[TIED] = result[TOKENS]
    return result

"""Model folders to fairseq checkpoints (.pt), for EIFY/fairseq and where possible for fairseq."""

from __future__ import annotations

import dataclasses
import io
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.common.files import write_atomically
from pretrain.convert import fairseq_layout as layout
from pretrain.convert.weights import separated
from pretrain.model.classification import ClassificationConfig
from pretrain.model.config import ModelConfig
from pretrain.models.model_folder import ModelContents


def write(path: Path, contents: ModelContents) -> None:
    """Write a checkpoint that EIFY/fairseq loads: in its hub interface, to evaluate or fine-tune.

    fairseq itself may load the checkpoint only of a model without ALiBi, CLAP and zero mask; it
    would silently ignore these settings. The user also needs `dict.txt`, in the folder that `data`
    names: one line for each id from 4 on except `<mask>`, in the vocabulary's order. It has as many
    lines as the embedding has rows, less 4 (less 5 where the mask has a row). A fairseq model has
    no labels of classes; they are kept in `extra_state`, where `read` finds them. Optimiser state
    is not written.

    Raises:
        ValueError: the file exists, or fairseq has no such model.
    """
    if path.exists():
        raise ValueError(f"{path}: exists; accepted: a new file")
    config, heads = contents.config, contents.classification_heads
    try:
        settings = export_settings(config, heads)
        weights = export_weights(contents.weights, config, heads)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be written for fairseq: {error}") from None
    updates = contents.provenance.get("updates", contents.provenance.get("step"))
    labels = {name: list(head.labels) for name, head in heads.items() if head.labels}
    checkpoint = {
        "args": None,
        "cfg": settings,
        "model": weights,
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
            **({layout.LABELS: labels} if labels else {}),
        },
        "last_optimizer_state": None,
    }
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    write_atomically(path, buffer.getvalue())


def export_settings(
    config: ModelConfig, heads: Mapping[str, ClassificationConfig]
) -> dict[str, Any]:
    """Return the sections of fairseq's settings that its loaders read.

    A key that a caller of fairseq overrides (`data`, `bpe`) must be present. One that fairseq does
    not know (`omit_mask`) must be absent where it is not needed, or fairseq refuses the file.

    Raises:
        ValueError: fairseq has no such model.
    """
    _refuse_unsupported(config, heads)
    clap, zero = config.head == "clap", config.mask_embedding == "zero"
    position = layout.POSITIONS[config.position]
    model = {
        "_name": "roberta",
        **{theirs: getattr(config, ours) for ours, theirs in layout.SIZES.items()},
        "max_source_positions": config.max_positions,
        **position,
        "encoder_alibi_asymmetrical": position["encoder_alibi"] and config.alibi == "offset",
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
        # Without this, fairseq drops the heads of a checkpoint.
        "load_checkpoint_heads": bool(heads),
        **layout.NOT_MODELLED,
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


def _refuse_unsupported(config: ModelConfig, heads: Mapping[str, ClassificationConfig]) -> None:
    known = {*layout.ACCEPTED, *layout.FREE, *layout.SIZES}
    defaults = {f.name: (f.default,) for f in dataclasses.fields(config) if f.name not in known}
    for name, accepted in {**layout.ACCEPTED, **defaults}.items():
        if (value := getattr(config, name)) not in accepted:
            raise ValueError(f"{name}: {value!r}; accepted: {', '.join(map(str, accepted))}")
    if config.normalize_embeddings and config.head == "roberta":
        raise ValueError("normalised embeddings are accepted only with the CLAP head")
    for name, head in heads.items():
        if head.pooling != "first":
            raise ValueError(f"head {name}: pooling {head.pooling!r}; accepted: 'first'")
    if len(dropouts := {head.dropout for head in heads.values()}) > 1:
        raise ValueError(f"heads have dropout {sorted(dropouts)}; accepted: the same for all")


def export_weights(
    weights: Mapping[str, Tensor], config: ModelConfig, heads: Iterable[str] = ()
) -> OrderedDict[str, Tensor]:
    """Rename our weights to fairseq's, and add what its strict loading expects.

    Args:
        weights: of the language model and its classification heads, fp32.
        config: of the language model.
        heads: names of the classification heads.

    Raises:
        ValueError: a weight does not exist in fairseq.
    """
    result = OrderedDict({layout.VERSION: torch.tensor([3.0])})
    if not layout.POSITIONS[config.position]["encoder_learned_pos"]:
        result[layout.DEVICE_MARKER] = torch.zeros(1)
    result |= separated(weights, layout.names(weights, heads))
    if layout.BETA in result:
        result[layout.BETA] = result[layout.BETA].reshape(())
    # The same tensor, stored once.
    result[layout.TIED] = result[layout.TOKENS]
    return result

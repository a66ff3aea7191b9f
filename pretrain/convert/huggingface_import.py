"""Hugging Face folders to model folders: RoBERTa models, and our own exports.

Nothing in a folder is executed. transformers itself is not needed here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data_prep import tokenizer as tokenizers
from data_prep.tokenizer import Tokenizer
from pretrain.convert import huggingface_layout as layout
from pretrain.convert.weights import Names, empty_weights, joined, load_pickled
from pretrain.inference.model_folder import HEADS, ModelContents
from pretrain.model.config import ClassificationConfig, ModelConfig

Weights = Mapping[str, Tensor]

_NOT_MODELLED: Mapping[str, object] = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
    # Positions are counted from this id on.
    "pad_token_id": 1,
}
"""Settings of RobertaConfig that change what a model computes: the default, and the only value that
our model can have."""
_UNUSED = re.compile(
    r"roberta\.embeddings\.(position_ids|token_type_ids)|roberta\.pooler\.dense\.(weight|bias)"
)
"""Counters, and the pooler, which neither a masked language model nor a classifier has."""


def read(folder: Path) -> ModelContents:
    """Read a RoBERTa model, or one of our own exports, as the contents of a model folder.

    Of a token-type table only row 0 is used, the only one that RoBERTa's tokenizer asks for; it is
    added to every row of the position table. Where there is a classifier but no head over the
    vocabulary, a head is made that finds all tokens equally likely. `provenance["notes"]` reports
    both, and a vocabulary that was left out.

    Args:
        folder: holds config.json, and model.safetensors (whole, or in parts under
            model.safetensors.index.json) or pytorch_model.bin.

    Raises:
        ValueError: a file is missing or damaged, a setting is one that our model does not have, or
            weights are missing, left over or misshapen.
    """
    config_file = folder / "config.json"
    settings = _read_json(config_file)
    kind = settings.get("model_type")
    if kind not in ("roberta", "zeroclap"):
        raise ValueError(f"{config_file}: model_type {kind!r}; accepted: 'roberta', 'zeroclap'")
    file, theirs = _read_weights(folder)
    notes: list[str] = []
    try:
        config = _roberta_config(settings) if kind == "roberta" else _own_config(settings)
        dense = f"{layout.CLASSIFIER}.dense.weight"
        heads = _classification_heads(settings) if dense in theirs else {}
    except ValueError as error:
        raise ValueError(f"{config_file}: {error}") from None
    empty = empty_weights(config, heads)
    try:
        if kind == "roberta":
            weights = _roberta_weights(theirs, empty, notes)
        else:
            weights = _own_weights(theirs, empty, settings, notes)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    vocabulary = _read_vocabulary(folder, config, notes)
    provenance = {
        "source": folder.resolve().name,
        "format": "Hugging Face",
        "model_type": kind,
        "provenance": settings.get("provenance"),
        "notes": notes,
    }
    return ModelContents(config, weights, vocabulary, provenance, heads)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a Hugging Face folder has one")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: is not a mapping but {type(values).__name__}")
    return values


def _read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the file to name in errors, and every weight in it."""
    readers = {
        "model.safetensors": _read_safetensors,
        "model.safetensors.index.json": _read_parts,
        "pytorch_model.bin": _read_pickled,
    }
    for name, reader in readers.items():
        if (folder / name).is_file():
            return folder / name, reader(folder / name)
    raise ValueError(f"{folder}: has none of {', '.join(readers)}")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: is cut short or damaged: {error}") from None


def _read_parts(index: Path) -> dict[str, Tensor]:
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(x, str) for x in files.values()):
        raise ValueError(f"{index}: weight_map is not a mapping of weights to files")
    result: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: {name!r} is not a file of this folder")
        result |= _read_safetensors(index.parent / name)
    if different := sorted(result.keys() ^ files.keys()):
        raise ValueError(f"{index}: its files do not hold what it lists, such as {different[0]}")
    return result


def _read_pickled(path: Path) -> dict[str, Tensor]:
    content = load_pickled(path)
    if not isinstance(content, dict) or not all(torch.is_tensor(x) for x in content.values()):
        raise ValueError(f"{path}: is not a mapping of names to weights")
    return content


def _setting(settings: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - as the file has it
    """Return a setting that has no default: it differs between versions, or leaves no trace."""
    if name not in settings:
        raise ValueError(f"has no {name}")
    return settings[name]


def _roberta_config(settings: Mapping[str, Any]) -> ModelConfig:
    for name, accepted in _NOT_MODELLED.items():
        value = settings.get(name, accepted)
        if value != accepted:
            raise ValueError(f"{name} is {value!r}; accepted: {accepted!r}")
    positions = _setting(settings, "max_position_embeddings")
    if not isinstance(positions, int) or positions <= layout.UNUSED_POSITIONS:
        raise ValueError(f"max_position_embeddings is {positions!r}; accepted: 3 or more")
    fields = {ours: _setting(settings, theirs) for ours, theirs in layout.ROBERTA_SETTINGS.items()}
    return ModelConfig(**fields, max_positions=positions - layout.UNUSED_POSITIONS)


def _own_config(settings: Mapping[str, Any]) -> ModelConfig:
    """Read the fields that this version has, and those that the export lists as architecture."""
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    listed = settings.get("architecture_fields", [])
    if not isinstance(listed, list):
        raise ValueError(f"architecture_fields is {listed!r}; accepted: a list of names")
    names |= {str(name) for name in listed}
    values = {name: settings[name] for name in names if name in settings}
    # Exports of earlier versions have no such rows.
    rows, masks = values.get("vocab_size"), settings.get("mask_token_ids")
    if rows is not None and masks:
        first = masks[0] if isinstance(masks, list) else None
        if (
            not isinstance(rows, int)
            or not isinstance(first, int)
            or masks != [*range(first, rows)]
        ):
            raise ValueError(
                f"mask_token_ids is {masks!r} with {rows!r} rows; accepted: the last ids, since "
                "`<mask>` has the last id of a vocabulary here"
            )
        values["vocab_size"] = first
    return ModelConfig.from_dict(values)


def _classification_heads(settings: Mapping[str, Any]) -> dict[str, ClassificationConfig]:
    """Describe the one classification head of a folder, under its name."""
    listed = settings.get("id2label")
    # transformers writes no labels where there are two classes.
    labels = layout.unnamed(2) if listed is None else _labels(listed)
    problem = settings.get("problem_type")
    if problem not in layout.problem_types(len(labels)):
        raise ValueError(
            f"problem_type is {problem!r} with {len(labels)} labels; accepted: "
            f"{layout.problem_types(len(labels))[0]!r}"
        )
    dropout = settings.get("classifier_dropout")
    head = ClassificationConfig(
        len(labels),
        () if labels == layout.unnamed(len(labels)) else labels,
        settings.get("classifier_pooling", "first"),
        settings.get("hidden_dropout_prob", 0.0) if dropout is None else dropout,
    )
    name = settings.get("classifier_name", layout.CLASSIFIER)
    if not isinstance(name, str) or not name:
        raise ValueError(f"classifier_name is {name!r}; accepted: a name")
    return {name: head}


def _labels(listed: object) -> tuple[str, ...]:
    expected = [str(index) for index in range(len(listed))] if isinstance(listed, dict) else []
    if not isinstance(listed, dict) or set(listed) != set(expected):
        raise ValueError(f"id2label is {listed!r}; accepted: a label for each of 0, 1, 2, ...")
    return tuple(str(listed[index]) for index in expected)


def _own_weights(
    theirs: Weights, empty: Weights, settings: Mapping[str, Any], notes: list[str]
) -> dict[str, Tensor]:
    masks = len(settings.get("mask_token_ids", []))
    trained = {
        name: weight[: len(weight) - masks] if name in layout.BY_TOKEN else weight
        for name, weight in theirs.items()
    }
    return _with_head(trained, layout.own_names(empty), empty, notes)


def _roberta_weights(theirs: Weights, empty: Weights, notes: list[str]) -> dict[str, Tensor]:
    left = {_modern(name): w for name, w in theirs.items() if not _UNUSED.fullmatch(name)}
    _drop_tied(left)
    types = left.pop(layout.TOKEN_TYPES, None)
    result = _with_head(left, layout.roberta_names(empty), empty, notes)
    size = empty[layout.POSITIONS].shape[1]
    if types is None or types.ndim != 2 or types.shape[1] != size or not len(types):
        found = "missing" if types is None else list(types.shape)
        raise ValueError(f"{layout.TOKEN_TYPES} is {found}; accepted: one row or more of {size}")
    if len(types) > 1:
        notes.append(f"of {len(types)} token types, 0 was taken: RoBERTa's tokenizer has no other")
    result[layout.POSITIONS] = result[layout.POSITIONS] + types[0].float()
    return result


def _modern(name: str) -> str:
    """Return today's name of a weight: layer norms once had `gamma` and `beta`."""
    return re.sub(r"(?<=\.)gamma$", "weight", re.sub(r"(?<=\.)beta$", "bias", name))


def _drop_tied(weights: dict[str, Tensor]) -> None:
    """Remove second copies of the tied weights.

    Raises:
        ValueError: a copy differs, so that the model has an output embedding of its own.
    """
    bias = "lm_head.decoder.bias"
    if bias in weights and "lm_head.bias" not in weights:
        weights["lm_head.bias"] = weights.pop(bias)
    tied = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        bias: "lm_head.bias",
    }
    for copy, source in tied.items():
        if copy not in weights or source not in weights:
            continue
        if not torch.equal(weights.pop(copy), weights[source]):
            raise ValueError(
                f"{copy} differs from {source}; accepted: a head that is tied to the embedding"
            )


def _with_head(
    weights: Weights, names: Names, empty: Weights, notes: list[str]
) -> dict[str, Tensor]:
    """Rename the weights to ours; add a head over the vocabulary to a classifier without one.

    Raises:
        ValueError: weights are missing, left over or misshapen.
    """
    over_vocabulary = [name for name in names if name.startswith("head.")]
    found = any(theirs in weights for name in over_vocabulary for theirs in names[name])
    if found or not over_vocabulary:
        return joined(weights, names, empty)
    if not any(name.startswith(HEADS) for name in names):
        raise ValueError(
            "holds neither a head over the vocabulary (it would have "
            f"{names[over_vocabulary[0]][0]}) nor a classifier; accepted: a model for masked "
            "language modelling or sequence classification"
        )
    notes.append("there was no head over the vocabulary: all tokens are equally likely")
    wanted = {name: theirs for name, theirs in names.items() if name not in over_vocabulary}
    # All logits are zero.
    made = {name: torch.zeros(empty[name].shape) for name in over_vocabulary}
    if "head.norm.weight" in made:
        made["head.norm.weight"].fill_(1.0)
    return joined(weights, wanted, empty) | made


def _read_vocabulary(folder: Path, config: ModelConfig, notes: list[str]) -> Tokenizer | None:
    file = folder / tokenizers.FILE_NAME
    pair = [folder / name for name in ("vocab.json", "merges.txt")]
    if file.is_file():
        _read_json(file)  # a damaged one is refused, one with other special ids is left out
    elif not all(path.is_file() for path in pair):
        return None
    try:
        vocabulary = tokenizers.load(folder)
    except ValueError as error:
        notes.append(f"the vocabulary was left out: {error}")
        return None
    ids, rows = vocabulary.vocab_size, config.vocab_size
    if ids <= rows if config.mask_embedding == "row" else vocabulary.mask_id >= rows:
        return vocabulary
    notes.append(f"the vocabulary was left out: it has {ids} ids, the model {rows} rows")
    return None

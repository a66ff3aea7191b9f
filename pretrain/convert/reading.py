"""Read model folders: RoBERTa, ALBERT and zeroclap models as transformers saves them.

Nothing in a folder is executed, and transformers is not needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data_prep.common import hub
from data_prep.common.arguments import as_invoked
from data_prep.tokenizer import Tokenizer
from pretrain.convert import names as layout
from pretrain.convert import tokenizer_files
from pretrain.convert.contents import CLASSIFIER, ModelContents, check_declared_size, read_json
from pretrain.convert.weights import Names, empty_weights, joined, load_pickled, weights_in
from pretrain.model.classification import ClassificationConfig
from pretrain.model.config import ModelConfig

Weights = Mapping[str, Tensor]

_OF_BOTH = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "add_cross_attention": False,
    "quantization_config": None,
}
_NOT_MODELLED: Mapping[str, Mapping[str, object]] = {
    # RoBERTa counts positions from the id of `<pad>` on.
    "roberta": {**_OF_BOTH, "hidden_act": "gelu", "pad_token_id": 1},
    "albert": {**_OF_BOTH, "inner_group_num": 1},
}
"""Settings of RobertaConfig and AlbertConfig that change a model's outputs, with the default, which
is the only supported value."""
_UNUSED = re.compile(
    r"(roberta|albert)\.embeddings\.(position_ids|token_type_ids)"
    r"|roberta\.pooler\.dense\.(weight|bias)"
)
"""Counters, and the pooler, which neither a masked language model nor a classifier has."""
_INDEX = "model.safetensors.index.json"
_FETCHED = ("config.json", "*.safetensors", _INDEX, *tokenizer_files.NAMES)
_KINDS = {
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "albert": "albert",
    "zeroclap": "zeroclap",
}
"""Accepted values of model_type, with the class that has the same weights and settings."""
_PREFIXES = {"roberta": "roberta.", "albert": "albert.", "zeroclap": "encoder."}
"""Prefix of the encoder's weights."""


def located(model: Path) -> Path:
    """Return the folder of a model; one that is not here but on the Hugging Face hub is fetched.

    Raises:
        ValueError: it is not on the hub, or the hub does not answer.
    """
    name = str(model)
    if not hub.may_be_name(name):
        return model
    try:
        folder = hub.fetch(name, _FETCHED)
        found = any(folder.glob("*.safetensors"))
        return folder if found else hub.fetch(name, ["pytorch_model.bin"])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def read_folder(folder: Path) -> ModelContents:
    """Read a model folder, ours or anybody's.

    RoBERTa's tokenizer uses only row 0 of the token-type table, which is added to every row of the
    position table. ALBERT's vocabulary gets our special ids, and its rows are permuted. The notes
    say what was added or left out.

    Args:
        folder: or a name on the Hugging Face hub. It holds config.json, and model.safetensors
            (whole, or in parts under model.safetensors.index.json) or pytorch_model.bin.

    Raises:
        ValueError: a file is missing or damaged, a setting is one that our model does not have,
            weights are missing, left over or misshapen, or an ALBERT has other special ids than
            ours and no vocabulary to map them.
    """
    folder = located(folder)
    settings = _settings(folder)
    kind = _KINDS[settings["model_type"]]
    file, theirs = read_weights(folder)
    if not any(name.startswith(_PREFIXES[kind]) for name in theirs):  # an encoder alone
        theirs = {_PREFIXES[kind] + name: weight for name, weight in theirs.items()}
    notes: list[str] = []
    with _naming(folder / "config.json"):
        config = _architecture(kind, settings, theirs)
        classifier = _classifier(kind, settings, theirs)
        size = sum(weight.nbytes for weight in theirs.values())
        check_declared_size(config, classifier, size)
    empty = empty_weights(config, classifier)
    with _naming(file):
        if kind == "roberta":
            weights = _roberta_weights(theirs, empty, notes)
        elif kind == "albert":
            weights = _albert_weights(theirs, empty, config, notes)
        else:
            weights = _own_weights(theirs, empty, settings, notes)
    vocabulary, order = tokenizer_files.read_vocabulary(folder, kind, config, notes)
    other_ids = kind == "albert" and settings.get("pad_token_id", 0) != Tokenizer.pad_id
    if vocabulary is None and other_ids:
        reason = "; ".join(["the ids are those of ALBERT's vocabulary", *notes])
        raise ValueError(f"{folder}: {reason}; put its tokenizer.json into the folder")
    if order:
        weights |= {name: weights[name][order] for name in layout.BY_TOKEN & weights.keys()}
    provenance = settings.get("provenance")
    if not isinstance(provenance, dict):  # not one of ours
        provenance = {"source": folder.resolve().name, "model_type": settings["model_type"]}
    return ModelContents(config, weights, vocabulary, provenance, classifier, tuple(notes))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name a file in the errors about what it holds."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _settings(folder: Path) -> dict[str, Any]:
    """Read config.json, whose model_type is one of ours."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder}: is not a model folder, it has no config.json "
            f"(`{as_invoked('pretrain export')} RUN --output FOLDER` makes one)"
        )
    settings = read_json(path)
    if (found := settings.get("model_type")) not in [*_KINDS]:
        accepted = ", ".join(map(repr, _KINDS))
        raise ValueError(f"{path}: model_type {found!r}; accepted: {accepted}")
    return settings


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the file to name in errors, and every weight in it.

    Raises:
        ValueError: there is no such file, or one is damaged.
    """
    files = weight_files(folder)
    weights: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".bin":
            weights |= weights_in(load_pickled(file), f"{file}: its content")
            continue
        try:
            weights |= load_file(str(file))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: is cut short or damaged: {error}") from None
    return (files[0] if len(files) == 1 else folder / _INDEX), weights


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights.

    Raises:
        ValueError: there are none, or the index names files elsewhere.
    """
    for name in ("model.safetensors", _INDEX, "pytorch_model.bin"):
        if (file := folder / name).is_file():
            break
    else:
        raise ValueError(f"{folder}: has no model.safetensors, {_INDEX} or pytorch_model.bin")
    if name != _INDEX:
        return [file]
    names = read_json(file).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(x, str) for x in names.values()):
        raise ValueError(f"{file}: weight_map is not a mapping of weights to files")
    if wrong := [name for name in names.values() if Path(name).name != name]:
        raise ValueError(f"{file}: {wrong[0]!r} is not a file of this folder")
    return [folder / name for name in sorted(set(names.values()))]


def _setting(settings: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - as the file has it
    """Return a required setting: its default differs between versions, or it leaves no trace."""
    if name not in settings:
        raise ValueError(f"has no {name}")
    return settings[name]


def _architecture(kind: str, settings: Mapping[str, Any], theirs: Weights) -> ModelConfig:
    read = {"roberta": _roberta_config, "albert": _albert_config, "zeroclap": _own_config}
    for name, accepted in _NOT_MODELLED.get(kind, {}).items():
        if (value := settings.get(name, accepted)) != accepted:
            raise ValueError(f"{name} is {value!r}; accepted: {accepted!r}")
    config = read[kind](settings)
    # transformers saves a classifier without it, and AlbertConfig does not mention it.
    has_pairs = not theirs.keys().isdisjoint({"pair_head.dense.weight", layout.ALBERT_PAIRS})
    return dataclasses.replace(config, pair_head=has_pairs)


def _roberta_config(settings: Mapping[str, Any]) -> ModelConfig:
    positions = _setting(settings, "max_position_embeddings")
    if not isinstance(positions, int) or positions <= layout.UNUSED_POSITIONS:
        raise ValueError(f"max_position_embeddings is {positions!r}; accepted: 3 or more")
    fields = {ours: _setting(settings, theirs) for ours, theirs in layout.ROBERTA_SETTINGS.items()}
    return ModelConfig(**fields, max_positions=positions - layout.UNUSED_POSITIONS)


def _albert_config(settings: Mapping[str, Any]) -> ModelConfig:
    activations = {theirs: ours for ours, theirs in layout.ALBERT_ACTIVATIONS.items()}
    if (activation := _setting(settings, "hidden_act")) not in [*activations]:
        accepted = ", ".join(map(repr, activations))
        raise ValueError(f"hidden_act is {activation!r}; accepted: {accepted}")
    fields = {ours: _setting(settings, theirs) for ours, theirs in layout.ALBERT_SETTINGS.items()}
    size, groups = _setting(settings, "embedding_size"), _setting(settings, "num_hidden_groups")
    shared = groups == 1 or groups != fields["num_layers"]
    return ModelConfig(
        **fields,
        embedding_size=0 if size == fields["hidden_size"] else size,
        sharing="all" if shared else "none",
        layer_groups=groups if shared else 1,
        position_offset=0,
        activation=activations[activation],
        initial_weights="truncated-normal",
    )


def _own_config(settings: Mapping[str, Any]) -> ModelConfig:
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    values = {name: settings[name] for name in names if name in settings}
    rows, masks = values.get("vocab_size"), settings.get("mask_token_ids")
    if isinstance(rows, int):
        if not isinstance(masks, list) or masks != [*range(rows - len(masks), rows)]:
            raise ValueError(
                f"mask_token_ids is {masks!r} with {rows} rows, but `<mask>` must have the last ids"
            )
        values["vocab_size"] = rows - len(masks)
    return ModelConfig.from_dict(values)


def _classifier(
    kind: str, settings: Mapping[str, Any], theirs: Weights
) -> ClassificationConfig | None:
    """Describe the classification head of a folder; None without one."""
    module = "" if kind == "albert" else "dense."
    if f"{CLASSIFIER}{module}weight" not in theirs:
        return None
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
    if kind == "albert":
        dropout = settings.get("classifier_dropout_prob", 0.1)
    return ClassificationConfig(
        len(labels),
        () if labels == layout.unnamed(len(labels)) else labels,
        settings.get("classifier_pooling", "first"),
        settings.get("hidden_dropout_prob", 0.0) if dropout is None else dropout,
    )


def _labels(listed: object) -> tuple[str, ...]:
    expected = [str(index) for index in range(len(listed))] if isinstance(listed, dict) else []
    if not isinstance(listed, dict) or set(listed) != set(expected):
        raise ValueError(f"id2label is {listed!r}; it must have a label for each of 0, 1, 2, ...")
    return tuple(str(listed[index]) for index in expected)


def _own_weights(
    theirs: Weights, empty: Weights, settings: Mapping[str, Any], notes: list[str]
) -> dict[str, Tensor]:
    masks = len(settings.get("mask_token_ids", []))
    trained = {
        name: weight[: len(weight) - masks] if name in layout.BY_TOKEN else weight
        for name, weight in theirs.items()
    }
    return _renamed(trained, {name: (name,) for name in empty}, empty, notes)


def _roberta_weights(theirs: Weights, empty: Weights, notes: list[str]) -> dict[str, Tensor]:
    left = _modern(theirs)
    _drop_tied(left, "lm_head", "roberta.embeddings.word_embeddings.weight")
    types = left.pop(layout.TOKEN_TYPES, None)
    result = _renamed(left, layout.roberta_names(empty), empty, notes)
    size = empty[layout.POSITIONS].shape[1]
    if types is None or types.ndim != 2 or types.shape[1] != size or not len(types):
        found = "missing" if types is None else list(types.shape)
        raise ValueError(f"{layout.TOKEN_TYPES} is {found}; accepted: one row or more of {size}")
    if len(types) > 1:
        notes.append(f"of {len(types)} token types, 0 was taken: RoBERTa's tokenizer has no other")
    if types[0].any():
        result[layout.POSITIONS] = result[layout.POSITIONS] + types[0].float()
    return result


def _albert_weights(
    theirs: Weights, empty: Weights, config: ModelConfig, notes: list[str]
) -> dict[str, Tensor]:
    left = _modern(theirs)
    _drop_tied(left, "predictions", "albert.embeddings.word_embeddings.weight")
    names = layout.albert_names(empty, config)
    pooler = {f"{layout.ALBERT_POOLER}.{kind}" for kind in ("weight", "bias")}
    if pooler & left.keys() and not any(pooler & {*used} for used in names.values()):
        notes.append(f"{layout.ALBERT_POOLER} was left out: there is no head that reads it")
        left = {name: weight for name, weight in left.items() if name not in pooler}
    if config.token_size == config.hidden_size:
        # We have no projection of token vectors that have the hidden size already.
        for name, expected in layout.identity(config.hidden_size).items():
            if name in left and not torch.equal(left.pop(name).float(), expected):
                raise ValueError(
                    f"{name} changes the token vectors; it must be the identity where "
                    f"embedding_size equals hidden_size, {config.hidden_size}"
                )
    return _renamed(left, names, empty, notes)


def _modern(weights: Weights) -> dict[str, Tensor]:
    """Return the used weights under current names: norms once had `gamma` and `beta`."""
    return {
        re.sub(r"(?<=\.)gamma$", "weight", re.sub(r"(?<=\.)beta$", "bias", name)): weight
        for name, weight in weights.items()
        if not _UNUSED.fullmatch(name)
    }


def _drop_tied(weights: dict[str, Tensor], head: str, tokens: str) -> None:
    """Remove second copies of the tied weights: of the table of tokens, and of the head's bias.

    Raises:
        ValueError: a copy differs, so that the model has an output embedding of its own.
    """
    bias, copy_of_bias = f"{head}.bias", f"{head}.decoder.bias"
    if copy_of_bias in weights and bias not in weights:
        weights[bias] = weights.pop(copy_of_bias)
    for copy, source in {f"{head}.decoder.weight": tokens, copy_of_bias: bias}.items():
        if copy not in weights or source not in weights:
            continue
        if not torch.equal(weights.pop(copy), weights[source]):
            raise ValueError(
                f"{copy} differs from {source}, but the head must be tied to the embedding"
            )


def _renamed(weights: Weights, names: Names, empty: Weights, notes: list[str]) -> dict[str, Tensor]:
    """Return the weights by our names; the head over the vocabulary may be missing.

    Raises:
        ValueError: weights are missing, left over or misshapen.
    """
    head = [name for name in names if name.startswith("head.")]
    if head and not any(theirs in weights for name in head for theirs in names[name]):
        notes.append("there is no head over the vocabulary")
        names = {name: theirs for name, theirs in names.items() if name not in head}
    return joined(weights, names, empty)

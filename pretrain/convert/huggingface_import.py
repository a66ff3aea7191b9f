"""Hugging Face folders to model folders: RoBERTa models, and what the export wrote.

Nothing that a folder carries is executed. transformers itself is not needed here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import tokenizer as tokenizers
from pretrain.convert.huggingface_layout import (
    CLASSIFIER,
    POSITIONS,
    TOKEN_TYPES,
    UNUSED_POSITIONS,
    Names,
    own_names,
    problem_types,
    roberta_names,
    unnamed,
)
from pretrain.inference.model_folder import HEADS, ModelContents
from pretrain.model.config import ClassificationConfig, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from data_prep.tokenizer import Tokenizer

_ROBERTA_SETTINGS: Mapping[str, object] = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
    # Positions are counted from this id on.
    "pad_token_id": 1,
}
"""Settings of RobertaConfig that change what is computed: their default, the one value ours has."""
_WITHOUT_MEANING = re.compile(
    r"roberta\.embeddings\.(position_ids|token_type_ids)|roberta\.pooler\.dense\.(weight|bias)"
)
"""Counters, and the pooler, which neither a masked language model nor a classifier has."""


@dataclasses.dataclass(frozen=True)
class _Source:
    """A folder as read: its settings, and weights by their names there."""

    folder: Path
    settings: Mapping[str, Any]
    weights_file: Path
    weights: dict[str, Tensor]

    def setting(self, name: str) -> Any:  # noqa: ANN401 - as the file has it
        """One that has no default: it differs between versions, or leaves no trace elsewhere."""
        if name not in self.settings:
            raise ValueError(f"does not say {name}")
        return self.settings[name]


def read(folder: Path) -> ModelContents:
    """A RoBERTa model, or what `write` wrote, as the contents of a model folder.

    Of a token-type table row 0 is used, the only one that RoBERTa's tokenizer asks for: it is added
    to each position's row. Where there is a classifier but no head over the vocabulary, the latter
    becomes one that finds all tokens equally likely. `provenance["notes"]` tells of both, and of a
    vocabulary that could not be taken along.

    Args:
        folder: holds config.json, and model.safetensors (whole, or in parts under
            model.safetensors.index.json) or pytorch_model.bin.

    Raises:
        ValueError: a file is missing or damaged, a setting is one that ours does not have, or
            weights are missing, left over or of another shape.
    """
    config_file = folder / "config.json"
    settings = _read_json(config_file)
    kind = settings.get("model_type")
    if kind not in ("roberta", "zeroclap"):
        raise ValueError(f"{config_file}: model_type {kind!r}; accepted: 'roberta', 'zeroclap'")
    source = _Source(folder, settings, *_read_weights(folder))
    notes: list[str] = []
    try:
        config = _roberta_config(source) if kind == "roberta" else _own_config(source)
        heads = _classification_heads(source)
    except ValueError as error:
        raise ValueError(f"{config_file}: {error}") from None
    if kind == "roberta":
        weights = _roberta_weights(source, config, heads, notes)
    else:
        weights = _own_weights(source, config, heads, notes)
    provenance = {
        "source": folder.resolve().name,
        "format": "Hugging Face",
        "model_type": kind,
        "provenance": settings.get("provenance"),
    }
    vocabulary = _read_vocabulary(source, config, notes)
    return ModelContents(config, weights, vocabulary, {**provenance, "notes": notes}, heads)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a Hugging Face folder has one")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: is no mapping but {type(values).__name__}")
    return values


def _read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file to name in errors, and every weight in it."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    pickled = folder / "pytorch_model.bin"
    if whole.is_file():
        return whole, _read_safetensors(whole)
    if index.is_file():
        return index, _read_parts(index)
    if pickled.is_file():
        return pickled, _read_pickled(pickled)
    raise ValueError(f"{folder}: has none of {whole.name}, {index.name}, {pickled.name}")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: is cut short or damaged: {error}") from None


def _read_parts(index: Path) -> dict[str, Tensor]:
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise ValueError(f"{index}: weight_map is no mapping of weights to files")
    result: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: {name!r} is no file of this folder")
        result |= _read_safetensors(index.parent / name)
    if unlike := sorted(result.keys() ^ places.keys()):
        raise ValueError(f"{index}: its files do not hold what it lists; it is about {unlike[0]}")
    return result


def _read_pickled(path: Path) -> dict[str, Tensor]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # whatever damaged bytes make torch stumble over
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path}: was not read: it is damaged, or holds more than tensors, which would have to "
            f"be executed ({reason})"
        ) from None
    tensors = isinstance(content, dict) and all(torch.is_tensor(x) for x in content.values())
    if not tensors:
        raise ValueError(f"{path}: is no table of weights")
    return dict(content)


def _roberta_config(source: _Source) -> ModelConfig:
    for name, accepted in _ROBERTA_SETTINGS.items():
        value = source.settings.get(name, accepted)
        if value != accepted:
            raise ValueError(f"{name} is {value!r}; accepted: {accepted!r}")
    positions = source.setting("max_position_embeddings")
    if not isinstance(positions, int) or positions <= UNUSED_POSITIONS:
        raise ValueError(f"max_position_embeddings is {positions!r}; accepted: 3 or more")
    return ModelConfig(
        vocab_size=source.setting("vocab_size"),
        hidden_size=source.setting("hidden_size"),
        num_layers=source.setting("num_hidden_layers"),
        num_heads=source.setting("num_attention_heads"),
        intermediate_size=source.setting("intermediate_size"),
        max_positions=positions - UNUSED_POSITIONS,
        dropout=source.setting("hidden_dropout_prob"),
        attention_dropout=source.setting("attention_probs_dropout_prob"),
        layer_norm_epsilon=source.setting("layer_norm_eps"),
    )


def _own_config(source: _Source) -> ModelConfig:
    """The fields that this version knows, and those that the export says are the architecture's."""
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    named = source.settings.get("architecture_fields", [])
    if not isinstance(named, list):
        raise ValueError(f"architecture_fields is {named!r}; accepted: a list of names")
    names |= {str(name) for name in named}
    return ModelConfig.from_dict(
        {name: source.settings[name] for name in names if name in source.settings}
    )


def _classification_heads(source: _Source) -> dict[str, ClassificationConfig]:
    """The head that the weights have, under its name; empty where they have none."""
    dense = f"{CLASSIFIER}.dense.weight"
    if dense not in source.weights:
        return {}
    settings = source.settings
    named = settings.get("id2label")
    # transformers writes no names where there are two classes.
    labels = unnamed(2) if named is None else _labels(named)
    problem = settings.get("problem_type")
    if problem not in problem_types(len(labels)):
        raise ValueError(
            f"problem_type is {problem!r} with {len(labels)} labels; accepted: "
            f"{problem_types(len(labels))[0]!r}"
        )
    dropout = settings.get("classifier_dropout")
    head = ClassificationConfig(
        len(labels),
        () if labels == unnamed(len(labels)) else labels,
        settings.get("classifier_pooling", "first"),
        settings.get("hidden_dropout_prob", 0.0) if dropout is None else dropout,
    )
    name = settings.get("classifier_name", CLASSIFIER)
    if not isinstance(name, str) or not name:
        raise ValueError(f"classifier_name is {name!r}; accepted: a name")
    return {name: head}


def _labels(named: object) -> tuple[str, ...]:
    expected = [str(index) for index in range(len(named))] if isinstance(named, dict) else []
    if not isinstance(named, dict) or set(named) != set(expected):
        raise ValueError(f"id2label is {named!r}; accepted: a label for each of 0, 1, 2, ...")
    return tuple(str(named[index]) for index in expected)


def _own_weights(
    source: _Source,
    config: ModelConfig,
    heads: Mapping[str, ClassificationConfig],
    notes: list[str],
) -> dict[str, Tensor]:
    shapes = _expected(config, heads)
    names = own_names(shapes, next(iter(heads), None))
    return _take(source, dict(source.weights), names, shapes, notes)


def _roberta_weights(
    source: _Source,
    config: ModelConfig,
    heads: Mapping[str, ClassificationConfig],
    notes: list[str],
) -> dict[str, Tensor]:
    left = {
        _modern(name): weight
        for name, weight in source.weights.items()
        if not _WITHOUT_MEANING.fullmatch(name)
    }
    _drop_tied(source, left)
    types = left.pop(TOKEN_TYPES, None)
    shapes = _expected(config, heads)
    names = roberta_names(config, next(iter(heads), None), language_model=True)
    result = _take(source, left, names, shapes, notes)
    if types is None or types.ndim != 2 or types.shape[1] != config.hidden_size or not len(types):
        raise ValueError(
            f"{source.weights_file}: {TOKEN_TYPES} is "
            f"{'missing' if types is None else list(types.shape)}; accepted: one row or more of "
            f"{config.hidden_size}"
        )
    if len(types) > 1:
        notes.append(f"of {len(types)} token types, 0 was taken: RoBERTa's tokenizer has no other")
    result[POSITIONS] = result[POSITIONS] + types[0].float()
    return result


def _modern(name: str) -> str:
    """The name of a weight today: layer norms once had `gamma` and `beta`."""
    return re.sub(r"(?<=\.)gamma$", "weight", re.sub(r"(?<=\.)beta$", "bias", name))


def _drop_tied(source: _Source, weights: dict[str, Tensor]) -> None:
    """Remove second copies of the tied weights.

    Raises:
        ValueError: a copy differs, so that the model has an output embedding of its own.
    """
    import torch

    bias = "lm_head.decoder.bias"
    if bias in weights and "lm_head.bias" not in weights:
        weights["lm_head.bias"] = weights.pop(bias)
    tied = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        bias: "lm_head.bias",
    }
    for copy, original in tied.items():
        if copy not in weights or original not in weights:
            continue
        if not torch.equal(weights.pop(copy), weights[original]):
            raise ValueError(
                f"{source.weights_file}: {copy} differs from {original}; accepted: a head that is "
                "tied to the embedding"
            )


def _expected(config: ModelConfig, heads: Mapping[str, ClassificationConfig]) -> dict[str, Tensor]:
    """Our weights, without content."""
    import torch

    from pretrain.model.heads import ClassificationHead
    from pretrain.model.language_model import LanguageModel

    with torch.device("meta"):
        result: dict[str, Tensor] = dict(LanguageModel(config).state_dict())
        for name, head in heads.items():
            weights = ClassificationHead(config.hidden_size, head).state_dict()
            result |= {f"{HEADS}{name}.{key}": weight for key, weight in weights.items()}
    return result


def _take(
    source: _Source,
    left: dict[str, Tensor],
    names: Names,
    shapes: Mapping[str, Tensor],
    notes: list[str],
) -> dict[str, Tensor]:
    """Weights by our names, fp32.

    Raises:
        ValueError: weights are missing, left over or of another shape; each is named.
    """
    import torch

    over_words = [name for name in names if name.startswith("head.")]
    has_head = any(theirs in left for name in over_words for theirs in names[name])
    result = {}
    if not has_head:
        if not any(name.startswith(HEADS) for name in names):
            raise ValueError(
                f"{source.weights_file}: holds neither a head over the vocabulary (it would have "
                f"{names[over_words[0]][0]}) nor a classifier; accepted: a model for masked "
                "language modelling or sequence classification"
            )
        notes.append("no head over the vocabulary was there: all tokens are equally likely")
        result = {name: _silent(name, shapes[name]) for name in over_words}
    wanted = {name: theirs for name, theirs in names.items() if name not in result}
    missing = [name for theirs in wanted.values() for name in theirs if name not in left]
    unknown = sorted(left.keys() - {name for theirs in wanted.values() for name in theirs})
    if missing or unknown:
        raise ValueError(
            f"{source.weights_file}: its weights do not fit config.json: missing "
            f"{_few(missing)}; left over {_few(unknown)}"
        )
    for ours, theirs in wanted.items():
        parts = [left[name] for name in theirs]
        for name, part, shape in zip(theirs, parts, shapes[ours].chunk(len(theirs)), strict=True):
            if part.shape != shape.shape or not part.is_floating_point():
                raise ValueError(
                    f"{source.weights_file}: {name} is {list(part.shape)} of {part.dtype}; "
                    f"config.json asks for {list(shape.shape)} of a floating-point kind"
                )
        result[ours] = torch.cat([part.float() for part in parts])
    return result


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def _silent(name: str, shape: Tensor) -> Tensor:
    """A weight of a head over the vocabulary whose logits are all zero."""
    import torch

    return torch.ones(shape.shape) if name == "head.norm.weight" else torch.zeros(shape.shape)


def _read_vocabulary(source: _Source, config: ModelConfig, notes: list[str]) -> Tokenizer | None:
    file = source.folder / tokenizers.FILE_NAME
    pair = [source.folder / name for name in ("vocab.json", "merges.txt")]
    if file.is_file():
        _read_json(file)  # a damaged one is refused, one of another order is left behind
    elif not all(path.is_file() for path in pair):
        return None
    try:
        vocabulary = tokenizers.load(source.folder)
    except ValueError as error:
        notes.append(f"the vocabulary stayed behind: {error}")
        return None
    rows = config.vocab_size
    has_row = config.mask_embedding == "row"
    fits = vocabulary.vocab_size <= rows if has_row else vocabulary.mask_id >= rows
    if not fits:
        notes.append(
            f"the vocabulary stayed behind: it has {vocabulary.vocab_size} ids, the model {rows} "
            "rows"
        )
        return None
    return vocabulary

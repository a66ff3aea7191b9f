"""Read model folders: RoBERTa, ALBERT and zeroclap models as transformers saves them.

Nothing in a folder is executed, and transformers is not needed.

Order: `read_folder`, the files, settings, weights, vocabulary, and `_FORMS`, the table of what
differs between the classes.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from data_prep.common import hub
from data_prep.common.files import named_errors, read_json
from data_prep.common.records import check_value, decode
from data_prep.tokenizer import FILE_NAME, FILE_NAMES, Tokenizer, load_with_order
from pretrain.convert import names as layout
from pretrain.convert.contents import CLASSIFIER, ModelContents
from pretrain.convert.weights import drop_copies, empty_weights, joined, load_pickled, weights_in
from pretrain.model.classification import ClassificationConfig
from pretrain.model.config import ModelConfig

Weights = Mapping[str, Tensor]

_NOT_MODELLED: Mapping[str, object] = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_word_embeddings": True,
    "add_cross_attention": False,
    "quantization_config": None,
}
"""Settings of transformers that change a model's outputs, with the default, which is the only
supported value."""
_UNUSED = re.compile(
    r"(roberta|albert)\.embeddings\.(position_ids|token_type_ids)"
    r"|roberta\.pooler\.dense\.(weight|bias)"
)
"""Counters, and the pooler, which neither a masked language model nor a classifier has."""
_WHOLE, _PICKLED, _INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
_FETCHED = ("config.json", "*.safetensors", _WHOLE + _INDEX, *FILE_NAMES)


def located(model: Path) -> Path:
    """Return the folder of a model; one that is not here but on the Hugging Face hub is fetched.

    Raises:
        ValueError: it is not on the hub, or the hub does not answer.
    """
    name = str(model)
    if not hub.may_be_name(name):
        return model
    with named_errors(name):
        folder = hub.fetch(name, _FETCHED)
        found = any(folder.glob("*.safetensors"))
        return folder if found else hub.fetch(name, ["pytorch_model*"])


def read_folder(folder: Path) -> ModelContents:
    """Read a model folder, ours or anybody's.

    RoBERTa's tokenizer uses only row 0 of the token-type table, which is added to every row of the
    position table. ALBERT's vocabulary gets our special ids, and its rows are permuted. The notes
    say what was added or left out.

    Args:
        folder: or a name on the Hugging Face hub. It holds config.json, and model.safetensors or
            pytorch_model.bin, either of which may be in parts with an index.

    Raises:
        ValueError: a file is missing or damaged, a setting is one that our model does not have,
            weights are missing, left over or misshapen, or an ALBERT has other special ids than
            ours and no vocabulary to map them.
    """
    folder = located(folder)
    settings = _settings(folder)
    form = _FORMS[settings["model_type"]]
    file, theirs = read_weights(folder)
    if not any(name.startswith(form.prefix) for name in theirs):  # an encoder alone
        theirs = {form.prefix + name: weight for name, weight in theirs.items()}
    notes: list[str] = []
    with named_errors(folder / "config.json"):
        config = _architecture(form, settings, theirs)
        classifier = _classifier(settings, theirs)
    empty = empty_weights(config, classifier)
    with named_errors(file):
        weights = form.weights(theirs, empty, config, notes)
    kind = form.prefix.removesuffix(".")
    vocabulary, order = _vocabulary(folder, kind, config, notes)
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


def _settings(folder: Path) -> dict[str, Any]:
    """Read config.json, whose model_type is one of ours."""
    path = folder / "config.json"
    if not path.is_file():
        what = "is not a model folder, it has no config.json"
        hint = "`zeroclap export RUN --output FOLDER` makes one"
        if (folder / "model" / path.name).is_file():  # a run of fine-tuning
            hint = f"its model is in {folder / 'model'}"
        raise ValueError(f"{folder}: {what if folder.exists() else 'no such folder'} ({hint})")
    settings = read_json(path)
    kind = settings.get("model_type")
    check_value(f"{path}: model_type", kind, kind in [*_FORMS], _FORMS)
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
    return (files[0] if len(files) == 1 else folder), weights


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights.

    Raises:
        ValueError: there are none, or the index names a file that the folder does not have.
    """
    names = [_WHOLE, _WHOLE + _INDEX, _PICKLED, _PICKLED + _INDEX]
    present = [folder / name for name in names if (folder / name).is_file()]
    if not present:
        raise ValueError(f"{folder}: has none of {', '.join(names)}")
    if present[0].suffix != ".json":
        return present[:1]
    places = read_json(present[0]).get("weight_map")
    parts: list[Any] = [*places.values()] if isinstance(places, dict) else [places]
    for part in parts:
        in_folder = isinstance(part, str) and Path(part).name == part
        if not in_folder or not (folder / part).is_file():
            raise ValueError(f"{present[0]}: weight_map: {part!r} is not a file of this folder")
    return [folder / part for part in sorted(set(parts))]


def _setting(settings: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - as the file has it
    """Return a required setting: its default differs between versions, or it leaves no trace."""
    if name not in settings:
        raise ValueError(f"has no {name}")
    return settings[name]


def _architecture(form: "_Form", settings: Mapping[str, Any], theirs: Weights) -> ModelConfig:
    layout.check_modelled(settings, {**_NOT_MODELLED, **form.not_modelled})
    theirs_of = {**layout.ALBERT_SETTINGS, "layer_groups": "num_hidden_groups"}
    names = {} if form.config is _own_config else theirs_of
    try:
        config = form.config(settings)
    except ValueError as error:  # by the names that config.json has
        named = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        raise ValueError(named) from None
    # transformers saves a classifier without it, and AlbertConfig does not mention it.
    has_pairs = not theirs.keys().isdisjoint({"pair_head.dense.weight", layout.ALBERT_PAIRS})
    return dataclasses.replace(config, pair_head=has_pairs)


def _roberta_config(settings: Mapping[str, Any]) -> ModelConfig:
    positions = _setting(settings, "max_position_embeddings")
    fits = isinstance(positions, int) and positions > layout.UNUSED_POSITIONS
    check_value("max_position_embeddings", positions, fits, "3 or more")
    fields = {ours: _setting(settings, theirs) for ours, theirs in layout.ROBERTA_SETTINGS.items()}
    return ModelConfig(**fields, max_positions=positions - layout.UNUSED_POSITIONS)


def _albert_config(settings: Mapping[str, Any]) -> ModelConfig:
    activations = {theirs: ours for ours, theirs in layout.ALBERT_ACTIVATIONS.items()}
    activation = _setting(settings, "hidden_act")
    check_value("hidden_act", activation, activation in [*activations], activations)
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
    if isinstance(rows := values.get("vocab_size"), int):
        masks: Any = settings.get("mask_token_ids")
        fits = isinstance(masks, list) and masks == [*range(rows - len(masks), rows)]
        check_value("mask_token_ids", masks, fits, f"the last of {rows} rows, which resizing moves")
        values["vocab_size"] = rows - len(masks)
    return decode(ModelConfig, values)


def _classifier(settings: Mapping[str, Any], theirs: Weights) -> ClassificationConfig | None:
    """Describe the classification head of a folder; None without one."""
    if not any(name.startswith(CLASSIFIER) for name in theirs):
        return None
    # transformers writes no labels where there are two classes.
    listed = settings.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    expected = [str(index) for index in range(len(listed))] if isinstance(listed, dict) else []
    fits = isinstance(listed, dict) and {*listed} == {*expected}
    check_value("id2label", listed, fits, "a mapping with a label for each of 0, 1, 2, ...")
    labels = tuple(str(listed[index]) for index in expected)
    problem, known = settings.get("problem_type"), layout.problem_types(len(labels))
    expected_kind = f"{known[0]!r} with {len(labels)} labels"
    check_value("problem_type", problem, problem in known, expected_kind)
    dropout = settings.get("classifier_dropout", settings.get("classifier_dropout_prob"))
    return ClassificationConfig(
        len(labels),
        () if labels == layout.unnamed(len(labels)) else labels,
        settings.get("classifier_pooling", "first"),
        settings.get("hidden_dropout_prob", 0.0) if dropout is None else dropout,
    )


def _own_weights(
    theirs: Weights, empty: Weights, config: ModelConfig, notes: list[str]
) -> dict[str, Tensor]:
    trained = dict(theirs)
    if config.mask_embedding == "zero":  # without the rows of the mask
        by_token = layout.BY_TOKEN & trained.keys()
        trained |= {name: theirs[name][: config.vocab_size] for name in by_token}
    return _renamed(trained, {name: (name,) for name in empty}, empty, notes)


def _roberta_weights(
    theirs: Weights, empty: Weights, config: ModelConfig, notes: list[str]
) -> dict[str, Tensor]:
    left = _current(theirs, "roberta")
    types = left.get(layout.TOKEN_TYPES)
    if types is not None and types.ndim and len(types) > 1:
        left[layout.TOKEN_TYPES] = types[:1]
        notes.append("token types above 0 were left out: RoBERTa's tokenizer does not use them")
    names = {**layout.their_names("roberta", empty, config)}
    names[layout.TOKEN_TYPES] = (layout.TOKEN_TYPES,)
    row = empty[layout.POSITIONS][:1]
    result = _renamed(left, names, {**empty, layout.TOKEN_TYPES: row}, notes)
    result[layout.POSITIONS] += result.pop(layout.TOKEN_TYPES)[0]
    return result


def _albert_weights(
    theirs: Weights, empty: Weights, config: ModelConfig, notes: list[str]
) -> dict[str, Tensor]:
    left = _current(theirs, "albert")
    if f"{layout.ALBERT_POOLER}.weight" in left and not config.pair_head:  # a start for classifiers
        pooler = nn.Linear(config.hidden_size, config.hidden_size, device="meta")
        empty = {**empty, **pooler.state_dict(prefix=f"{CLASSIFIER}dense.")}
    names, size = layout.their_names("albert", empty, config), config.hidden_size
    # We have no projection of token vectors that have the hidden size already.
    unneeded = layout.identity(0) if config.token_size == size else {}
    projection = {name: left.pop(name) for name in unneeded if name in left}
    result = _renamed(left, names, empty, notes)
    for name, weight in projection.items():  # only now is the size known to be the file's
        if not torch.equal(weight.float(), layout.identity(size)[name]):
            raise ValueError(
                f"{name} changes the token vectors; it must be the identity where "
                f"embedding_size equals hidden_size, {size}"
            )
    return result


def _current(weights: Weights, kind: str) -> dict[str, Tensor]:
    """Return the weights that are used, by today's names: norms once had `gamma` and `beta`.

    Second copies of tied weights, of the table of tokens and of the head's bias, are left out.
    """
    result = {
        re.sub(r"(?<=\.)gamma$", "weight", re.sub(r"(?<=\.)beta$", "bias", name)): weight
        for name, weight in weights.items()
        if not _UNUSED.fullmatch(name)
    }
    modules = layout.MODULES[kind]
    head, tokens = modules["head"], modules["encoder.embeddings.tokens"]
    sources = {f"{head}.decoder.weight": f"{tokens}.weight", f"{head}.decoder.bias": f"{head}.bias"}
    drop_copies(result, sources)
    return result


def _renamed(
    weights: Weights, names: Mapping[str, tuple[str, ...]], empty: Weights, notes: list[str]
) -> dict[str, Tensor]:
    """Return the weights by our names; the head over the vocabulary may be missing.

    Raises:
        ValueError: weights are missing, left over or misshapen.
    """
    head = [name for name in names if name.startswith("head.")]
    if head and not any(theirs in weights for name in head for theirs in names[name]):
        notes.append("there is no head over the vocabulary")
        names = {name: theirs for name, theirs in names.items() if name not in head}
    return joined(weights, names, empty)


def _vocabulary(
    folder: Path, kind: str, config: ModelConfig, notes: list[str]
) -> tuple[Tokenizer | None, list[int]]:
    """Read the vocabulary of a folder.

    Args:
        folder: of a model.
        kind: its model_type.
        config: of the model.
        notes: receives a sentence if the vocabulary cannot be used.

    Returns:
        The vocabulary; and where its special ids were changed, the folder's row for each row of
        ours, else an empty list.

    Raises:
        ValueError: tokenizer.json is not valid JSON.
    """
    file = folder / FILE_NAME
    pair = [folder / name for name in ("vocab.json", "merges.txt")]
    if file.is_file():
        read_json(file)  # a damaged one is refused, one with other special ids is left out
    elif not all(path.is_file() for path in pair):
        return None, []
    try:
        vocabulary, order = load_with_order(folder)
        if kind == "roberta" and order and order[Tokenizer.pad_id] != Tokenizer.pad_id:
            # Its pad_token_id, from which positions are counted, is another token's.
            raise ValueError(f"special ids: <pad> has {order[1]}, the model's pad_token_id is 1")
    except ValueError as error:
        notes.append(f"the vocabulary was left out: {error}")
        return None, []
    ids, rows = vocabulary.vocab_size, config.vocab_size
    if ids > rows if config.mask_embedding == "row" else vocabulary.mask_id < rows:
        notes.append(f"the vocabulary was left out: it has {ids} ids, the model {rows} rows")
        return None, []
    if order and kind != "albert":
        notes.append(
            f"the ids were put in this project's order, in which <mask> has the last, {ids - 1} "
            f"(here {order[-1]}), and <s> has 0 (here {order[0]}); the rows of the tokens follow"
        )
    return vocabulary, order and [*order, *range(ids, rows)]


@dataclasses.dataclass(frozen=True)
class _Form:
    """How one class of transformers names its settings and weights."""

    prefix: str
    """Of the encoder's weights."""
    config: Callable[[Mapping[str, Any]], ModelConfig]
    weights: Callable[[Weights, Weights, ModelConfig, list[str]], dict[str, Tensor]]
    not_modelled: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further settings as in `_NOT_MODELLED`."""


_ROBERTA = _Form(
    "roberta.",
    _roberta_config,
    _roberta_weights,
    # Positions are counted from the id of `<pad>` on.
    {"hidden_act": "gelu", "pad_token_id": 1},
)
_FORMS = {
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "albert": _Form("albert.", _albert_config, _albert_weights, {"inner_group_num": 1}),
    "zeroclap": _Form("encoder.", _own_config, _own_weights),
}
"""By the accepted values of model_type."""

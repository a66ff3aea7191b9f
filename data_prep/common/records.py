"""Decode JSON and YAML values into plain dataclasses, or into dicts that a TypedDict describes.

pydantic does it strictly: missing keys and values of another type are refused. A dataclass also
refuses unknown keys; a TypedDict describes what is read of a file, and the other keys are left out.
A field's limits stand in its annotation, such as `PositiveInt`, `Literal["a", "b"]` or
`Annotated[str, OneOf(NAMES)]`.
"""

import dataclasses
import functools
import json
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Annotated, Any, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Annotates a text that is in a table, or a record whose key `name` picks its dataclass.

    A record without the key is of the first dataclass.
    """

    table: Collection[str]
    """For records, it maps names to dataclasses."""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        """Return pydantic's schema of the field."""
        if source is str:
            return core_schema.literal_schema([*self.table])
        return core_schema.no_info_after_validator_function(self._decode, core_schema.dict_schema())

    def kind(self, values: object) -> type | None:
        """Return the dataclass that a record's values name, or None."""
        if not isinstance(values, dict) or not isinstance(self.table, Mapping):
            return None
        name = values.get("name", next(iter(self.table)))
        return self.table.get(name) if isinstance(name, str) else None

    def _decode(self, values: dict[str, object]) -> object:
        kind = self.kind(values)
        if not kind:
            raise PydanticCustomError("name", f"one of {', '.join(self.table)}")
        return _adapter(kind).validate_json(json.dumps(values))


def whole(value: object) -> object:
    """A whole number that is written as 1e5, which YAML reads as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
# Limits that no use comes near: beyond them, 64-bit products and quotients in fp32 overflow.
Int = Annotated[Whole, Le(10**12)]
PositiveInt = Annotated[Int, Gt(0)]
NonNegativeInt = Annotated[Int, Ge(0)]
PositiveFloat = Annotated[float, Ge(1e-30), Le(1e30)]
NonNegativeFloat = Annotated[float, Ge(0), Le(1e30)]
Fraction = Annotated[float, Ge(0), Lt(1)]

_ACCEPTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "dataclass_type": "a mapping of keys to values",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "{ge:g} or above",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "one of {expected}",
}
"""What would be accepted, by pydantic's type of error; formatted with the error's context."""
_SYNONYMS = {
    "lr": "learning_rate",
    "max_lr": "learning_rate",
    "min_lr": "minimum_learning_rate",
    "wd": "weight_decay",
    "eps": "epsilon",
    "betas": "beta1",
    "grad_clip": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "batch_size": "global_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "max_steps": "steps",
    "num_steps": "steps",
    "max_length": "sequence_length",
    "seq_length": "sequence_length",
    "seq_len": "sequence_length",
    "block_size": "sequence_length",
    "save_steps": "checkpoint_interval",
    "eval_steps": "evaluation_interval",
    "warmup": "warmup_steps",
}
"""Our names of settings, by those that other programs give them."""
_LIKE = 0.75
"""How like a known key an unknown one is at least, for the known one to be suggested."""
_BESIDE = 0.15
"""By how much more a key of the same section is suggested."""


def decode(kind: type[T], values: object, prefix: str = "") -> T:
    """Build a dataclass or a dict from what JSON or YAML gave; keys left out keep their defaults.

    Args:
        kind: The dataclass or TypedDict; its fields may be dataclasses, lists and dicts.
        values: A mapping, or a JSON object as bytes.
        prefix: Put before the keys that messages name, such as "spike.".

    Raises:
        ValueError: An unknown key (the nearest known one is named), a missing key, a value that is
            not accepted (with what would be), or an error of the dataclass itself.
    """
    try:
        # Strict pydantic makes dataclasses and tuples of JSON only.
        text = values if isinstance(values, bytes) else json.dumps(values, default=_refuse)
        decoded: T = _adapter(typing.cast(type, kind)).validator.validate_json(text)
        return decoded
    except TypeError as error:  # of a key
        raise ValueError(str(error)) from None
    except ValidationError as error:
        first = min(error.errors(), key=lambda each: each["type"] != "unexpected_keyword_argument")
        raise ValueError(_message(first, kind, values, prefix)) from None


def _refuse(value: object) -> None:
    raise ValueError(not_accepted("", value, "a text, a number, true, false, a list or a mapping"))


@functools.cache
def _adapter(kind: type, with_docstrings: bool = False) -> TypeAdapter[Any]:
    # The dataclasses of its fields are read by the same rules. To find docstrings takes most of the
    # time, and every process of a run would wait for it.
    kind.__pydantic_config__ = ConfigDict(  # type: ignore[attr-defined]
        strict=True,
        extra="forbid" if dataclasses.is_dataclass(kind) else "ignore",
        allow_inf_nan=False,
        use_attribute_docstrings=with_docstrings,
    )
    return TypeAdapter(kind)


def _message(error: ErrorDetails, kind: type, values: object, prefix: str) -> str:
    """An error in our words, with the full path of the key."""
    path = prefix
    for part in error["loc"]:
        path = f"{path.removesuffix('.')}[{part}]." if isinstance(part, int) else f"{path}{part}."
    path, context, value = path.removesuffix("."), error.get("ctx", {}), error["input"]
    match error["type"]:
        case "unexpected_keyword_argument":
            return unknown_key(path, [key for key, _ in keys(kind, values, prefix)])
        case "missing":
            return f"{path}: is missing"
        case "json_invalid":
            return f"is not valid JSON: {context['error']}"
        case "value_error":  # of the dataclass itself
            return str(context["error"])
        case "name":
            return not_accepted(f"{path}.name", value["name"], error["msg"])
    accepted = _ACCEPTED.get(error["type"], f"valid: {error['msg']}")
    return not_accepted(path, value, accepted.format(**context).replace("'", ""))


def keys(
    kind: Any,  # noqa: ANN401 - an annotation
    values: object,
    prefix: str = "",
) -> Iterator[tuple[str, Any]]:
    """Yield the keys that a record of these values may have, and the records in it.

    Each comes with the sections that it is in, and its annotation.
    """
    for mark in getattr(kind, "__metadata__", ()):
        yield from keys(mark.kind(values) if isinstance(mark, OneOf) else mark, values, prefix)
    if get_origin(kind) is list and isinstance(values, list):
        for number, value in enumerate(values):
            yield from keys(get_args(kind)[0], value, f"{prefix.removesuffix('.')}[{number}].")
    elif get_origin(kind) is dict and isinstance(values, dict):
        for key, value in values.items():
            yield from keys(get_args(kind)[1], value, f"{prefix}{key}.")
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)  # of class variables as well
        for name in (field.name for field in dataclasses.fields(kind)):
            yield f"{prefix}{name}", hints[name]
            value = values.get(name, {}) if isinstance(values, dict) else {}
            yield from keys(hints[name], value, f"{prefix}{name}.")


def unknown_key(path: str, known: Iterable[str]) -> str:
    """The message for an unknown key: with the key that was probably meant, or the known ones.

    Args:
        path: The key, with the sections that it is in.
        known: Keys of all sections, with these.
    """
    section, _, name = path.rpartition(".")
    meant = _SYNONYMS.get(name, name)
    likeness, beside = dict[str, float](), list[str]()
    for key in known:
        above, _, last = key.rpartition(".")
        likeness[key] = SequenceMatcher(None, last, meant).ratio()
        if above == section:
            beside.append(last)
            likeness[key] += _BESIDE
    best = max(likeness.values(), default=0)
    found = [key for key in likeness if likeness[key] == best]
    if best >= _LIKE:
        return f"unknown key {path!r}; did you mean {' or '.join(map(repr, found))}?"
    return f"unknown key {path!r}; known are {', '.join(sorted(beside))}"


def not_accepted(path: str, value: object, accepted: str) -> str:
    """The message for a value that is not accepted."""
    return f"{f'{path}: ' if path else ''}{value!r} is not accepted; it must be {accepted}"


def check_value(path: str, value: object, fits: bool, accepted: str | Collection[str]) -> None:
    """Raise ValueError unless a value fits; `accepted` is words, or the accepted texts.

    The modules in pretrain/model/ have their own, because exports carry them.
    """
    if not fits:
        words = accepted if isinstance(accepted, str) else f"one of {', '.join(accepted)}"
        raise ValueError(not_accepted(path, value, words))


def docstrings(kind: type) -> dict[str, str]:
    """The string literals that stand below the fields of a dataclass and its bases, by field."""
    bases = filter(dataclasses.is_dataclass, reversed(kind.__mro__))
    schemas = (_adapter(base, with_docstrings=True).json_schema()["properties"] for base in bases)
    return {
        name: " ".join(field["description"].split())
        for fields in schemas
        for name, field in fields.items()
        if "description" in field
    }

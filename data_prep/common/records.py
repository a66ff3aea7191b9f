"""Decode JSON and YAML values into dataclasses, and describe these by a JSON schema.

pydantic does both, strictly: unknown keys, missing keys and values of another type are refused. It
is imported on first use. A field's limits stand in its annotation, such as `PositiveInt` or
`Literal["a", "b"]`. A field with the metadata `{"choices": TABLE}` takes one of the table's names;
or, where its default is a dataclass, a mapping whose key `name` picks a dataclass from the table,
which may grow later. A table may be open to installed packages (plugins.py).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import operator
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    get_args,
    get_origin,
)

from annotated_types import Ge, Gt, Lt

from data_prep.common.plugins import names_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]

_ACCEPTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "list_type": "a list",
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
"""Names that other programs give to settings, by ours."""


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def decode(kind: type[T], values: object, prefix: str = "") -> T:
    """Build a dataclass from what JSON or YAML gave; keys left out keep their defaults.

    Args:
        kind: The dataclass; its fields may be dataclasses, lists and dicts.
        values: A mapping.
        prefix: Put before the keys that messages name, such as "spike.".

    Raises:
        ValueError: An unknown key (the nearest known one is named), a missing key, a value that is
            not accepted (what would be is said), or what the dataclass itself refuses.
    """
    from pydantic import ValidationError

    try:
        return typing.cast(T, _adapter(typing.cast(type, kind)).validate_python(values))
    except ValidationError as error:
        raise ValueError(_message(error, prefix, _keys(kind, prefix))) from None


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON schema of a dataclass; descriptions are the docstrings of its fields."""
    return _adapter(kind).json_schema()


def unknown_key(path: str, siblings: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The message for an unknown key: with the key that was probably meant, or the known ones.

    Args:
        path: The key, with the sections that it is in.
        siblings: Known names in its section.
        elsewhere: Known keys of all sections, with these.
    """
    above, dot, name = path.rpartition(".")
    beside = {sibling: [f"{above}{dot}{sibling}"] for sibling in siblings}
    by_name: dict[str, list[str]] = {}
    for key in (key for key in elsewhere if key != path):
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    meant = _SYNONYMS.get(name, name)
    found = (
        beside.get(meant)
        or _nearest(name, beside, 0.85)  # one letter: training.step is not fork_from.step
        or by_name.get(meant)
        or _nearest(name, beside, 0.6)
        or _nearest(name, by_name, 0.75)
    )
    hint = f"did you mean {' or '.join(map(repr, found))}?" if found else ""
    return f"unknown key {path!r}; {hint or 'known are ' + ', '.join(sorted(beside))}"


def _nearest(name: str, known: Mapping[str, list[str]], cutoff: float) -> list[str]:
    return [
        key for near in difflib.get_close_matches(name, known, 1, cutoff) for key in known[near]
    ]


def not_accepted(path: str, value: object, accepted: str) -> str:
    """The message for a value that is not accepted."""
    return f"{f'{path}: ' if path else ''}{value!r} is not accepted; it must be {accepted}"


def check_format(found: object, known: int, source: object) -> None:
    """Refuse a file of another format version than the one that is read.

    Args:
        found: Version in the file.
        known: The version that is read.
        source: File, for messages.

    Raises:
        ValueError: It is another version; names the file and both.
    """
    if type(found) is int and found == known:
        return
    later = type(found) is int and found > known
    reason = "was written by a later version of zeroclap" if later else "is not accepted"
    raise ValueError(f"{source}: format version {found!r} {reason}; known: {known}")


class _RefusedError(ValueError):
    """A wrong key of a mapping: a message about its full path, given all known keys."""

    def __init__(self, key: str, message: Callable[[str, Sequence[str]], str]) -> None:
        super().__init__(key)
        self.key, self.message = key, message


def _message(error: ValidationError, prefix: str, known: Sequence[str]) -> str:
    """The first error in our words, with the full path of the key."""
    first = error.errors()[0]
    path = prefix.removesuffix(".") if not first["loc"] else prefix
    for number, part in enumerate(first["loc"]):
        if part == "[key]":  # pydantic's mark of a mapping's key; the part before is the key
            continue
        path += f"[{part}]" if isinstance(part, int) else f"{'.' if number else ''}{part}"
    kind, context = first["type"], first.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, type(error)):
        return _message(cause, f"{path}.", known)
    if isinstance(cause, _RefusedError):
        return cause.message(f"{path}.{cause.key}".strip("."), known)
    if cause:
        return str(cause)
    if kind == "missing":
        return f"{path}: is missing"
    accepted = _ACCEPTED.get(kind, f"valid: {first['msg']}").format(**context).replace("'", "")
    return not_accepted(path, first["input"], accepted)


def _keys(kind: type, prefix: str) -> list[str]:
    """All keys of a record and of the records in it, each after the sections that it is in."""
    found = []
    for field in dataclasses.fields(kind):
        table, keys_of = (field.metadata.get(name) for name in ("choices", "keys_of"))
        records = [keys_of or type(_default(field))]
        records += table.values() if isinstance(table, Mapping) else []
        below = [
            _keys(each, f"{prefix}{field.name}.")
            for each in records
            if dataclasses.is_dataclass(each)
        ]
        found += [f"{prefix}{field.name}", *dict.fromkeys(itertools.chain(*below))]
    return found


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(_record(kind))


def _record(kind: type) -> Any:  # noqa: ANN401 - types made at run time
    """A TypedDict with the dataclass's fields, made into the dataclass once it is valid.

    In strict mode pydantic takes no mapping for a dataclass itself.
    """
    from pydantic import AfterValidator, BeforeValidator, ConfigDict
    from typing_extensions import TypedDict

    hints = typing.get_type_hints(kind, include_extras=True)
    forms: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        form, default = _form(hints[field.name]), _default(field)
        if table := field.metadata.get("choices"):
            is_name, names = isinstance(default, str), tuple(names_of(table))
            form = Literal[names] if is_name else Annotated[Any, _Choice(table, default)]
        forms[field.name] = form if default is dataclasses.MISSING else NotRequired[form]

    def refuse_unknown(values: object) -> object:
        if isinstance(values, dict) and (unknown := [key for key in values if key not in forms]):
            name = str(unknown[0])
            raise _RefusedError(name, lambda path, known: unknown_key(path, forms, known))
        return values

    make: Any = TypedDict  # mypy would have its arguments written out
    shape = make(kind.__name__, forms)
    shape.__pydantic_config__ = ConfigDict(
        strict=True, extra="forbid", json_schema_extra=functools.partial(_describe, kind)
    )
    build = AfterValidator(lambda values: kind(**values))
    return Annotated[shape, build, BeforeValidator(refuse_unknown)]


def _default(field: dataclasses.Field[Any]) -> Any:  # noqa: ANN401 - of the field's type
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _form(kind: Any) -> Any:  # noqa: ANN401 - any annotation
    """The annotation that pydantic is given in place of a field's own.

    1e5 is a whole number too, as JSON schemas have it. A list is a tuple where one is asked for.
    """
    from pydantic import BeforeValidator

    if dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind))
    if kind is int:
        return Annotated[int, BeforeValidator(_whole)]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        base, *limits = arguments
        return Annotated[base, *limits, *([BeforeValidator(_whole)] if base is int else [])]
    if origin is types.UnionType:
        return functools.reduce(operator.or_, map(_form, arguments))
    if origin is dict:
        return dict[_form(arguments[0]), _form(arguments[1])]  # type: ignore[misc]
    if origin is tuple:
        return Annotated[kind, BeforeValidator(_tuple)]
    if origin is list:
        return list[_form(arguments[0])]  # type: ignore[misc]
    return kind


class _Choice:
    """Validates a field whose key `name` picks one of several dataclasses."""

    def __init__(self, table: Mapping[str, type], default: Any) -> None:  # noqa: ANN401
        self.table, self.default = table, default

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:  # noqa: ANN401
        from pydantic_core import core_schema

        pick = core_schema.no_info_plain_validator_function(self._pick)
        return core_schema.chain_schema([core_schema.dict_schema(strict=True), pick])

    def __get_pydantic_json_schema__(self, schema: object, handler: Callable[[Any], Any]) -> Any:  # noqa: ANN401
        from pydantic_core import core_schema

        records: list[Any] = [_adapter(kind).core_schema for kind in self.table.values()]
        return handler(core_schema.union_schema(records))

    def _pick(self, values: dict[str, object]) -> object:
        name = values.get("name", self.default.name)
        if not isinstance(name, str) or name not in self.table:
            accepted = f"one of {', '.join(names_of(self.table))}"
            raise _RefusedError("name", lambda path, _: not_accepted(path, name, accepted))
        kind = self.table[name]
        if not dataclasses.is_dataclass(kind):
            raise ValueError(f"{name}: {kind!r} is not a dataclass of settings")
        return _adapter(kind).validate_python(values)


def _describe(kind: type, schema: dict[str, Any]) -> None:
    """Add docstrings and defaults to a dataclass's JSON schema."""
    schema["description"] = (inspect.getdoc(kind) or "").partition("\n")[0]
    texts = docstrings(kind)
    for field in dataclasses.fields(kind):
        entry = schema["properties"][field.name]
        entry.pop("title", None)
        if field.name in texts:
            entry["description"] = texts[field.name]
        if field.default is not dataclasses.MISSING:
            entry["default"] = field.default


def docstrings(kind: type) -> dict[str, str]:
    """The string literals that stand below the fields of a dataclass and its bases, by field."""
    found = {}
    for base in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found

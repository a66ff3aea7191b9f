"""Values of YAML and JSON decoded into dataclasses."""

import dataclasses
import re
from typing import Annotated, Any, Literal, Protocol

import pytest
import yaml
from annotated_types import Ge, Le

from data_prep.common import files, records
from data_prep.common.records import NonNegativeInt, OneOf, PositiveFloat


@dataclasses.dataclass(frozen=True)
class Inner:
    """Numbers."""

    rate: PositiveFloat = 0.5
    """A rate,
    per step."""
    count: NonNegativeInt = 3
    share: Annotated[float, Ge(0), Le(1)] = 0.0

    def __post_init__(self):
        if self.rate > self.count:
            raise ValueError(f"inner.rate {self.rate} is above inner.count {self.count}")


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str = ""
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    inner: Inner = dataclasses.field(default_factory=Inner)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Listed:
    """A record without defaults."""

    inners: list[Inner]
    by_name: dict[str, dict[str, Inner]]
    damage: str | None
    perplexity: float | None


def decode(text, kind=Outer, prefix=""):
    return records.decode(kind, yaml.safe_load(text), prefix)


def check_refused(values, message, kind=Outer):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        records.decode(kind, values)
    assert "\n" not in str(caught.value), "one message, of one line"


def test_keys_left_out_keep_their_defaults():
    assert decode("{inner: {count: 4}}") == Outer(inner=Inner(count=4))
    assert decode("{}") == Outer()


def test_a_whole_number_is_a_number_and_stays_whole_elsewhere():
    record = decode("{inner: {rate: 2}, extra: {layers: 2, kind: alibi, flag: true}}")
    assert type(record.inner.rate) is float
    assert record.extra == {"layers": 2, "kind": "alibi", "flag": True}
    assert type(record.extra["layers"]) is int


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{nmae: x}", "unknown key 'nmae'; did you mean 'name'"),
        ("{inner: {cuont: 1}}", "unknown key 'inner.cuont'; did you mean 'inner.count'"),
        ("{zzz: 1}", "known are extra, flag, inner, kind, name"),
        ("{3: 1}", "unknown key '3'"),
        ("{inner: {count: 1.5}}", "inner.count: 1.5 is not accepted; it must be a whole number"),
        ("{inner: {count: true}}", "inner.count: True is not accepted; it must be a whole number"),
        ("{inner: {count: '3'}}", "inner.count: '3' is not accepted; it must be a whole number"),
        ("{inner: {count: -1}}", "inner.count: -1 is not accepted; it must be 0 or above"),
        ("{inner: {rate: fast}}", "inner.rate: 'fast' is not accepted; it must be a number"),
        ("{inner: {rate: 0}}", "inner.rate: 0 is not accepted; it must be 1e-30 or above"),
        ("{inner: {rate: .nan}}", "inner.rate: nan is not accepted; it must be a finite number"),
        ("{inner: {share: 1.5}}", "inner.share: 1.5 is not accepted; it must be at most 1"),
        ("{inner: {rate: 4}}", "inner.rate 4.0 is above inner.count 3"),
        ("{name: 3}", "name: 3 is not accepted; it must be text"),
        ("{flag: 'no'}", "flag: 'no' is not accepted; it must be true or false"),
        ("{kind: c}", "kind: 'c' is not accepted; it must be one of a or b"),
        ("{extra: 3}", "extra: 3 is not accepted; it must be a mapping of keys to values"),
        ("{inner: 3}", "inner: 3 is not accepted; it must be a mapping"),
        ("[1, 2]", "[1, 2] is not accepted; it must be a mapping"),
        # What JSON has not.
        ("{name: 2024-01-01}", "datetime.date(2024, 1, 1) is not accepted; it must be"),
        ("{2024-01-01: 1}", "not date"),
        ("{extra: &a {x: *a}}", "Circular"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(text, message):
    check_refused(yaml.safe_load(text), message)


def test_a_prefix_stands_before_every_path():
    with pytest.raises(ValueError, match=r"^file: inner\.rate: 'x'"):
        decode("{rate: x}", Inner, "file: inner.")
    with pytest.raises(ValueError, match=r"^unknown key 'spike\.zzz'"):
        decode("{zzz: x}", Inner, "spike.")
    with pytest.raises(ValueError, match=r"^spike: 3 is not accepted"):
        decode("3", Inner, "spike.")


LISTED = "{inners: [{count: 1}], by_name: {a: {b: {rate: 1}}}, damage: null, perplexity: 2}"


def test_lists_mappings_and_optional_values_hold_records():
    assert decode(LISTED, Listed) == Listed([Inner(count=1)], {"a": {"b": Inner(1.0)}}, None, 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inners": [{}, {"count": "x"}]}, "inners[1].count: 'x'"),
        ({"inners": [3]}, "inners[0]: 3 is not accepted; it must be a mapping"),
        ({"inners": {}}, "inners: {} is not accepted; it must be a list"),
        ({"by_name": {"a": {"b": {"cuont": 1}}}}, "unknown key 'by_name.a.b.cuont'; did you mean"),
        ({"damage": 3}, "damage: 3 is not accepted; it must be text"),
        ({"perplexity": "much"}, "perplexity: 'much' is not accepted; it must be a number"),
    ],
)
def test_a_path_leads_through_lists_and_mappings(change, message):
    check_refused(yaml.safe_load(LISTED) | change, message, Listed)


def test_a_field_without_a_default_may_not_be_missing():
    values = yaml.safe_load(LISTED)
    del values["damage"]
    with pytest.raises(ValueError, match="^damage: is missing$"):
        records.decode(Listed, values)


# --- a table to choose from ----------------------------------------------------------------------


class Shape(Protocol):
    @property
    def name(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Circle:
    name: Literal["circle"] = dataclasses.field(default="circle", kw_only=True)
    radius: PositiveFloat = 1.0
    """In metres."""


@dataclasses.dataclass(frozen=True)
class Square:
    name: Literal["square"] = dataclasses.field(default="square", kw_only=True)
    side: NonNegativeInt = 2


SHAPES: dict[str, type[Shape]] = {"circle": Circle, "square": Square}
COLOURS = ("red", "green")


@dataclasses.dataclass(frozen=True)
class Drawing:
    shape: Annotated[Shape, OneOf(SHAPES)] = dataclasses.field(default_factory=Circle)
    colour: Annotated[str, OneOf(COLOURS)] = "red"


def test_the_key_name_picks_a_record_from_the_table():
    assert decode("{}", Drawing) == Drawing(Circle())
    assert decode("{shape: {radius: 0.6}}", Drawing) == Drawing(Circle(0.6))
    assert decode("{shape: {name: square, side: 3}}", Drawing) == Drawing(Square(3))
    assert decode("{colour: green}", Drawing) == Drawing(colour="green")
    record = Drawing(Square(5))
    assert records.decode(Drawing, dataclasses.asdict(record)) == record


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{shape: {name: squire}}", "shape.name: 'squire' is not accepted; it must be one of cir"),
        ("{shape: {name: [1]}}", "shape.name: [1] is not accepted; it must be one of circle, squa"),
        ("{shape: square}", "shape: 'square' is not accepted; it must be a mapping"),
        ("{shape: {side: 3}}", "unknown key 'shape.side'; known are name, radius"),
        ("{shape: {name: square, sdie: 3}}", "unknown key 'shape.sdie'; did you mean 'shape.side'"),
        ("{colour: blue}", "colour: 'blue' is not accepted; it must be one of red or green"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused_by_its_path(text, message):
    check_refused(yaml.safe_load(text), message, Drawing)


# --- versions ------------------------------------------------------------------------------------


def test_a_format_version_is_known_or_refused_by_name():
    files.check_format(2, 2, "file")
    with pytest.raises(ValueError, match=r"^file: format version 3 was written by a later version"):
        files.check_format(3, 2, "file")
    for version in (0, 1, None, "2", True, 2.0):
        with pytest.raises(ValueError, match=r"^file: format version .* is not accepted; known: 2"):
            files.check_format(version, 2, "file")

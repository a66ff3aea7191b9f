"""Settings as a user writes them."""

import math

import pytest

from pretrain.config import settings


def test_yaml_that_would_run_code_is_refused():
    with pytest.raises(ValueError, match="is not valid YAML"):
        settings.parse("!!python/object/apply:os.getcwd []", "here")


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1.e-3", ".1e-2", "1.0e-3", "0.001"])
def test_a_float_is_one_however_it_is_written(text):
    assert settings.parse(text, "here") == 1e-3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0300", 300), ("-7", -7), ("+0", 0), ("0x1F", 31), ("0o17", 15)),
        *((".5", 0.5), ("-.5", -0.5), ("1.", 1.0), ("-.inf", -math.inf), ("1e5", 1e5)),
        *((each, each) for each in ("12:30", "12:30:00.5", "1_000", "1_0.5", "0b1", "08x", ".")),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text, value):
    found = settings.parse(text, "here")
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["1e3", "0.5", "3", "010", "0x1", "true", "null", "run 1", "é"])
def test_text_that_looks_like_another_value_is_written_in_quotes(text):
    assert settings.parse(settings.to_yaml({"name": text}), "here") == {"name": text}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a {x: 1}\nb: {<<: *a}", "<<"),
        ("a: &a [1]\n? *a\n: 1", "line 1: a key must be a text"),
        ("[" * 500, "nested too deeply"),
        ("{a: " * 2000, "nested too deeply"),
        ("a: &a {b: *a}", "recursive"),
        ("training:\n  steps: 10\n  seed: 1\n  steps: 20", "steps.*lines 2 and 4"),
        ("{a: 1, b: {c: 1}, a: 1}", "a.*lines 1 and 1"),
        ("!!int x", "int"),
        ("a:\n\tb: 1", "not valid YAML .indent with spaces"),
        ("!!float ''", "not valid YAML"),
        ("!!bool maybe", "not valid YAML"),
        ("!!timestamp x", "not valid YAML"),
    ],
)
def test_hostile_yaml_is_refused_with_its_source(text, said):
    with pytest.raises(ValueError, match=said) as caught:
        settings.parse(text, "mine.yaml")
    assert str(caught.value).startswith("mine.yaml: ")


def test_a_value_may_be_repeated_by_an_alias():
    assert settings.parse("{a: &a [1, 2], b: *a}", "here") == {"a": [1, 2], "b": [1, 2]}


def test_overrides_reach_any_depth_and_read_their_value_as_yaml():
    values = {"inner": {"rate": 1.0}}
    for word in ("inner.count=7", "name=a=b #2", "flag=true", "extra.deep=[2026-11-30, 2]"):
        settings.apply_override(values, word)
    assert values == {
        "inner": {"rate": 1.0, "count": 7},
        "name": "a=b #2",
        "flag": True,
        "extra": {"deep": ["2026-11-30", 2]},
    }


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("name", "'name': write section.key=value, without spaces"),
        ("=3", "'=3': write section.key=value"),
        ("inner.rate.x=1", "rate is a value, not a section"),
    ],
)
def test_an_argument_that_is_not_an_override_is_refused(word, message):
    with pytest.raises(ValueError, match=message):
        settings.apply_override({"inner": {"rate": 1.0}}, word)


def test_merging_goes_section_by_section_and_changes_neither_side():
    base, delta = {"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "c": 4}
    assert settings.merge(base, delta) == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}
    assert base == {"a": {"x": 1, "y": 2}, "b": 1}
    assert settings.merge({"a": 1}, {"a": {"x": 2}}) == {"a": {"x": 2}}


@pytest.mark.parametrize(
    "text",
    ["runs/a #2", "a: b", "1e-3", "", "[a", "a, b", "'a'", " a", "a\nb", "\x85a", "ž\U0001f600 #"],
)
def test_an_override_of_a_text_is_read_as_that_text(text):
    values = {}
    settings.apply_override(values, settings.override("folder", text))
    assert values == {"folder": text}
    assert settings.override("folder", "runs/ž") == "folder=runs/ž"

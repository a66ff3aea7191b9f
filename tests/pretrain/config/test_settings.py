"""YAML and key=value words to typed records."""

import argparse
import dataclasses

import pytest

from pretrain.config import settings


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    count: int = 3


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str = ""
    flag: bool = False
    inner: Inner = dataclasses.field(default_factory=Inner)
    extra: dict[str, object] = dataclasses.field(default_factory=dict)


def build(text):
    return settings.build(Outer, settings.parse(text, "here"))


def test_keys_left_out_keep_their_defaults():
    assert build("{inner: {count: 4}}") == Outer(inner=Inner(count=4))
    assert build("{}") == Outer()


@pytest.mark.parametrize("text", ["6e-4", "6.0e-4", "0.0006", "6E-4", "'6e-4'"])
def test_every_way_to_write_a_number_is_one(text):
    """YAML 1.1 takes 6e-4 for text."""
    assert build(f"{{inner: {{rate: {text}}}}}").inner.rate == 6e-4
    assert build(f"{{extra: {{rate: {text}}}}}").extra == {"rate": 6e-4}


def test_a_whole_number_is_a_number_and_stays_one_elsewhere():
    record = build("{inner: {rate: 2}, extra: {layers: 2, kind: alibi, flag: true}}")
    assert type(record.inner.rate) is float
    assert record.extra == {"layers": 2, "kind": "alibi", "flag": True}
    assert type(record.extra["layers"]) is int


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{nmae: x}", "unknown key 'nmae'; did you mean 'name'"),
        ("{inner: {cuont: 1}}", "unknown key 'inner.cuont'; did you mean 'count'"),
        ("{zzz: 1}", "known are extra, flag, inner, name"),
        ("{3: 1}", "unknown key '3'"),
        ("{inner: {count: 1.5}}", "inner.count: 1.5 is not accepted; it must be a whole number"),
        ("{inner: {count: true}}", "inner.count: True .* a whole number"),
        ("{inner: {count: 1e3}}", "inner.count: '1e3' .* a whole number"),
        ("{inner: {rate: fast}}", "inner.rate: 'fast' .* a number"),
        ("{inner: {rate: true}}", "inner.rate: True .* a number"),
        ("{inner: {rate: }}", "inner.rate: None .* a number"),
        ("{name: 3}", "name: 3 .* text"),
        ("{flag: 1}", "flag: 1 .* true or false"),
        ("{extra: [1]}", r"extra: \[1\] .* a mapping"),
        ("{inner: 3}", "inner: 3 is no section"),
        ("{inner: }", "inner: None is no section"),
        ("[1, 2]", "is no section"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(text, message):
    with pytest.raises(ValueError, match=message):
        build(text)


def test_a_text_that_is_no_yaml_is_refused_with_its_source():
    with pytest.raises(ValueError, match=r"here: is no YAML"):
        settings.parse("{a: [", "here")


def test_yaml_that_would_run_code_is_refused():
    with pytest.raises(ValueError, match="is no YAML"):
        settings.parse("!!python/object/apply:os.getcwd []", "here")


def test_overrides_reach_any_depth_and_read_their_value_as_yaml():
    values = {"inner": {"rate": 1.0}}
    for word in ("inner.count=7", "name=a=b", "flag=true", "extra.deep=[1, 2]"):
        settings.apply_override(values, word)
    assert values == {
        "inner": {"rate": 1.0, "count": 7},
        "name": "a=b",
        "flag": True,
        "extra": {"deep": [1, 2]},
    }


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("name", "'name' is no override; write section.key=value"),
        ("=3", "'=3' is no override"),
        ("inner.rate.x=1", "rate is a value, not a section"),
    ],
)
def test_a_word_that_is_no_override_is_refused(word, message):
    with pytest.raises(ValueError, match=message):
        settings.apply_override({"inner": {"rate": 1.0}}, word)


def test_merging_goes_section_by_section_and_changes_neither_side():
    base, delta = {"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "c": 4}
    assert settings.merge(base, delta) == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}
    assert base == {"a": {"x": 1, "y": 2}, "b": 1}
    assert settings.merge({"a": 1}, {"a": {"x": 2}}) == {"a": {"x": 2}}


def test_key_value_words_may_stand_anywhere_and_other_words_nowhere(capsys):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("go")
    command.add_argument("recipe")
    command.add_argument("overrides", nargs="*")
    command.add_argument("--ranks", type=int)
    commands.add_parser("stay").add_argument("run")
    for words in (
        ["go", "a", "b=1", "c=2", "--ranks", "3"],
        ["go", "--ranks", "3", "a", "b=1", "c=2"],
        ["go", "a", "b=1", "--ranks", "3", "c=2"],
    ):
        options = settings.parse_arguments(parser, words)
        assert (options.recipe, options.overrides, options.ranks) == ("a", ["b=1", "c=2"], 3)
    for words in (["go", "a", "--no"], ["stay", "run", "b=1"]):
        with pytest.raises(SystemExit):
            settings.parse_arguments(parser, words)
        assert "unrecognized arguments" in capsys.readouterr().err

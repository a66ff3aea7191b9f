import pytest

from data_prep.fields import MISSING, Fields, value_of
from data_prep.manifest import Settings


@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        ({"a": 1}, "a", 1),
        ({"a": {"b": {"c": 1}}}, "a.b.c", 1),
        ({"a.b": 1, "a": {"b": 2}}, "a.b", 1),  # the whole name goes first
        ({"a": {"b.c": 1}}, "a.b.c", 1),
        ({"a": None}, "a", None),
        ({"a": None}, "a.b", MISSING),
        ({"a": {"c": 1}}, "a.b", MISSING),
        ({"b": 1}, "a.b", MISSING),
        ([1], "a", MISSING),
    ],
)
def test_dots_separate_the_keys_of_nested_objects(record, key, value):
    assert value_of(record, key) is value


def test_message_names_a_limited_number_of_keys():
    fields = Fields("a.jsonl", Settings())
    for number in range(1000):
        fields.take({f"key-{number}": 1})
    with pytest.raises(ValueError, match="keys found: key-0, key-1, ") as error:
        fields.check()
    assert "key-19" in str(error.value)
    assert "key-20" not in str(error.value)


def test_a_column_that_is_there_twice_is_refused_by_name():
    fields = Fields("a.parquet", Settings(text_key="text.body"))
    assert fields.columns(["other", "other", "text", "meta"]) == ["text", "meta"]
    with pytest.raises(ValueError, match=r"a\.parquet: column 'text' is there twice"):
        fields.columns(["text", "meta", "text"])

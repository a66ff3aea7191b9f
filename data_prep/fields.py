"""The text and the subset of a record of JSON or of a table, found by their keys.

The key "meta.pile_set_name" names the field `pile_set_name` of the object `meta`, or a field whose
name is all of it.
"""

import argparse
from collections.abc import Mapping, Sequence

from data_prep.inputs import ACCEPTED
from data_prep.manifest import BLANK_LINES, NO_SEPARATOR, Settings

UNKNOWN_SUBSET = "unknown"
MISSING = object()
"""What `value_of` returns if a record does not have the key."""
_MOST_NAMES = 20  # in a message


def parse_key(text: str) -> str:
    """Return the key that a user names; an empty part of it is refused."""
    if not all(text.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a key, such as text or data.text")
    return text


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--input`, a list of patterns for `find_inputs`, and how the inputs are read."""
    add, key = parser.add_argument, Settings.text_key
    several = f"patterns, as in 'text/*.zst'; accepted: {ACCEPTED}"
    add("--input", nargs="+", action="extend", required=True, metavar="GLOB", help=several)
    text = "key of the text in JSON objects, or column of tables; dots separate the keys of nested "
    text += "objects, as in data.text (default: %(default)s)"
    add("--text-key", type=parse_key, default=key, metavar="KEY", help=text)
    between = f"what separates documents in a .txt file: {BLANK_LINES}, lines of this text, such "
    between += f"as '<|endoftext|>', or {NO_SEPARATOR}, for one document (default: %(default)s)"
    add("--document-separator", default=BLANK_LINES, metavar="LINE", help=between)


def value_of(record: object, key: str) -> object:
    """Return the value of a key, or MISSING."""
    while isinstance(record, dict):
        if key in record:
            return record[key]
        first, dot, key = key.partition(".")
        record = record.get(first) if dot else None
    return MISSING


class Fields:
    """Takes the text and the subset of each record of an input; detects keys that no record has."""

    def __init__(self, source: str, settings: Settings) -> None:
        """Start an input, which messages name as `source`."""
        self.source = source
        self.settings = settings
        self._keys = (settings.text_key, settings.subset_key)
        # Keys that a record must have, and none has had so far.
        self._missing = {"--text-key": settings.text_key}
        if settings.subset_key != Settings.subset_key:  # no input must have the default one
            self._missing["--subset-key"] = settings.subset_key
        self._names: dict[str, None] = {}
        self._has_records = False

    def take(self, record: Mapping[str, object]) -> tuple[object, str]:
        """Return the text of a record, of any type or MISSING, and the subset."""
        text, name = value_of(record, self._keys[0]), value_of(record, self._keys[1])
        if isinstance(name, bytes):  # of a column of bytes
            name = name.decode(errors="replace")
        subset = name if isinstance(name, str) and name else None
        self._has_records = True
        if self._missing and len(self._names) < _MOST_NAMES:
            self._names.update(dict.fromkeys(_names(record)))
        if text is not MISSING:
            self._missing.pop("--text-key", None)
        if subset:
            self._missing.pop("--subset-key", None)
        return text, subset or UNKNOWN_SUBSET

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns of a table that hold the text and the subset.

        Raises:
            ValueError: One of them is missing, or there twice.
        """
        for option, key in self._missing.items():
            if _column(names, key) is None:
                raise ValueError(
                    f"{self.source}: no column {key} ({option}); it has {', '.join(names)}"
                )
        found = dict.fromkeys(filter(None, (_column(names, key) for key in self._keys)))
        if twice := [name for name in found if names.count(name) > 1]:
            raise ValueError(f"{self.source}: column {twice[0]!r} is there twice")
        return list(found)

    def check(self) -> None:
        """Raise ValueError if there are records, and none has a value for a key."""
        if self._missing and self._has_records:
            option, key = next(iter(self._missing.items()))
            kind = "a string under " if option == "--subset-key" else ""
            raise ValueError(
                f"{self.source}: no record has {kind}the key {key} ({option}); keys found: "
                f"{', '.join(list(self._names)[:_MOST_NAMES]) or 'none'}"
            )


def _column(names: Sequence[str], key: str) -> str | None:
    """Return the column that is named by a key, or that holds its first part."""
    return next((name for name in (key, key.partition(".")[0]) if name in names), None)


def _names(record: Mapping[str, object]) -> list[str]:
    """Return the keys of a record; those of nested objects are dotted, to a depth of two."""
    names = []
    for name, value in record.items():
        inner = list(value) if isinstance(value, Mapping) else []
        names += [f"{name}.{key}" for key in inner] or [name]
    return names

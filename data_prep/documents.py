"""Documents, and the readers that extract them from inputs.

1. `inputs.find_inputs` lists the inputs that a user names.
2. `read_documents` chooses a reader by the prefix or the name of an input.
3. The reader yields records one at a time; `_parse` parses lines of JSON.
4. `_to_document` converts a record to a `Document`, or to a `Reject` with a reason and a place;
   `fields.Fields` finds its text and its subset.

    {"text": "The quick brown fox", "meta": {"pile_set_name": "Pile-CC"}}
    -> Document(text="The quick brown fox", subset="Pile-CC", source_file="00.jsonl.zst", line=1)

A bad line never costs its neighbours. A file that is cut short or damaged raises `DamagedInput`
after its last complete record, because nobody can know what was lost.

NUL is an ordinary character: U+0000 in a text is kept (JSON escapes it). Memory use depends on the
longest record only; a record over 512 MiB is skipped.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.common.wording import count
from data_prep.compressed import DamagedInput, beginning, kind_of, open_stream
from data_prep.fields import MISSING, UNKNOWN_SUBSET, Fields
from data_prep.inputs import ACCEPTED, Input, naming_input, split_dataset, split_prefix, suffix
from data_prep.manifest import BLANK_LINES, NO_SEPARATOR, Settings

if TYPE_CHECKING:
    import pyarrow


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# 100 MB of text may take 300 MB as JSON in which many characters are escaped.
_LARGEST_RECORD_BYTES = 512 << 20
_BUFFER_BYTES = 1 << 20
_ROWS = 32  # read from Parquet or Arrow at a time; they must fit into memory
_UTF_16 = re.compile(rb"\xff\xfe|\xfe\xff|\{\0|\0\{")  # its mark, or a line of JSON without one
# Beginnings of an array, and of an object of many lines.
_NOT_LINES = re.compile(rb"\s*(\[|\{\s*\n)")
_HEADING = re.compile(rb" ?= (?!= ).*[^= ] = ?\r?\n")


_REASONS: dict[type[Exception], str] = {
    UnicodeDecodeError: "bad-utf8",
    UnicodeEncodeError: "lone-surrogate",
    RecursionError: "nested-too-deeply",
}


@dataclass(frozen=True, slots=True)
class Document:
    """A text, the Pile subset it belongs to, and its file and line, counted from 1."""

    text: str
    subset: str
    source_file: str
    line: int


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that was rejected, the reason, its file and line, and its size in bytes.

    The size is that of the text, or of the whole record where it has no readable text; 0 for a
    row of a table without a text.
    """

    reason: str
    subset: str
    source_file: str
    line: int
    text_bytes: int


Records = Iterator[Document | Reject]
_DEFAULTS = Settings()
Piece = tuple[int, bytes, int]
"""Number of the first line, content, and size in bytes; no content where that is too large."""


def read_documents(
    source: Input, settings: Settings = _DEFAULTS, damages: list[str] | None = None
) -> Records:
    """Read one input.

    Args:
        source: See `inputs.find_inputs`.
        settings: Its keys of the text and the subset, and its document separator.
        damages: If given, reading a damaged input stops at its last complete record, and the error
            message is appended here.

    Raises:
        ValueError: The input is missing or of an unknown kind; while reading: its content does not
            match its name, it is damaged and `damages` is not given, or no record has the text key,
            or a subset key other than the default.
    """
    prefix, place = split_prefix(source)
    name = str(source) if prefix == "datasets" else str(Path(place))
    fields = Fields(name, settings)
    reader = reader_of(source)

    def records() -> Records:
        try:
            yield from reader(fields)
        except DamagedInput as error:
            if damages is None:
                raise
            damages.append(str(error))
        fields.check()

    return records()


def reader_of(source: Input) -> Callable[[Fields], Records]:
    """Return the reader for an input, chosen by its prefix or name.

    Raises:
        ValueError: The input is missing or of an unknown kind.
    """
    prefix, place = split_prefix(source)
    if prefix == "datasets":
        split_dataset(place)
        return partial(_read_dataset, place)
    path = Path(place)
    if not path.exists():
        raise ValueError(f"{source}: no such file; accepted: {ACCEPTED}")
    if (path / "dataset_info.json").is_file() and not prefix:
        return partial(_read_saved_dataset, path)
    if path.is_dir():
        files = f"name the files in it, as in '{source}/*.jsonl'"
        raise ValueError(f"{source}: is a folder; {files}; accepted: {ACCEPTED}")
    head = beginning(path) if path.is_file() else b""
    reader = _READER_OF_PREFIX.get(prefix) or _reader_of_file(path, head)
    if reader is None or not path.is_file():
        looks = f", which looks like {kind}" if (kind := kind_of(head)) else ""
        raise ValueError(f"{source}: is of unknown kind{looks}; accepted: {ACCEPTED}")
    if _UTF_16.match(head):
        raise ValueError(
            f"{source}: is UTF-16; accepted: UTF-8, as `iconv -f UTF-16 -t UTF-8` writes"
        )
    return partial(reader, path)


def content_share(text: bytes, purpose: str) -> float:
    """Return a pseudo-random number in [0, 1) that is a function of the text and the purpose.

    Args:
        text: The document in UTF-8.
        purpose: Up to 16 characters; numbers for different purposes are independent.
    """
    digest = hashlib.blake2b(text, digest_size=8, person=purpose.encode()).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)  # 53 bits are exact in a double


def _reader_of_file(path: Path, head: bytes) -> Callable[[Path, Fields], Records] | None:
    """Return the reader for a file by its name, or else by its first bytes."""
    if suffix(path) == ".json" and (found := _NOT_LINES.match(head)):
        program = ".[]" if found[1] == b"[" else "."
        raise ValueError(
            f"{path}: is JSON, but not an object a line; accepted: JSON Lines, such as "
            f"`jq -c {program}` makes of it"
        )
    if path.suffix in (".zst", ".gz") and suffix(path) == ".parquet":
        return None
    if reader := _READER_OF_SUFFIX.get(suffix(path)):
        return reader
    if kind_of(head) == "Parquet":
        return _read_parquet
    return _read_jsonl if head.startswith(b"{") else None


def _lines(path: Path) -> Iterator[Piece]:
    """Yield the lines with their line ends."""
    number = 0
    with open_stream(path) as stream:
        while line := stream.readline(_LARGEST_RECORD_BYTES + 1):
            number, size_bytes = number + 1, len(line)
            if size_bytes <= _LARGEST_RECORD_BYTES:
                line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                yield number, line, len(line)
                continue
            while line and not line.endswith(b"\n"):
                line = stream.readline(_BUFFER_BYTES)
                size_bytes += len(line)
            yield number, b"", size_bytes


def _joined(lines: Iterable[tuple[Piece, bool]]) -> Iterator[Piece]:
    """Join lines; each that comes with True begins another piece."""
    first, held, size = 1, list[bytes](), 0
    for (number, line, size_bytes), begins in lines:
        if begins:
            yield first, b"".join(held), size
            first, held, size = number, [], 0
        size += size_bytes
        held.append(line)
        if size > _LARGEST_RECORD_BYTES:
            held.clear()
    yield first, b"".join(held), size


def _read_jsonl(path: Path, fields: Fields) -> Records:
    for number, line, size_bytes in _lines(path):
        if size_bytes > _LARGEST_RECORD_BYTES:
            yield _judge_piece(line, fields.source, number, size_bytes)
        elif line and not line.isspace():  # such as after the last line
            try:
                record = _parse(line)
            except ValueError as bad:
                yield Reject(str(bad), UNKNOWN_SUBSET, fields.source, number, len(line))
            else:
                yield _to_document(record, fields, number, len(line))


def _parse(line: bytes) -> object:
    """Return the JSON value of a line, with or without its line end.

    Numbers may have any size; those that orjson cannot represent become floats. Of several equal
    keys the last one counts, as in other readers of JSON.

    Raises:
        ValueError: The line is not JSON or not UTF-8, has a lone surrogate or NaN, or is nested too
            deeply; the message is the reason.
    """
    import orjson

    with suppress(orjson.JSONDecodeError):
        return orjson.loads(line)
    # The standard library accepts huge numbers, and its errors say what is wrong.
    try:
        # The function int refuses NaN and Infinity; float accepts numbers of any length.
        record: object = json.loads(line.decode(), parse_constant=int, parse_int=float)
        json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(_REASONS.get(type(error), "not-json")) from error
    return record


def _read_text(path: Path, fields: Fields) -> Records:
    separator = fields.settings.document_separator
    end = {BLANK_LINES: b"", NO_SEPARATOR: None}.get(separator, separator.strip().encode())

    def marked() -> Iterator[tuple[Piece, bool]]:
        is_divided, within = False, list[int]()
        for number, line, size in _lines(path):
            is_end = line.strip() == end and size <= _LARGEST_RECORD_BYTES
            is_divided |= is_end
            if end and end in line and not is_divided:
                within.append(number)
            yield ((number + 1, b"", 0) if is_end else (number, line, size)), is_end
        if within and not is_divided:
            lines = f"{count(len(within), 'line')}, such as line {within[0]}"
            wrong = f"--document-separator {separator} is only within {lines}"
            raise ValueError(f"{path}: {wrong}; put it on its own line")

    for first, text, size in _joined(marked()):
        if size:
            yield _judge_piece(text.strip(), fields.source, first, size)


def _read_lines(path: Path, fields: Fields) -> Records:
    for number, line, size in _lines(path):
        if (line := line.strip()) or size > _LARGEST_RECORD_BYTES:
            yield _judge_piece(line, fields.source, number, size)
        else:
            yield Document("", UNKNOWN_SUBSET, fields.source, number)


def _read_articles(path: Path, fields: Fields) -> Records:
    for number, article, size in _joined(_with_headings(_lines(path))):
        if (article := article.strip()) or size > _LARGEST_RECORD_BYTES:
            yield _judge_piece(article, fields.source, number, size)


def _with_headings(lines: Iterator[Piece]) -> Iterator[tuple[Piece, bool]]:
    """Say of each line whether it is a heading between blank lines."""
    before = b"\n"
    for piece, (_, after, _) in pairwise(chain(lines, [(0, b"", 0)])):
        line = piece[1]
        yield piece, before.isspace() and after.isspace() and bool(_HEADING.fullmatch(line))
        before = line


def _read_parquet(path: Path, fields: Fields) -> Records:
    import pyarrow.parquet

    with path.open("rb") as file:
        with naming_input(str(path), DamagedInput):
            # Without a buffer size it would read a whole row group at once.
            table = pyarrow.parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES)
            names = table.schema_arrow.names
        yield from _judge_rows(table.iter_batches(_ROWS, columns=fields.columns(names)), fields)


def _read_saved_dataset(path: Path, fields: Fields) -> Records:
    import datasets

    with naming_input(str(path), DamagedInput):
        rows = datasets.load_from_disk(str(path))
    tables = rows.select_columns(fields.columns(rows.column_names)).with_format("arrow")
    yield from _judge_rows(tables.iter(_ROWS), fields)


def _read_dataset(place: str, fields: Fields) -> Records:
    import datasets

    name, config, split = split_dataset(place)
    revision = ""
    if not Path(name).is_dir():
        name, _, revision = name.partition("@")
    # Not `DamagedInput`, because the cause may be the network.
    with naming_input(fields.source, ValueError):
        rows = datasets.load_dataset(
            name, config or None, split=split, revision=revision or None, streaming=True
        )
        for number, record in enumerate(rows, start=1):
            yield _to_document(record, fields, number)


def _judge_rows(tables: Iterable["pyarrow.RecordBatch | pyarrow.Table"], fields: Fields) -> Records:
    records = (record for table in tables for record in _rows(table))
    with naming_input(fields.source, DamagedInput):
        for number, record in enumerate(records, start=1):
            if isinstance(record, tuple):
                reason, size_bytes = record
                yield Reject(reason, UNKNOWN_SUBSET, fields.source, number, size_bytes)
            else:
                yield _to_document(record, fields, number)


def _rows(
    table: "pyarrow.RecordBatch | pyarrow.Table",
) -> list[dict[str, object] | tuple[str, int]]:
    """Return the rows as dictionaries; for one that cannot be, the reason and its size in bytes."""
    try:
        return table.to_pylist()
    except (UnicodeDecodeError, OverflowError) as error:  # a date after the year 9999 overflows
        if len(table) == 1:
            is_text = isinstance(error, UnicodeDecodeError)
            return [("bad-utf8" if is_text else "bad-date", table.nbytes)]
        return [row for number in range(len(table)) for row in _rows(table.slice(number, 1))]


_READER_OF_SUFFIX = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), _read_jsonl),
    ".txt": _read_text,
    ".parquet": _read_parquet,
}
_READER_OF_PREFIX = {"lines": _read_lines, "wikitext": _read_articles}


def _to_document(
    record: object, fields: Fields, line: int, size_bytes: int = 0
) -> Document | Reject:
    """Convert a record whose broken form counts as `size_bytes`."""
    if not isinstance(record, dict):
        return Reject("not-an-object", UNKNOWN_SUBSET, fields.source, line, size_bytes)
    text, subset = fields.take(record)
    if isinstance(text, str | bytes):
        return _judge_text(text, fields.source, line, subset)
    reason = "no-text" if text is MISSING else "text-not-a-string"
    return Reject(reason, subset, fields.source, line, size_bytes)


def _judge_piece(text: bytes, source_file: str, line: int, size_bytes: int) -> Document | Reject:
    if size_bytes > _LARGEST_RECORD_BYTES:
        return Reject("too-large", UNKNOWN_SUBSET, source_file, line, size_bytes)
    return _judge_text(text, source_file, line)


def _judge_text(
    text: str | bytes, source_file: str, line: int, subset: str = UNKNOWN_SUBSET
) -> Document | Reject:
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            return Reject("bad-utf8", subset, source_file, line, len(text))
    if not text or text.isspace():
        return Reject("empty", subset, source_file, line, len(text.encode()))
    return Document(text, subset, source_file, line)

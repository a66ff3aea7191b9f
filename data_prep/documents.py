"""Documents, and the readers that extract them from inputs.

1. `inputs.find_inputs` lists the inputs that a user names.
2. `read` chooses a reader by the prefix or the name of an input.
3. The reader yields records one at a time; `json_lines.parse` parses lines of JSON.
4. `_judge` converts a record to a `Document`, or to a `Reject` with a reason and a place.

    {"text": "The quick brown fox", "meta": {"pile_set_name": "Pile-CC"}}
    -> Document(text="The quick brown fox", subset="Pile-CC", source_file="00.jsonl.zst", line=1)

A bad line never costs its neighbours. A file that is cut short or damaged raises `DamagedInput`
after its last complete record, because nobody can know what was lost.

NUL is an ordinary character: U+0000 in a text is kept (JSON escapes it). Memory use depends on the
longest record only; a record over 512 MiB is skipped.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from data_prep.compressed import DamagedInput, open_stream
from data_prep.inputs import ACCEPTED, Input, naming_input, split_dataset, split_prefix, suffix
from data_prep.json_lines import BadLine, parse

if TYPE_CHECKING:
    import pyarrow

UNKNOWN_SUBSET = "unknown"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# 100 MB of text may take 300 MB as JSON in which many characters are escaped.
_LARGEST_RECORD_BYTES = 512 << 20
_BUFFER_BYTES = 1 << 20
_ROWS = 32  # read from Parquet or Arrow at a time; they must fit into memory
_HEADING = re.compile(rb" ?= (?!= ).*[^= ] = ?\r?\n")


@dataclass(frozen=True, slots=True)
class Document:
    """A text, the Pile subset it belongs to, and its file and line, counted from 1."""

    text: str
    subset: str
    source_file: str
    line: int


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that was rejected, the reason, and its file and line."""

    reason: str
    subset: str
    source_file: str
    line: int


Records = Iterator[Document | Reject]


def read(source: Input, damages: list[str] | None = None) -> Records:
    """Read one input.

    Args:
        source: See `inputs.find_inputs`.
        damages: If given, reading a damaged input stops at its last complete record, and the error
            message is appended here.

    Raises:
        ValueError: The input is missing or of an unknown kind; while reading: its content does not
            match its name, or it is damaged and `damages` is not given.
    """
    records = reader_of(source)()
    return records if damages is None else _until_damage(records, damages)


def reader_of(source: Input) -> Callable[[], Records]:
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
    reader = _reader_by_name(path) if not prefix else _READER_OF_PREFIX[prefix]
    if reader and (path.is_file() or not prefix):
        return partial(reader, path)
    raise ValueError(f"{source}: an input of unknown kind; accepted: {ACCEPTED}")


def content_share(text: bytes, purpose: str) -> float:
    """Return a pseudo-random number in [0, 1) that is a function of the text and the purpose.

    Args:
        text: The document in UTF-8.
        purpose: Up to 16 characters; numbers for different purposes are independent.
    """
    digest = hashlib.blake2b(text, digest_size=8, person=purpose.encode()).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)  # 53 bits are exact in a double


def _reader_by_name(path: Path) -> Callable[[Path], Records] | None:
    if (path / "dataset_info.json").is_file():
        return _read_saved_dataset
    if not path.is_file() or path.name.endswith((".parquet.zst", ".parquet.gz")):
        return None
    return _READER_OF_SUFFIX.get(suffix(path))


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield line numbers and lines with their line ends; None for a line that is too large."""
    number = 0
    while line := stream.readline(_LARGEST_RECORD_BYTES + 1):
        number += 1
        if len(line) <= _LARGEST_RECORD_BYTES:
            yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(_BUFFER_BYTES)
        yield number, None


def _read_jsonl(path: Path) -> Records:
    with open_stream(path) as stream:
        for number, line in _lines(stream):
            if line == b"" or (line and line.isspace()):
                continue  # such as after the last line
            try:
                record = parse(line)
            except BadLine as bad:
                yield Reject(str(bad), UNKNOWN_SUBSET, str(path), number)
            else:
                yield _judge(record, str(path), number)


def _read_text(path: Path) -> Records:
    with open_stream(path) as stream:
        content = stream.read(_LARGEST_RECORD_BYTES + 1)
        while stream.read(_BUFFER_BYTES):
            pass  # damage of a compressed file may only show at its end
    is_too_large = len(content) > _LARGEST_RECORD_BYTES
    text = None if is_too_large else content.removeprefix(_BYTE_ORDER_MARK)
    yield _judge_bytes(text, str(path), 1)


def _read_lines(path: Path) -> Records:
    with open_stream(path) as stream:
        for number, line in _lines(stream):
            if line is None or (line := line.strip()):
                yield _judge_bytes(line, str(path), number)
            else:
                yield Document("", UNKNOWN_SUBSET, str(path), number)


def _read_articles(path: Path) -> Records:
    with open_stream(path) as stream:
        for number, article in _articles(_lines(stream)):
            if article is None or (article := article.strip()):
                yield _judge_bytes(article, str(path), number)


def _articles(lines: Iterator[tuple[int, bytes | None]]) -> Iterator[tuple[int, bytes | None]]:
    """Yield first line number and content of each article; None for one that is too large."""

    def article() -> bytes | None:
        return b"".join(held) if size <= _LARGEST_RECORD_BYTES else None

    first, held, size = 1, [b"\n"], 0
    for number, line in lines:
        if line and line.isspace() and len(held) > 1 and _is_heading(*held[-2:]):
            heading = held.pop()
            yield first, article()
            first, held, size = number - 1, [b"\n", heading], len(heading)
        size += _LARGEST_RECORD_BYTES + 1 if line is None else len(line)
        held.append(line or b"")
        if size > _LARGEST_RECORD_BYTES:
            del held[:-2]
    yield first, article()


def _is_heading(before: bytes, line: bytes) -> bool:
    return before.isspace() and _HEADING.fullmatch(line) is not None


def _read_parquet(path: Path) -> Records:
    import pyarrow.parquet

    with path.open("rb") as file:
        with naming_input(str(path), DamagedInput):
            # Without a buffer size it would read a whole row group at once.
            table = pyarrow.parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES)
            names = table.schema_arrow.names
        batches = table.iter_batches(_ROWS, columns=_columns(names, path))
        with naming_input(str(path), DamagedInput):
            yield from _judge_rows(batches, str(path))


def _read_saved_dataset(path: Path) -> Records:
    import datasets

    with naming_input(str(path), DamagedInput):
        rows = datasets.load_from_disk(str(path))
    tables = rows.select_columns(_columns(rows.column_names, path)).with_format("arrow")
    with naming_input(str(path), DamagedInput):
        yield from _judge_rows(tables.iter(_ROWS), str(path))


def _read_dataset(place: str) -> Records:
    import datasets

    source = f"datasets:{place}"
    name, config, split = split_dataset(place)
    name, _, revision = name.partition("@")
    # Not `DamagedInput`, because the cause may be the network.
    with naming_input(source, ValueError):
        rows = datasets.load_dataset(
            name, config or None, split=split, revision=revision or None, streaming=True
        )
        for number, record in enumerate(rows, start=1):
            yield _judge(record, source, number)


def _until_damage(records: Records, damages: list[str]) -> Records:
    try:
        yield from records
    except DamagedInput as error:
        damages.append(str(error))


def _judge_rows(tables: Iterable["pyarrow.RecordBatch | pyarrow.Table"], source: str) -> Records:
    records = (record for table in tables for record in _rows(table))
    for number, record in enumerate(records, start=1):
        yield _judge(record, source, number) if record is not None else _bad_utf8(source, number)


def _rows(table: "pyarrow.RecordBatch | pyarrow.Table") -> list[object]:
    """Return the rows as dictionaries; None for a row that is not UTF-8."""
    try:
        rows: list[object] = table.to_pylist()
    except UnicodeDecodeError:
        if len(table) == 1:
            return [None]
        return [row for number in range(len(table)) for row in _rows(table.slice(number, 1))]
    return rows


_READER_OF_SUFFIX = {".jsonl": _read_jsonl, ".txt": _read_text, ".parquet": _read_parquet}
_READER_OF_PREFIX = {"lines": _read_lines, "wikitext": _read_articles}


def _columns(names: Sequence[str], path: Path) -> list[str]:
    if "text" not in names:
        raise ValueError(f"{path}: no column text; it has {', '.join(names)}")
    return [name for name in ("text", "meta") if name in names]


def _judge_bytes(content: bytes | None, source_file: str, line: int) -> Document | Reject:
    if content is None:
        return Reject("too-large", UNKNOWN_SUBSET, source_file, line)
    try:
        return _judge({"text": content.decode()}, source_file, line)
    except UnicodeDecodeError:
        return _bad_utf8(source_file, line)


def _bad_utf8(source_file: str, line: int) -> Reject:
    return Reject("bad-utf8", UNKNOWN_SUBSET, source_file, line)


def _judge(record: object, source_file: str, line: int) -> Document | Reject:
    if not isinstance(record, dict):
        return Reject("not-an-object", UNKNOWN_SUBSET, source_file, line)
    subset = _subset(record)
    if "text" not in record:
        return Reject("no-text", subset, source_file, line)
    text = record["text"]
    if not isinstance(text, str):
        return Reject("text-not-a-string", subset, source_file, line)
    if not text or text.isspace():
        return Reject("empty", subset, source_file, line)
    return Document(text, subset, source_file, line)


def _subset(record: dict[str, object]) -> str:
    meta = record.get("meta")
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    return name if isinstance(name, str) and name else UNKNOWN_SUBSET

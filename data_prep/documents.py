"""Documents and the readers that find them in files.

1. `read` picks a reader by the name of the input.
2. The reader hands out records one at a time.
3. `_judge` makes a `Document` of a record, or a `Reject` with a reason and a place.

A bad line never costs its neighbours. A file that is cut short or damaged raises instead, as nobody
can know what it lost.

    {"text": "The quick brown fox", "meta": {"pile_set_name": "Pile-CC"}}
    -> Document(text="The quick brown fox", subset="Pile-CC", source_file="00.jsonl.zst", line=1)
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from data_prep.compressed import open_stream

ACCEPTED = (
    "a .jsonl or .txt file (plain, .zst or .gz), a .parquet file, a folder written by "
    "datasets.Dataset.save_to_disk"
)
UNKNOWN_SUBSET = "unknown"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Document:
    """A text, the Pile subset that it says it is from, and where it stood (lines count from 1)."""

    text: str
    subset: str
    source_file: str
    line: int


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that is no document, why, and where it stood."""

    reason: str
    subset: str
    source_file: str
    line: int


class _BadLine(ValueError):
    """A line that cannot be parsed; its message is the reason."""


def read(path: Path) -> Iterator[Document | Reject]:
    """Read one input.

    Raises:
        ValueError: The input is missing, of an unknown kind, cut short or damaged.
    """
    return reader_of(path)(path)


def reader_of(path: Path) -> Callable[[Path], Iterator[Document | Reject]]:
    """The reader for an input, judged by its name alone.

    Raises:
        ValueError: The input is missing or of an unknown kind.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such file; accepted: {ACCEPTED}")
    if (path / "dataset_info.json").is_file():
        return _read_datasets_folder
    packed = path.suffix in (".zst", ".gz")
    kind = path.with_suffix("").suffix if packed else path.suffix
    if path.is_file() and kind in _READERS and not (packed and kind == ".parquet"):
        return _READERS[kind]
    raise ValueError(f"{path}: an input of unknown kind; accepted: {ACCEPTED}")


def content_share(text: str, purpose: str) -> float:
    """A number in [0, 1) that depends on the text alone: the same wherever the document stands.

    Args:
        text: The document.
        purpose: Up to 16 characters; draws for different purposes are independent of one another.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose.encode()).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)  # 53 bits are exact in a double


def _read_jsonl(path: Path) -> Iterator[Document | Reject]:
    with open_stream(path) as stream:
        for number, line in enumerate(stream, start=1):
            content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if content.isspace():
                continue  # no record, as after the last line
            try:
                record = _parse(content)
            except _BadLine as bad:
                yield Reject(str(bad), UNKNOWN_SUBSET, str(path), number)
            else:
                yield _judge(record, str(path), number)


def _read_text(path: Path) -> Iterator[Document | Reject]:
    with open_stream(path) as stream:
        content = stream.read().removeprefix(_BYTE_ORDER_MARK)
    try:
        record = {"text": content.decode()}
    except UnicodeDecodeError:
        yield Reject("bad-utf8", UNKNOWN_SUBSET, str(path), 1)
    else:
        yield _judge(record, str(path), 1)


def _read_parquet(path: Path) -> Iterator[Document | Reject]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = [name for name in ("text", "meta") if name in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield _judge(record, str(path), number)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cut short or damaged: {error}") from error


def _read_datasets_folder(path: Path) -> Iterator[Document | Reject]:
    import datasets

    for number, record in enumerate(datasets.load_from_disk(str(path)), start=1):
        yield _judge(record, str(path), number)


_READERS = {".jsonl": _read_jsonl, ".txt": _read_text, ".parquet": _read_parquet}


def _parse(line: bytes) -> object:
    import orjson

    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_slowly(line)


def _parse_slowly(line: bytes) -> object:
    """Name the reason why orjson refused, or save what is JSON after all (huge integers)."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _BadLine("bad-utf8") from error
    try:
        record: object = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _BadLine("not-json") from error
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _BadLine("lone-surrogate") from error
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


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

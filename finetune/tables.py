"""Read rows of examples from several formats; each row has the place that errors name.

.csv .tsv            a header line, then a row a line; a CSV field in quotes may hold line breaks,
in a TSV file a quotation mark is text
.jsonl .ndjson       a JSON object a line
.parquet             columns
a folder             written by `save_to_disk` of datasets; FOLDER:SPLIT where it has splits
datasets:NAME:SPLIT  downloaded from the hub; datasets:NAME:CONFIG:SPLIT
"""

import csv
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import hub
from data_prep.common.files import named_errors, parse_json, strict_json

HUB = "datasets:"


@dataclasses.dataclass(frozen=True)
class TableRow:
    """One row."""

    place: str
    """File and line, or row from 1."""
    values: Mapping[str, Any]
    """By column."""


def read_rows(source: str) -> list[TableRow]:
    """Read all rows.

    Args:
        source: see the top of this file.

    Raises:
        ValueError: it does not exist, is empty, is of another format, or a row is broken; names the
            place.
    """
    path = Path(source)
    if source.startswith(HUB) or path.is_dir() or (":" in source and not path.exists()):
        rows = list(_from_datasets(source))
    elif not path.is_file():
        raise ValueError(f"{source}: no such file")
    elif read_one := _READERS.get(path.suffix.lower()):
        try:
            rows = list(read_one(path))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8: {error}") from None
    else:
        known = ", ".join(_READERS)
        raise ValueError(f"{path}: unknown format {path.suffix!r}; accepted: {known}, or a folder")
    if not rows:
        raise ValueError(f"{source}: is empty; give at least one example")
    return rows


def check_columns(place: str, found: Collection[str], needed: Sequence[str], hint: str) -> None:
    """Raise ValueError if a needed column is not there; names the place, and ends with `hint`."""
    if missing := [column for column in needed if column not in found]:
        raise ValueError(f"{place}: has no column {', '.join(map(repr, missing))}; {hint}")


def text(value: Any) -> str:  # noqa: ANN401 - of JSON or parquet
    """Return a label as CSV would hold it: "true" for true, "1" for 1.0, "" for null and NaN."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None or value != value else str(value).strip()


def tab_separated(path: Path) -> list[list[str]]:
    """Read the tab-separated columns of every line of a UTF-8 file.

    Raises:
        ValueError: the file is not UTF-8, or is empty.
    """
    with named_errors(f"{path}: is not UTF-8"):
        content = path.read_bytes().decode("utf-8-sig")  # read_text would end a line at each "\r"
    if not content:
        raise ValueError(f"{path}: is empty")
    lines = content.removesuffix("\n").split("\n")
    return [line.removesuffix("\r").split("\t") for line in lines]


def _separated(path: Path) -> Iterator[TableRow]:
    is_csv = path.suffix.lower() == ".csv"
    lines = _csv_lines(path) if is_csv else enumerate(tab_separated(path), start=1)
    header = _header(next(lines, (1, []))[1], f"{path}: line 1")
    for line, fields in lines:
        if fields == ([] if is_csv else [""]):  # a blank line
            continue
        if len(fields) != len(header):
            hint = "; put fields with separators or line breaks in quotes" if is_csv else ""
            raise ValueError(
                f"{path}: line {line}: has {len(fields)} fields, the header line has "
                f"{len(header)}{hint}"
            )
        yield TableRow(f"{path}: line {line}", dict(zip(header, fields, strict=True)))


def _csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each row, and the number of the line where it begins."""
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines, line = csv.reader(file, strict=True), 1
        try:
            for fields in lines:
                yield line, fields
                line = lines.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{path}: line {line}: {error}") from None


def _header(fields: Sequence[str], place: str) -> list[str]:
    names = [field.strip() for field in fields]
    if len(names) == 1 and ";" in names[0]:
        raise ValueError(f"{place}: {names[0]!r}: separate columns with commas, not semicolons")
    if twice := _twice(names):
        raise ValueError(f"{place}: column {twice!r} is there twice")
    return names


def _twice(names: Sequence[str]) -> str:
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def _json_lines(path: Path) -> Iterator[TableRow]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{path}: line {number}"
                with named_errors(place):
                    value = parse_json(line, object_pairs_hook=_record)
                    strict_json(value, ensure_ascii=False).encode()  # refuses \ud800, half a letter
                yield TableRow(place, value)


def _record(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if twice := _twice([name for name, _ in pairs]):
        raise ValueError(f"key {twice!r} is there twice")
    return dict(pairs)


def _parquet(path: Path) -> Iterator[TableRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OverflowError) as error:  # a date after the year 9999
        raise ValueError(f"{path}: cannot be read as parquet: {error}") from None
    for number, values in enumerate(rows, start=1):
        yield TableRow(f"{path}: row {number}", values)


def load(source: str) -> Any:  # noqa: ANN401 - a Dataset
    """Load what datasets saved in a folder, or its hub has: one split.

    Raises:
        ValueError: it cannot be loaded, or `source` does not name a split of it.
    """
    if source.startswith(HUB):
        hub.stay_offline_if_silent()
    import datasets

    folder, _, split = source.removeprefix(HUB).rpartition(":")
    if not source.startswith(HUB) and Path(source).is_dir():
        folder, split = source, ""
    try:
        if source.startswith(HUB):
            if not folder:
                raise ValueError("no split is named")
            return datasets.load_dataset(*folder.split(":"), split=split)
        table = datasets.load_from_disk(folder)
    except Exception as error:  # those of datasets have no common class
        accepted = f"{', '.join(_READERS)} files, a folder of datasets.Dataset.save_to_disk, or "
        accepted += f"{HUB}NAME:SPLIT"
        raise ValueError(f"{source}: cannot be loaded ({error}); accepted: {accepted}") from None
    splits = table if isinstance(table, Mapping) else {"": table}
    if split not in splits:
        accepted = ", ".join(f"{folder}:{name}" if name else folder for name in splits)
        raise ValueError(f"{source}: names no split of it; accepted: {accepted}")
    return splits[split]


def _from_datasets(source: str) -> Iterator[TableRow]:
    import datasets

    table = load(source)
    names = {
        column: feature.names
        for column, feature in table.features.items()
        if isinstance(feature, datasets.ClassLabel)
    }
    for number, values in enumerate(table, start=1):
        values = dict(values)
        for column, known in names.items():
            # Null, or -1 as in the hub's test sets, where there is no label.
            label = values[column]
            values[column] = known[label] if label in range(len(known)) else None
        yield TableRow(f"{source}: row {number}", values)


_READERS: Mapping[str, Callable[[Path], Iterator[TableRow]]] = {
    ".csv": _separated,
    ".tsv": _separated,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}
"""By the end of a file's name."""

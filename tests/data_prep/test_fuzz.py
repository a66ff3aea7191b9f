"""Readers end, lose nothing, and name the input in their errors, for arbitrary content."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from data_prep.documents import Document, read
from tests.data_prep.conftest import make_texts

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as some  # noqa: E402

# The same examples in each run, without time limits.
bounded = settings(max_examples=200, derandomize=True, deadline=None, database=None)

GOOD = [json.dumps({"text": text, "meta": {"pile_set_name": "X"}}) for text in make_texts(30, 40)]
PLAIN = "".join(f"{line}\n" for line in GOOD).encode()


def parquet(texts: list[str]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    output = io.BytesIO()
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, output, row_group_size=10, write_page_checksum=True)
    return output.getvalue()


VALID = {
    "a.jsonl": PLAIN,
    "a.jsonl.zst": zstandard.compress(PLAIN[:1000]) + zstandard.compress(PLAIN[1000:]),
    "a.jsonl.gz": gzip.compress(PLAIN[:1000]) + gzip.compress(PLAIN[1000:]),
    "a.txt.zst": zstandard.compress(PLAIN),
    "a.parquet": parquet(make_texts(30, 40)),
}


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bytes], Path]:
    """Return a function that writes an input, always to the same folder."""
    folder = tmp_path_factory.mktemp("fuzz")

    def write(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def fragments() -> some.SearchStrategy[bytes]:
    """Arbitrary bytes, and pieces of valid input."""
    known = [line.encode() for line in GOOD[:3]]
    known += [
        b'{"text": ',
        b'"',
        b"{",
        b"}",
        b"[",
        b"\\ud800",
        b"\\u0000",
        b"\n",
        b"\r",
        b" ",
        b"\0",
    ]
    known += [
        b"\xff",
        b"\xef\xbb\xbf",
        b"1e999",
        b"null",
        b'"text": "b", ',
        b" = A = \n",
        b"9" * 50,
    ]
    return some.lists(some.one_of(some.sampled_from(known), some.binary(max_size=20))).map(b"".join)


def mutated(valid: bytes) -> some.SearchStrategy[bytes]:
    """A valid file with some bytes changed, and some parts left out, repeated or moved."""
    place = some.integers(0, len(valid))

    def mutate(first: int, second: int, third: int, new: bytes, cut: int) -> bytes:
        first, second = sorted((first, second))
        return (valid[:first] + new + valid[second:])[:cut] + valid[third : third + 20 * (cut % 2)]

    return some.builds(mutate, place, place, place, some.binary(max_size=8), place)


def flipped(valid: bytes) -> some.SearchStrategy[bytes]:
    """A valid file with one bit changed."""

    def flip(bit: int) -> bytes:
        content = bytearray(valid)
        content[bit // 8] ^= 1 << bit % 8
        return bytes(content)

    return some.integers(0, 8 * len(valid) - 1).map(flip)


def read_or_refuse(source: Path | str) -> int | None:
    """Return the number of records, or None if a ValueError names the input."""
    try:
        return len(list(read(source)))
    except ValueError as error:
        refusal = str(error)
    assert str(source).removeprefix("wikitext:").removeprefix("lines:") in refusal
    return None


@given(content=fragments())
@bounded
def test_every_line_is_accounted_for(write: Callable[[str, bytes], Path], content: bytes) -> None:
    file = write("a.jsonl", b"x" + content)  # no compressed file begins with x
    lines = (b"x" + content).split(b"\n")
    found = list(read(file))
    expected = [n for n, line in enumerate(lines, start=1) if line and not line.isspace()]
    assert [record.line for record in found] == expected
    assert read_or_refuse(f"lines:{file}") == len(lines) - (not lines[-1])
    read_or_refuse(f"wikitext:{file}")


@given(content=fragments())
@bounded
def test_bad_line_never_changes_its_neighbours(
    write: Callable[[str, bytes], Path], content: bytes
) -> None:
    before, after = GOOD[0].encode(), GOOD[1].encode()
    file = write("b.jsonl", before + b"\n" + content + b"\n" + after)
    first, *_, last = read(file)
    assert first == Document(json.loads(before)["text"], "X", str(file), 1)
    assert last == Document(json.loads(after)["text"], "X", str(file), content.count(b"\n") + 3)


@pytest.mark.parametrize("name", VALID)
def test_modified_file_is_read_or_refused(write: Callable[[str, bytes], Path], name: str) -> None:
    @given(content=some.one_of(mutated(VALID[name]), flipped(VALID[name]), some.binary()))
    @bounded
    def check(content: bytes) -> None:
        read_or_refuse(write(name, content))

    check()


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz"])
def test_truncated_file_gives_its_first_documents(
    write: Callable[[str, bytes], Path], name: str
) -> None:
    whole = [json.loads(line)["text"] for line in GOOD]

    @given(kept=some.integers(4, len(VALID[name]) - 1))  # less is no zstd, nor gzip
    @bounded
    def check(kept: int) -> None:
        damages: list[str] = []
        file = write(name, VALID[name][:kept])
        found = [r.text for r in read(file, damages) if isinstance(r, Document)]
        assert found == whole[: len(found)]
        assert damages or len(found) < len(whole)

    check()

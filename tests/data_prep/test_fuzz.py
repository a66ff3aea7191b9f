"""Readers end, lose nothing, and name the input in their errors, for arbitrary content."""

import gzip
import io
import json

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as some

from data_prep.documents import Document, read_documents
from tests.data_prep.conftest import make_texts

# The same examples in each run, without time limits.
bounded = settings(max_examples=100, derandomize=True, deadline=None, database=None)

GOOD = [json.dumps({"text": text, "meta": {"pile_set_name": "X"}}) for text in make_texts(30, 40)]
PLAIN = "".join(f"{line}\n" for line in GOOD).encode()


def parquet(texts):
    import pyarrow
    import pyarrow.parquet

    output = io.BytesIO()
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, output, row_group_size=10, write_page_checksum=True)
    return output.getvalue()


VALID = {
    "a.jsonl": PLAIN,
    "a.jsonl.zst": zstandard.compress(PLAIN[:1000]) + zstandard.compress(PLAIN[1000:]),
    "a.jsonl.gz": gzip.compress(PLAIN[:1000], mtime=0) + gzip.compress(PLAIN[1000:], mtime=0),
    "a.txt.zst": zstandard.compress(PLAIN),
    "a.parquet": parquet(make_texts(30, 40)),
}


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Return a function that writes an input, always to the same folder."""
    folder = tmp_path_factory.mktemp("fuzz")

    def write(name, content):
        (folder / name).write_bytes(content)
        return folder / name

    return write


def fragments():
    """Arbitrary bytes, and pieces of valid input."""
    parts = rb'{"text": |"|{|}|[|\ud800|\u0000|1e999|null|"text": "b", | = A = '.split(b"|")
    known = [line.encode() for line in GOOD[:3]] + parts
    known += [b"\n", b"\r", b" ", b"\0", b"\xff", b"\xef\xbb\xbf", b" = A = \n", b"9" * 50]
    return some.lists(some.one_of(some.sampled_from(known), some.binary(max_size=20))).map(b"".join)


def mutated(valid):
    """A valid file with some bytes changed, and some parts left out, repeated or moved."""
    place = some.integers(0, len(valid))

    def mutate(first, second, third, new, cut):
        first, second = sorted((first, second))
        return (valid[:first] + new + valid[second:])[:cut] + valid[third : third + 20 * (cut % 2)]

    return some.builds(mutate, place, place, place, some.binary(max_size=8), place)


def flipped(valid):
    """A valid file with one bit changed."""

    def flip(bit):
        content = bytearray(valid)
        content[bit // 8] ^= 1 << bit % 8
        return bytes(content)

    return some.integers(0, 8 * len(valid) - 1).map(flip)


def read_or_refuse(source):
    """Return the number of records, or None if a ValueError names the input."""
    try:
        return len(list(read_documents(source)))
    except ValueError as error:
        refusal = str(error)
    assert str(source).removeprefix("wikitext:").removeprefix("lines:") in refusal
    return None


@given(content=fragments())
@bounded
def test_every_line_is_accounted_for(write, content):
    file = write("a.jsonl", b"x" + content)  # no compressed file begins with x
    lines = (b"x" + content).split(b"\n")
    found = list(read_documents(file))
    expected = [n for n, line in enumerate(lines, start=1) if line and not line.isspace()]
    assert [record.line for record in found] == expected
    assert read_or_refuse(f"lines:{file}") == len(lines) - (not lines[-1])
    read_or_refuse(f"wikitext:{file}")


@given(content=fragments())
@bounded
def test_bad_line_never_changes_its_neighbours(write, content):
    before, after = GOOD[0].encode(), GOOD[1].encode()
    file = write("b.jsonl", before + b"\n" + content + b"\n" + after)
    first, *_, last = read_documents(file)
    assert first == Document(json.loads(before)["text"], "X", str(file), 1)
    assert last == Document(json.loads(after)["text"], "X", str(file), content.count(b"\n") + 3)


@pytest.mark.parametrize("name", VALID)
def test_modified_file_is_read_or_refused(write, name):
    @given(content=some.one_of(mutated(VALID[name]), flipped(VALID[name]), some.binary()))
    @bounded
    def check(content):
        read_or_refuse(write(name, content))

    check()


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz"])
def test_truncated_file_gives_its_first_documents(write, name):
    whole = [json.loads(line)["text"] for line in GOOD]

    @given(kept=some.integers(4, len(VALID[name]) - 1))  # less is no zstd, nor gzip
    @bounded
    def check(kept):
        damages: list[str] = []
        file = write(name, VALID[name][:kept])
        found = [r.text for r in read_documents(file, damages=damages) if isinstance(r, Document)]
        assert found == whole[: len(found)]
        assert damages or len(found) < len(whole)

    check()

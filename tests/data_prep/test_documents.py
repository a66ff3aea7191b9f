import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from data_prep.documents import Document, Reject, content_share, read
from tests.data_prep.conftest import make_texts, write_pile

GOOD = b'{"text": "good", "meta": {"pile_set_name": "Books3"}}'
BAD_LINES = {
    "not-json": [b"{text", b'{"text": NaN}', b'{"text": "a"} x', b"\x00", b"[" * 100_000],
    "not-an-object": [b"[]", b'"text"', b"3", b"null"],
    "no-text": [b"{}", b'{"txt": "a"}'],
    "text-not-a-string": [b'{"text": null}', b'{"text": 3}', b'{"text": ["a"]}'],
    "bad-utf8": [b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}'],
    "lone-surrogate": [b'{"text": "\\ud800"}', b'{"text": "a", "meta": "\\udfff"}'],
    "empty": [b'{"text": ""}', b'{"text": " \\n\\t"}'],
}


@pytest.mark.parametrize(
    ("reason", "line"), [(reason, line) for reason, lines in BAD_LINES.items() for line in lines]
)
def test_bad_line_is_named_and_costs_no_neighbour(tmp_path: Path, reason: str, line: bytes) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join([GOOD, line, GOOD]))
    first, bad, last = read(file)
    assert first == Document("good", "Books3", str(file), 1)
    assert isinstance(bad, Reject)
    assert (bad.reason, bad.line, bad.source_file) == (reason, 2, str(file))
    assert last == Document("good", "Books3", str(file), 3)


def test_odd_lines_that_are_documents_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        b"\xef\xbb\xbf" + b'{"text": "byte order mark"}\r\n'
        b"\n  \n"
        b'{"text": "big", "n": 123456789012345678901234567890}\n'
        b'{"text": "nul \\u0000 inside", "meta": null}\n'
        b'{"text": "twice", "text": "last wins"}'
    )
    found = list(read(file))
    assert [(d.text, d.line) for d in found if isinstance(d, Document)] == [
        ("byte order mark", 1),
        ("big", 4),
        ("nul \0 inside", 5),
        ("last wins", 6),
    ]
    assert len(found) == 4


@pytest.mark.parametrize(
    "meta", ['{"pile_set_name": 3}', '{"pile_set_name": ""}', "[]", '"Books3"', "{}"]
)
def test_subset_is_unknown_unless_named(tmp_path: Path, meta: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "a", "meta": {meta}}}')
    assert [record.subset for record in read(file)] == ["unknown"]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def texts_of(path: Path) -> list[str]:
    return [record.text for record in read(path) if isinstance(record, Document)]


def test_every_packing_gives_the_same_documents(tmp_path: Path) -> None:
    texts = [*make_texts(500, 50), "long " * 100_000]
    content = jsonl(texts)
    half = len(content) // 2 + 3  # in the middle of a line
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"abcde"
    frames = [zstandard.compress(content[:half]), skippable, zstandard.compress(content[half:])]
    packings = {
        "plain.jsonl": content,
        "one.jsonl.zst": zstandard.compress(content),
        "many.jsonl.zst": b"".join(frames),
        "one.jsonl.gz": gzip.compress(content),
        "many.jsonl.gz": gzip.compress(content[:half]) + gzip.compress(content[half:]),
    }
    for name, packed in packings.items():
        (tmp_path / name).write_bytes(packed)
        assert texts_of(tmp_path / name) == texts, name


@pytest.mark.parametrize("suffix", ["zst", "gz"])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.9999])
def test_file_cut_short_is_refused(tmp_path: Path, suffix: str, kept: float) -> None:
    content = jsonl(make_texts(2000, 50))
    packed = zstandard.compress(content) if suffix == "zst" else gzip.compress(content)
    file = tmp_path / f"a.jsonl.{suffix}"
    file.write_bytes(packed[: int(len(packed) * kept)])
    with pytest.raises(ValueError, match=rf"a\.jsonl\.{suffix}: (cut short|empty)"):
        list(read(file))


def test_second_frame_cut_short_is_refused(tmp_path: Path) -> None:
    frame = zstandard.compress(jsonl(make_texts(100, 20)))
    file = tmp_path / "a.jsonl.zst"
    for cut in (1, 10, len(frame) - 1):
        file.write_bytes(frame + frame[:-cut])
        with pytest.raises(ValueError, match=r"a\.jsonl\.zst: cut short"):
            list(read(file))


@pytest.mark.parametrize("suffix", ["zst", "gz", "parquet"])
def test_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / (f"a.jsonl.{suffix}" if suffix != "parquet" else "a.parquet")
    file.write_bytes(GOOD * 100)
    with pytest.raises(ValueError, match=rf"{file.name}: cut short or damaged"):
        list(read(file))


def test_text_file_is_one_document(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("first line\n\nsecond\n")
    bad.write_bytes(b"\xff")
    assert list(read(good)) == [Document("first line\n\nsecond\n", "unknown", str(good), 1)]
    assert list(read(bad)) == [Reject("bad-utf8", "unknown", str(bad), 1)]


def test_parquet_and_datasets_folders_give_their_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "a", "meta": {"pile_set_name": "X"}}, {"text": None, "meta": None}]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet")
    assert first == Document("a", "X", str(tmp_path / "a.parquet"), 1)
    assert isinstance(second, Reject)
    assert (second.reason, second.line) == ("text-not-a-string", 2)

    import datasets

    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    assert [type(record) for record in read(tmp_path / "saved")] == [Document, Reject]


def test_unknown_inputs_are_refused_with_what_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "b.parquet.zst").write_bytes(b"")
    for name in ("a.csv", "folder", "b.parquet.zst"):
        with pytest.raises(
            ValueError, match=rf"{name}: an input of unknown kind; accepted: .*jsonl"
        ):
            read(tmp_path / name)
    with pytest.raises(ValueError, match=r"nowhere\.jsonl: no such file"):
        read(tmp_path / "nowhere.jsonl")


def test_content_shares_are_uniform_stable_and_independent() -> None:
    texts = make_texts(4000, 20)
    valid = np.array([content_share(text, "valid") for text in texts])
    held_out = np.array([content_share(text, "held-out") for text in texts])
    assert valid.min() >= 0
    assert valid.max() < 1
    for share in (0.1, 0.5):
        assert abs((valid < share).mean() - share) < 0.03
        both = ((valid < share) & (held_out < share)).mean()
        assert abs(both - share**2) < 0.03
    assert content_share("a text", "valid") == 0.6197381313153875  # a change moves every split


def test_line_count_goes_on_over_frames(tmp_path: Path) -> None:
    file = write_pile(tmp_path / "a.jsonl.zst", ["one", "two"])
    file.write_bytes(file.read_bytes() * 2)
    assert [record.line for record in read(file)] == [1, 2, 3, 4]

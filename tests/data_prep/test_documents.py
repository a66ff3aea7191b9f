import gzip
import json
import lzma
import os
import tracemalloc
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import zstandard

from data_prep import documents
from data_prep.documents import Document, Reject, content_share, read_documents
from data_prep.inputs import find_inputs, input_sha256, input_state
from data_prep.manifest import Settings
from tests.data_prep.conftest import make_texts, write_pile

GOOD = b'{"text": "good", "meta": {"pile_set_name": "Books3"}}'
BAD_LINES = {
    "not-json": [b"{text", b'{"text": NaN}', b'{"text": "a"} x', b"\x00", b'{"text": "\x00"}'],
    "nested-too-deeply": [b"[" * 100_000, b'{"a": ' * 10**6 + b"1" + b"}" * 10**6],
    "not-an-object": [b"[]", b'"text"', b"3", b"null"],
    "no-text": [b"{}", b'{"txt": "a"}'],
    "text-not-a-string": [b'{"text": null}', b'{"text": 3}', b'{"text": ["a"]}'],
    "bad-utf8": [b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}'],
    "lone-surrogate": [b'{"text": "\\ud800"}', b'{"text": "a", "meta": "\\udfff"}'],
    "empty": [b'{"text": ""}', b'{"text": " \\n\\u00a0"}'],
}


@pytest.mark.parametrize(
    ("reason", "line"), [(reason, line) for reason, lines in BAD_LINES.items() for line in lines]
)
def test_bad_line_is_rejected_alone_with_its_reason(tmp_path, reason, line):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join([GOOD, line, GOOD]))
    first, bad, last = read_documents(file)
    assert first == Document("good", "Books3", str(file), 1)
    size_bytes = len(json.loads(line)["text"].encode()) if reason == "empty" else len(line) + 1
    assert bad == Reject(reason, "unknown", str(file), 2, size_bytes)
    assert last == Document("good", "Books3", str(file), 3)


def test_unusual_but_valid_lines_are_kept(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        b"\xef\xbb\xbf" + b'{"text": "byte order mark"}\r\n'
        b"\n  \n"
        b'{"text": "big", "n": 123456789012345678901234567890}\n'
        b'{"text": "nul \\u0000 inside", "meta": null}\n'
        b'{"text": "huge", "n": 1e999, "m": ' + b"1" * 5000 + b"}\n"
        b'{"text": "first", "text": "last"}\n{"text": "first", "text": "last", "n": 1e999}\n'
    )
    texts = ["byte order mark", "big", "nul \0 inside", "huge", "last", "last"]
    assert outcomes(file) == [*zip(texts, (1, 4, 5, 6, 7, 8), strict=True)]


@pytest.mark.parametrize(
    "meta", ['{"pile_set_name": 3}', '{"pile_set_name": ""}', "[]", '"Books3"', "{}"]
)
def test_subset_is_unknown_unless_named(tmp_path, meta):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "a", "meta": {meta}}}')
    assert [record.subset for record in read_documents(file)] == ["unknown"]


def write_table(path, table):
    """Write a Parquet file, or, without a suffix, the folder of a dataset."""
    if path.suffix:
        pyarrow.parquet.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(str(path))
    return path


def outcomes(source, **settings):
    """The text of each record, or the reason why it is rejected, and its line."""
    found = read_documents(source, Settings(**settings))
    return [(getattr(e, "reason", None) or getattr(e, "text", ""), e.line) for e in found]


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def texts_of(path):
    return [record.text for record in read_documents(path) if isinstance(record, Document)]


def test_every_compression_gives_the_same_documents(tmp_path):
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
        lines = [record.line for record in read_documents(tmp_path / name)]
        assert lines == [*range(1, len(texts) + 1)]


@pytest.mark.parametrize("compress", [zstandard.compress, gzip.compress])
def test_file_that_is_cut_short_or_too_long_is_refused(tmp_path, compress):
    file = tmp_path / f"a.jsonl.{'zst' if compress is zstandard.compress else 'gz'}"
    packed = compress(jsonl(make_texts(2000, 50)))
    cuts = [int(len(packed) * share) for share in (0.0, 0.3, 0.9, 0.9999)]
    second = [packed + packed[:-cut] for cut in (1, 10, len(packed) - 1)]
    for content in (*(packed[:cut] for cut in cuts), *second, packed + b"rubbish"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{file}: (cut short or damaged|empty)"):
            list(read_documents(file))


@pytest.mark.parametrize(
    ("name", "content", "looks"),
    [
        ("a.jsonl.zst", GOOD, "not zstd as its name says; it looks like plain text"),
        ("a.jsonl.zst", gzip.compress(GOOD, mtime=0), "not zstd as its name says; .* like gzip"),
        ("a.jsonl.gz", zstandard.compress(GOOD), "not gzip as its name says; .* like zstd"),
        ("a.txt.gz", b"\xff\xfe\xfd", "it looks like neither a compressed file nor plain text"),
        ("a.jsonl", zstandard.compress(GOOD), "not plain as its name says; it looks like zstd"),
        ("a.txt", gzip.compress(GOOD, mtime=0), "it looks like gzip"),
        ("a.parquet", GOOD, "cannot be read: ArrowInvalid: Parquet magic bytes not found"),
    ],
)
def test_file_whose_content_contradicts_its_name_is_refused(tmp_path, name, content, looks):
    file = tmp_path / name
    file.write_bytes(content)
    damages = None if name == "a.parquet" else []  # the wrong file is not a damaged one
    with pytest.raises(ValueError, match=rf"{name}: .*{looks}"):
        list(read_documents(file, damages=damages))


def test_record_that_is_too_large_is_rejected_alone(tmp_path, monkeypatch):
    def read(source):
        """The text, or the reason and the size, of each record, and its line."""
        found = read_documents(source)
        return [(getattr(r, "text", None) or (r.reason, r.text_bytes), r.line) for r in found]

    monkeypatch.setattr(documents, "_LARGEST_RECORD_BYTES", 1000)
    monkeypatch.setattr(documents, "_BUFFER_BYTES", 64)
    largest = b'{"text": "' + b"a" * 987 + b'"}\n'
    assert len(largest) == 1000
    file, text, kept = tmp_path / "a.jsonl", tmp_path / "a.txt", "a" * 987
    file.write_bytes(largest + b" " * 5000 + b"\n" + largest.replace(b"}", b" }") + largest)
    large = [(("too-large", 5001), 2), (("too-large", 1001), 3)]
    assert read(file) == [(kept, 1), *large, (kept, 4)]
    file.write_bytes(b"x" * 5000)  # a line with no end
    assert read(file) == [(("too-large", 5000), 1)]
    text.write_bytes(b"\xff\n\n" + b"a" * 1000 + b"\n\n" + b"a" * 1000)
    assert read(text) == [(("bad-utf8", 1), 1), (("too-large", 1001), 3), ("a" * 1000, 5)]
    articles = [
        b" = One = \n \n",
        b"long\n" * 299 + b"x" * 2000 + b"\n",
        b" \n = Two = \n \nshort\n",
    ]
    text.write_bytes(b"".join(articles))
    size_bytes = len(articles[0] + articles[1]) + 2
    second = ("= Two = \n \nshort", 304)
    assert read(f"wikitext:{text}") == [(("too-large", size_bytes), 1), second]


def test_memory_is_bounded_for_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_LARGEST_RECORD_BYTES", 1 << 20)
    file = tmp_path / "a.jsonl"
    with file.open("wb") as output:
        output.truncate(1 << 26)  # takes no room on the disk
        output.seek(0, os.SEEK_END)
        output.write(b"\n" + GOOD)
    tracemalloc.start()
    assert outcomes(file) == [("too-large", 1), ("good", 2)]
    assert tracemalloc.get_traced_memory()[1] < 1 << 23
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("separator", "expected"),
    [
        ("blank-lines", [("one\n two", 2), ("three\n<|end|>\nfour", 6)]),
        ("<|end|>", [("one\n two\n\n \nthree", 1), ("four", 8)]),
        ("none", [("one\n two\n\n \nthree\n<|end|>\nfour", 1)]),
    ],
)
def test_documents_of_a_text_file_are_separated_as_the_user_says(tmp_path, separator, expected):
    file = tmp_path / "a.txt"
    file.write_text("\none\n two\n\n \nthree\n<|end|>\nfour\n", encoding="utf-8-sig")
    assert outcomes(file, document_separator=separator) == expected


def test_a_separator_that_lines_contain_but_no_line_is_is_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo<|end|>\nthree<|end|>\n")
    message = r"a\.txt: --document-separator <\|end\|> is only within 2 lines, such as line 2"
    with pytest.raises(ValueError, match=message):
        outcomes(file, document_separator="<|end|>")
    assert outcomes(file, document_separator="<|stop|>") == [("one\ntwo<|end|>\nthree<|end|>", 1)]
    file.write_text("a <|end|> is text\n<|end|>\n")
    assert outcomes(file, document_separator="<|end|>") == [("a <|end|> is text", 1)]


@pytest.mark.parametrize("name", ["a.parquet", "saved"])
def test_rows_of_parquet_files_and_dataset_folders_are_documents(tmp_path, name):
    rows = [{"text": "a", "meta": {"pile_set_name": "X"}}, {"text": None, "meta": None}]
    file = write_table(tmp_path / name, pyarrow.Table.from_pylist(rows))
    assert list(read_documents(file)) == [
        Document("a", "X", str(file), 1),
        Reject("text-not-a-string", "unknown", str(file), 2, 0),
    ]


@pytest.mark.parametrize("name", ["c4.json.gz", "a.json.zst", "a.json", "part-00000", "a.snappy"])
def test_an_input_of_any_name_is_read_by_what_it_holds(tmp_path, name):
    if name.endswith("snappy"):
        write_table(tmp_path / name, pyarrow.table({"text": ["a", "b"]}))
    else:
        packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
        (tmp_path / name).write_bytes(packed(jsonl(["a", "b"])))
    assert texts_of(tmp_path / name) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD.decode().encode("utf-16"), "is UTF-16; accepted: UTF-8, as `iconv"),
        # Without the time, which would make names of their own for each process of the tests.
        ("a.jsonl.gz", gzip.compress(GOOD.decode().encode("utf-16-be"), mtime=0), "is UTF-16;"),
        ("a.txt", "\ufeff東京".encode("utf-16-be"), "is UTF-16; accepted"),
        ("a.json", b"[" + GOOD + b"]", "is JSON, but not an object a line; .*`jq -c"),
        ("a.json", b'{\n  "text": "a"\n}\n', "is JSON, but not an object a line; .*`jq -c"),
        ("a.jsonl.xz", lzma.compress(GOOD), "of unknown kind, which looks like xz"),
        ("a.bin", b"\0\1", "of unknown kind; accepted"),
        ("a.csv", b"text", "of unknown kind; accepted"),
        ("b.parquet.zst", zstandard.compress(b"PAR1"), "of unknown kind; accepted"),
        ("", b"", r"is a folder; name the files in it, as in '.*/\*\.jsonl'"),
        ("nowhere.jsonl", b"", "no such file; accepted"),
    ],
)
def test_what_an_input_is_that_cannot_be_read_is_said(tmp_path, name, content, message):
    if content:
        (tmp_path / name).write_bytes(content)
    for source in [tmp_path / name] if name else [tmp_path, f"lines:{tmp_path}"]:
        with pytest.raises(ValueError, match=f"{source}: .*{message}"):
            read_documents(source)


def test_columns_of_bytes_are_text(tmp_path):
    table = pyarrow.table({"text": ["é".encode(), b"\xff"], "kind": [b"news", b"news"]})
    file = write_table(tmp_path / "a.parquet", table)
    assert list(read_documents(file, Settings(subset_key="kind"))) == [
        Document("é", "news", str(file), 1),
        Reject("bad-utf8", "news", str(file), 2, 1),
    ]


@pytest.mark.parametrize("reason", ["bad-utf8", "bad-date"])
def test_parquet_row_with_a_value_that_cannot_be_read_is_rejected_alone(tmp_path, reason):
    texts = pyarrow.array([b"good", b"\xff" if reason == "bad-utf8" else b"good", b"good"] * 30)
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(texts), texts.buffers())
    days = pyarrow.array([1, 2**31 - 1 if reason == "bad-date" else 1, 1] * 30, pyarrow.int32())
    meta = pyarrow.StructArray.from_arrays([days.cast(pyarrow.date32())], ["date"])
    file = write_table(tmp_path / "a.parquet", pyarrow.table({"text": column, "meta": meta}))
    reasons = ["good", reason, "good"] * 30
    assert outcomes(file) == [*zip(reasons, range(1, 91), strict=True)]


@pytest.mark.parametrize("name", ["a.parquet", "saved"])
def test_columns_are_found_by_their_keys(tmp_path, name):
    """Which key is found: test_fields."""
    rows = [{"data": {"body": f"text {n}", "id": n}, "meta.lang": "en"} for n in range(40)]
    write_table(tmp_path / name, pyarrow.Table.from_pylist(rows))
    found = read_documents(tmp_path / name, Settings(text_key="data.body", subset_key="meta.lang"))
    places = str(tmp_path / name)
    assert list(found) == [Document(f"text {n}", "en", places, n + 1) for n in range(40)]
    with pytest.raises(ValueError, match=r"no column kind \(--subset-key\)"):
        list(read_documents(tmp_path / name, Settings(text_key="data.body", subset_key="kind")))
    with pytest.raises(ValueError, match=r"no record has the key data\.txt .* found: data\.body, "):
        list(read_documents(tmp_path / name, Settings(text_key="data.txt")))


def test_key_that_no_record_has_is_refused_with_the_keys_found(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "a", "meta": {"lang": "en", "n": 1}}\n{\n{"title": "b"}\n')
    with pytest.raises(ValueError, match=r"key text \(--text-key\); keys found: body, meta\.lang"):
        list(read_documents(file))
    for key in ("lang", "meta.n"):  # a number names no subset
        with pytest.raises(ValueError, match=rf"no record has .* {key} \(--subset-key\)"):
            list(read_documents(file, Settings(text_key="body", subset_key=key)))
    kinds = [type(record) for record in read_documents(file, Settings(text_key="body"))]
    assert kinds == [Document, Reject, Reject]
    file.write_text("{\n[]\n")  # no record that could have it
    for settings in (Settings(), Settings(subset_key="kind")):
        assert [type(record) for record in read_documents(file, settings)] == [Reject, Reject]


@pytest.mark.parametrize("name", ["a.parquet", "saved"])
def test_table_cut_short_is_refused(tmp_path, name):
    file = write_table(tmp_path / name, pyarrow.table({"text": make_texts(2000, 50)}))
    if name == "saved":
        (file,) = file.glob("*.arrow")
    whole = file.read_bytes()
    for kept in (0.0, 0.5, 0.99):
        file.write_bytes(whole[: int(len(whole) * kept)])
        with pytest.raises(ValueError, match=f"{name}: cannot be read: "):
            list(read_documents(tmp_path / name))


def test_lines_are_documents_including_blank_ones(tmp_path):
    file = tmp_path / "wiki.tokens"
    file.write_bytes(b"\xef\xbb\xbf = Title = \n \n text \r\n\xff\n\nlast")
    texts = ["= Title =", "", "text", "bad-utf8", "", "last"]
    assert outcomes(f"lines:{file}") == [*zip(texts, range(1, 7), strict=True)]


def test_articles_begin_at_titles_between_blank_lines(tmp_path):
    file = tmp_path / "wiki.train.tokens.gz"
    first = " = One ( a = b ) = \n \n Text . \n \n = = Part = = \n \n More . \n"
    first += " = not one = \n \n Text . \n \n = nor this = \n Text . \n"
    second = " = Two = \n \n\n Text . \n"
    file.write_bytes(gzip.compress(f" \n{first} \n{second}".encode()))
    assert outcomes(f"wikitext:{file}") == [(first.strip(), 2), (second.strip(), 16)]


def test_dataset_of_a_local_folder_is_read_by_name(tmp_path):
    (tmp_path := tmp_path / "a@b").mkdir()
    write_pile(tmp_path / "train.jsonl.zst", ["a", "b"])
    (tmp_path / "test.jsonl").write_bytes(GOOD)
    assert find_inputs([f"datasets:{tmp_path}"]) == [f"datasets:{tmp_path}"]
    assert texts_of(f"datasets:{tmp_path}") == ["a", "b"]
    test = f"datasets:{tmp_path}:default:test"
    assert list(read_documents(test)) == [Document("good", "Books3", test, 1)]
    with pytest.raises(ValueError, match="datasets:.*cannot be read: ValueError: Bad split: valid"):
        list(read_documents(f"datasets:{tmp_path}::valid"))
    with pytest.raises(ValueError, match=r"datasets:a:b:c:d: is not of the form"):
        read_documents("datasets:a:b:c:d")
    before = input_sha256(f"datasets:{tmp_path}"), input_state(f"datasets:{tmp_path}")
    (tmp_path / "test.jsonl").write_bytes(GOOD + b" ")
    assert input_sha256(f"datasets:{tmp_path}") != before[0]
    assert input_state(f"datasets:{tmp_path}") != before[1]


def test_network_failure_is_not_damage(monkeypatch):
    import huggingface_hub

    def fail(*names, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "dataset_info", fail)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match="^datasets:owner/name: no folder owner/name, and"):
        find_inputs(["datasets:owner/name"])
    with pytest.raises(ValueError, match="cannot be read: ConnectionError: no network"):
        list(read_documents("datasets:owner/name@1234", damages=[]))


def test_content_shares_are_uniform_stable_and_independent():
    texts = make_texts(4000, 20)
    valid = np.array([content_share(text.encode(), "valid") for text in texts])
    held_out = np.array([content_share(text.encode(), "held-out") for text in texts])
    assert valid.min() >= 0
    assert valid.max() < 1
    for share in (0.1, 0.5):
        assert abs((valid < share).mean() - share) < 0.03
        both = ((valid < share) & (held_out < share)).mean()
        assert abs(both - share**2) < 0.03
    assert content_share(b"a text", "valid") == 0.6197381313153875  # a change moves every split

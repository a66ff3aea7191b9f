import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.indexed import (
    IndexedReader,
    IndexedWriter,
    dtype_for,
    import_megatron,
)


@pytest.fixture
def documents() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 60_000, size=n) for n in (1, 5, 1000, 3, 0, 77, 2)]


def write(prefix: Path, documents: list[np.ndarray], dtype: type = np.uint16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.append(ids)
    return prefix


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_bytes_are_those_of_megatrons_builder(
    tmp_path: Path, documents: list[np.ndarray], dtype: type, count: int
) -> None:
    builder = import_megatron().IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype)
    for ids in documents[:count]:
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    write(tmp_path / "ours", documents[:count], dtype)
    for suffix in (".bin", ".idx"):
        ours, theirs = tmp_path / f"ours{suffix}", tmp_path / f"theirs{suffix}"
        assert ours.read_bytes() == theirs.read_bytes()


def test_extend_gives_the_same_bytes_as_append(tmp_path: Path, documents: list[np.ndarray]) -> None:
    write(tmp_path / "one", documents)
    with IndexedWriter(tmp_path / "many", np.uint16) as writer:
        for some in (documents[:3], [], documents[3:]):
            ids = np.concatenate([np.empty(0, dtype=np.int64), *some])
            writer.extend(ids, [len(document) for document in some])
        assert writer.documents == len(documents)
    for suffix in (".bin", ".idx"):
        one, many = tmp_path / f"one{suffix}", tmp_path / f"many{suffix}"
        assert one.read_bytes() == many.read_bytes()


def test_extend_names_the_document_of_an_invalid_id_and_writes_nothing(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data", np.uint16, 100) as writer:
        writer.append(np.arange(5)[::2])
        with pytest.raises(ValueError, match="data: document 3 has id 100; accepted: 0 to 99"):
            writer.extend(np.array([1, 2, 3, 100, 5]), [2, 0, 3])
        writer.append(np.array([7]))
    assert IndexedReader(tmp_path / "data").ids.tolist() == [0, 2, 4, 7]


def test_index_does_not_depend_on_the_window_size(
    tmp_path: Path, documents: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "one", documents)
    monkeypatch.setattr("data_prep.indexed._WINDOW", 2)
    write(tmp_path / "many", documents)
    assert (tmp_path / "one.idx").read_bytes() == (tmp_path / "many.idx").read_bytes()


def test_dtype_follows_megatrons_rule() -> None:
    for vocab_size in (1, 50_265, 65_499, 65_500, 65_536, 65_537, 200_000):
        assert dtype_for(vocab_size) == np.dtype(import_megatron().DType.optimal_dtype(vocab_size))


def test_written_content_is_read_back_by_megatron_too(
    tmp_path: Path, documents: list[np.ndarray]
) -> None:
    prefix = write(tmp_path / "data", documents)
    reader, theirs = IndexedReader(prefix), import_megatron().IndexedDataset(str(prefix))
    assert len(theirs) == len(documents)
    for number, ids in enumerate(documents):
        assert reader[number].tolist() == theirs[number].tolist() == ids.tolist()
    assert reader.lengths.tolist() == [len(ids) for ids in documents]
    assert reader.bounds.tolist() == theirs.document_indices.tolist()
    assert np.array_equal(reader.ids, np.concatenate(documents))


def test_arrays_outlive_their_reader_and_cannot_be_changed(
    tmp_path: Path, documents: list[np.ndarray]
) -> None:
    ids = IndexedReader(write(tmp_path / "data", documents))[2]
    gc.collect()
    assert ids.tolist() == documents[2].tolist()
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_empty_dataset_opens(tmp_path: Path) -> None:
    reader = IndexedReader(write(tmp_path / "data", []))
    assert (len(reader.lengths), len(reader.ids), reader.bounds.tolist()) == (0, 0, [0])


@pytest.mark.parametrize(
    ("bad", "vocab_size"), [([0, 65_536], None), ([-1], None), ([4, 100], 100)]
)
def test_ids_that_would_wrap_are_refused(
    tmp_path: Path, bad: list[int], vocab_size: int | None
) -> None:
    writer = IndexedWriter(tmp_path / "data", np.uint16, vocab_size)
    with pytest.raises(ValueError, match=r"data: document 0 has id .* accepted: 0 to"):
        writer.append(np.array(bad))
    writer.discard()


def test_no_file_appears_before_close_or_after_an_error(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "data", np.uint16)
    writer.append(np.arange(5))
    assert not (tmp_path / "data.bin").exists()
    writer.discard()
    with pytest.raises(ValueError, match="document 1 has id -1"):
        write(tmp_path / "data", [np.arange(5), np.array([-1])])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"X", "not a Megatron index"),
        (9, b"\x02", "version 2"),
        (17, b"\x63", "id type 99"),
        (18, b"\x09", "its header"),
    ],
)
def test_damaged_header_is_refused(
    tmp_path: Path, documents: list[np.ndarray], position: int, value: bytes, message: str
) -> None:
    prefix = write(tmp_path / "data", documents)
    index = tmp_path / "data.idx"
    content = bytearray(index.read_bytes())
    content[position : position + 1] = value
    index.write_bytes(content)
    with pytest.raises(ValueError, match=rf"data\.idx: .*{message}"):
        IndexedReader(prefix)


def test_missing_and_short_files_are_refused(tmp_path: Path, documents: list[np.ndarray]) -> None:
    prefix, data, index = tmp_path / "data", tmp_path / "data.bin", tmp_path / "data.idx"
    with pytest.raises(ValueError, match=r"data\.idx: no such file"):
        IndexedReader(prefix)
    write(prefix, documents)
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(ValueError, match="its header"):
        IndexedReader(prefix)
    write(prefix, documents)
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"data\.bin: \d+ bytes"):
        IndexedReader(prefix)
    data.unlink()
    with pytest.raises(ValueError, match=r"data\.bin: no such file"):
        IndexedReader(prefix)


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("lengths", 3, -3, "sequence 3 has the length -3"),
        ("lengths", 3, 2**31 - 1, "sequence 4 has the offset 2018"),
        ("lengths", 6, 2**31 - 1, r"2176 bytes, but its index says"),
        ("offsets", 4, -8, "sequence 4 has the offset -8"),
        ("offsets", 1, 2**62, f"sequence 1 has the offset {2**62}"),
        ("bounds", 7, 6, "ascend from 0 to 7"),
        ("bounds", 3, 2, "ascend from 0 to 7"),
        ("bounds", 3, -1, "ascend from 0 to 7"),
    ],
)
def test_a_damaged_index_is_refused_with_file_and_place(
    tmp_path: Path,
    documents: list[np.ndarray],
    column: str,
    row: int,
    value: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("data_prep.indexed._WINDOW", 2)
    prefix, count = write(tmp_path / "data", documents), len(documents)
    start, dtype = {
        "lengths": (34, "<i4"),
        "offsets": (34 + 4 * count, "<i8"),
        "bounds": (34 + 12 * count, "<i8"),
    }[column]
    content = bytearray((tmp_path / "data.idx").read_bytes())
    bad = np.array(value, dtype).tobytes()
    content[start + row * len(bad) : start + (row + 1) * len(bad)] = bad
    (tmp_path / "data.idx").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/data\..*{message}"):
        IndexedReader(prefix)


def test_opening_imports_nothing_heavy(tmp_path: Path, documents: list[np.ndarray]) -> None:
    prefix = write(tmp_path / "data", documents)
    program = (
        "import pathlib, sys; from data_prep.indexed import IndexedReader\n"
        f"IndexedReader(pathlib.Path({str(prefix)!r}))\n"
        "assert not {'torch', 'megatron'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

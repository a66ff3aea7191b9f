import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.indexed import (
    IndexedWriter,
    check_indexed,
    dtype_for,
    import_megatron,
    open_indexed,
    read_ids,
    read_lengths,
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
    assert read_ids(tmp_path / "data").tolist() == [0, 2, 4, 7]


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


def test_written_content_is_read_back(tmp_path: Path, documents: list[np.ndarray]) -> None:
    prefix = write(tmp_path / "data", documents)
    dataset = open_indexed(prefix)
    assert len(dataset) == len(documents)
    assert all(np.array_equal(dataset[i], ids) for i, ids in enumerate(documents))
    assert read_lengths(prefix).tolist() == [len(ids) for ids in documents]
    assert np.array_equal(read_ids(prefix), np.concatenate(documents))
    check_indexed(prefix)


def test_empty_dataset_opens(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [])
    assert len(open_indexed(prefix)) == len(read_lengths(prefix)) == len(read_ids(prefix)) == 0
    check_indexed(prefix)


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
    for reader in (read_lengths, read_ids, open_indexed, check_indexed):
        with pytest.raises(ValueError, match=rf"data\.idx: .*{message}"):
            reader(prefix)


def test_missing_and_short_files_are_refused(tmp_path: Path, documents: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"data\.idx: no such file"):
        read_lengths(tmp_path / "data")
    prefix = write(tmp_path / "data", documents)
    index = tmp_path / "data.idx"
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(ValueError, match="its header"):
        read_lengths(prefix)
    (tmp_path / "data.bin").unlink()
    with pytest.raises(ValueError, match="its header"):
        open_indexed(prefix)
    write(prefix, documents)
    (tmp_path / "data.bin").unlink()
    with pytest.raises(ValueError, match=r"data\.bin: no such file"):
        open_indexed(prefix)


def test_check_finds_inconsistent_index_and_data(
    tmp_path: Path, documents: list[np.ndarray]
) -> None:
    prefix = write(tmp_path / "data", documents)
    data, index = tmp_path / "data.bin", tmp_path / "data.idx"
    whole_data, whole_index = data.read_bytes(), bytearray(index.read_bytes())
    data.write_bytes(whole_data[:-2])
    with pytest.raises(ValueError, match=r"data\.bin: \d+ bytes"):
        check_indexed(prefix)
    data.write_bytes(whole_data)
    whole_index[34 + 4 * len(documents) + 8] ^= 1  # the second offset
    index.write_bytes(whole_index)
    with pytest.raises(ValueError, match="offsets"):
        check_indexed(prefix)
    whole_index[34 + 4 * len(documents) + 8] ^= 1
    whole_index[-1] ^= 1  # the end of the last document
    index.write_bytes(whole_index)
    with pytest.raises(ValueError, match="document bounds"):
        check_indexed(prefix)


def test_opening_is_silent(tmp_path: Path, documents: list[np.ndarray]) -> None:
    prefix = write(tmp_path / "data", documents)
    program = (
        "import pathlib; from data_prep.indexed import open_indexed\n"
        f"open_indexed(pathlib.Path({str(prefix)!r}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

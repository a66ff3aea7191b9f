import gc

import numpy as np
import pytest

from data_prep.indexed import IndexedReader, IndexedWriter, dtype_for, import_megatron
from tests.data_prep.conftest import write_indexed


@pytest.fixture
def documents():
    generator = np.random.default_rng(0)
    return [generator.integers(0, 60_000, size=n) for n in (1, 5, 1000, 3, 0, 77, 2)]


@pytest.mark.parametrize("vocab_size", [65_000, 200_000])
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("window", [2, 1 << 20])
def test_bytes_are_those_of_megatrons_builder(
    tmp_path, documents, vocab_size, count, window, monkeypatch
):
    """The documents, each of two sequences, are written one after another, and all at once."""
    monkeypatch.setattr("data_prep.indexed._WINDOW", window)
    dtype = import_megatron().DType.optimal_dtype(vocab_size)
    builder = import_megatron().IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype)
    one, many = (IndexedWriter(tmp_path / name, vocab_size) for name in ("one", "many"))
    lengths = [[len(ids) // 3, len(ids) - len(ids) // 3] for ids in documents[:count]]
    for ids, of_sequences in zip(documents, lengths, strict=False):
        builder.add_document(ids, of_sequences)
        one.append([ids], of_sequences)
        assert one.flush().tolist() == ids.tolist()
        many.append([ids[:1], ids[1:]], of_sequences)
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert len(one.lengths) == len(many.lengths) == 2 * count
    for writer in (one, many):
        writer.close()
    for suffix in (".bin", ".idx"):
        theirs = (tmp_path / f"theirs{suffix}").read_bytes()
        assert (tmp_path / f"one{suffix}").read_bytes() == theirs
        assert (tmp_path / f"many{suffix}").read_bytes() == theirs


def test_dtype_follows_megatrons_rule():
    for vocab_size in (1, 50_265, 65_499, 65_500, 65_536, 65_537, 200_000):
        assert dtype_for(vocab_size) == np.dtype(import_megatron().DType.optimal_dtype(vocab_size))


def test_written_content_is_read_back_by_megatron_too(tmp_path, documents):
    prefix = write_indexed(tmp_path / "data", documents)
    reader, theirs = IndexedReader(prefix), import_megatron().IndexedDataset(str(prefix))
    assert len(theirs) == len(documents)
    for number, ids in enumerate(documents):
        assert reader[number].tolist() == theirs[number].tolist() == ids.tolist()
    assert reader.lengths.tolist() == [len(ids) for ids in documents]
    assert reader.bounds.tolist() == theirs.document_indices.tolist()
    assert np.array_equal(reader.ids, np.concatenate(documents))


def test_arrays_outlive_their_reader_and_cannot_be_changed(tmp_path, documents):
    ids = IndexedReader(write_indexed(tmp_path / "data", documents))[2]
    gc.collect()
    assert ids.tolist() == documents[2].tolist()
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_empty_dataset_opens(tmp_path):
    reader = IndexedReader(write_indexed(tmp_path / "data", []))
    assert (len(reader.lengths), len(reader.ids), reader.bounds.tolist()) == (0, 0, [0])


@pytest.mark.parametrize("bad", [[0, 65_000], [-1], [4, 2**40]])
def test_ids_that_would_wrap_are_refused_and_no_file_appears(tmp_path, bad):
    with pytest.raises(ValueError, match=r"data: ids from .* in a vocabulary of 65000"):
        write_indexed(tmp_path / "data", [[1, 2], bad])
    assert list(tmp_path.iterdir()) == []


def test_missing_and_short_files_are_refused(tmp_path, documents):
    prefix, data, index = tmp_path / "data", tmp_path / "data.bin", tmp_path / "data.idx"
    with pytest.raises(ValueError, match=r"data\.idx: no such file"):
        IndexedReader(prefix)
    write_indexed(prefix, documents)
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(ValueError, match="its header"):
        IndexedReader(prefix)
    write_indexed(prefix, documents)
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"data\.bin: \d+ bytes"):
        IndexedReader(prefix)
    data.unlink()
    with pytest.raises(ValueError, match=r"data\.bin: no such file"):
        IndexedReader(prefix)


def entry(column, row, value):
    """The place of a number in the index of seven documents, and its bytes."""
    start, dtype = {"length": (34, "<i4"), "offset": (62, "<i8"), "bound": (118, "<i8")}[column]
    written = np.array(value, dtype).tobytes()
    return start + row * len(written), written


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"X", r"\.idx: not a Megatron index"),
        (9, b"\x02", r"\.idx: version 2"),
        (17, b"\x63", "id type 99"),
        (18, b"\x09", "its header"),
        (*entry("length", 3, -3), "sequence 3 has the length -3"),
        (*entry("length", 3, 2**31 - 1), "sequence 4 has the offset 2018"),
        (*entry("length", 6, 2**31 - 1), r"2176 bytes, but its index says"),
        (*entry("offset", 4, -8), "sequence 4 has the offset -8"),
        (*entry("offset", 1, 2**62), f"sequence 1 has the offset {2**62}"),
        (*entry("bound", 7, 6), "ascend from 0 to 7"),
        (*entry("bound", 3, 2), "ascend from 0 to 7"),
        (*entry("bound", 3, -1), "ascend from 0 to 7"),
    ],
)
def test_a_damaged_index_is_refused_with_file_and_place(
    tmp_path, documents, place, value, message, monkeypatch
):
    monkeypatch.setattr("data_prep.indexed._WINDOW", 2)
    prefix = write_indexed(tmp_path / "data", documents)
    content = bytearray((tmp_path / "data.idx").read_bytes())
    content[place : place + len(value)] = value
    (tmp_path / "data.idx").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/data.*{message}"):
        IndexedReader(prefix)

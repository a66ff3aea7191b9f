import itertools
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.corpus import Corpus
from data_prep.manifest import FILE_NAME, Settings, write_record
from data_prep.run import prepare
from data_prep.sentences import sentences
from data_prep.verify import verify
from tests.data_prep.conftest import make_texts, write_pile


@pytest.fixture(scope="module")
def folder(inputs, tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    prepare(inputs, folder, tokenizer_folder, Settings(valid_fraction=0.0))
    return folder


def test_documents_come_in_the_order_of_the_inputs(folder, tokenizer):
    corpus = Corpus(folder, "train")
    texts = [text for seed in range(3) for text in make_texts(120, 60, seed=seed)]
    expected = [[*ids.tolist(), 2] for ids in tokenizer.encode_batch(texts)]
    assert len(corpus) == len(expected)
    assert [corpus.document(i).tolist() for i in range(len(corpus))] == expected
    assert corpus.lengths.tolist() == [len(ids) for ids in expected]
    assert corpus.lengths.dtype == np.int32
    assert corpus.subsets.dtype == np.uint8
    names = [corpus.manifest.subsets[number] for number in corpus.subsets]
    assert names == ["Books3"] * 120 + ["Pile-CC"] * 240


SENTENCES = [
    *["One sentence. Another one!\n\nA third? And more", "only one", "A. B. It is. Yes it is."] * 5,
    "x " * 80 + ". Y " + "z " * 60,
]


@pytest.mark.parametrize("long", ["drop", "truncate", "split"])
def test_sentences_are_the_sequences_and_documents_stay_the_same(tokenizer_folder, tmp_path, long):
    (tmp_path / "b.txt").write_text("a. B\n\n c. D\n\n")
    inputs = [write_pile(tmp_path / "a.jsonl.zst", SENTENCES), f"lines:{tmp_path}/b.txt"]
    settings = Settings(max_tokens=64, long=long, valid_fraction=0.0)
    prepare(inputs, tmp_path / "whole", tokenizer_folder, settings)
    prepare(inputs, tmp_path / "cut", tokenizer_folder, replace(settings, unit="sentence"))
    whole, cut = Corpus(tmp_path / "whole", "train"), Corpus(tmp_path / "cut", "train")
    for name in ("shard-00000.bin", "shard-00001.bin", "shard-00000.subsets"):
        file = Path("train") / name
        assert (cut.folder / file).read_bytes() == (whole.folder / file).read_bytes()
    assert len(cut) == len(whole)
    assert cut.lengths.tolist() == whole.lengths.tolist()
    for index in range(len(cut)):
        document = cut.document(index).tolist()
        assert document == whole.document(index).tolist()
        pieces = [ids.tolist() for ids in cut.sentences(index)]
        assert [*itertools.chain(*pieces), 2] == document
        assert all(pieces)
        assert [ids.tolist() for ids in cut.sentences(index, 1, 3)] == pieces[1:3]
    lengths, bounds = cut.sentence_lengths()
    for index in range(len(cut)):
        expected = [len(ids) for ids in cut.sentences(index)] or [0]
        assert lengths[bounds[index] : bounds[index + 1]].tolist() == expected
    assert (len(bounds), bounds[-1]) == (len(cut) + 1, len(lengths))
    counts = [len(cut.sentences(index)) for index in range(15)]
    assert counts == [len(sentences(text)) for text in SENTENCES[:15]]
    assert list(verify(cut.folder)) == []


def test_sentences_of_a_corpus_of_documents_are_refused(folder):
    with pytest.raises(ValueError, match="its sequences are documents"):
        Corpus(folder, "train").sentences(0)
    with pytest.raises(ValueError, match="its sequences are documents"):
        Corpus(folder, "train").sentence_lengths()


def test_index_out_of_range_is_refused(folder):
    corpus = Corpus(folder, "train")
    for index in (-1, 360):
        with pytest.raises(IndexError, match=f"document {index} of .* which has 360"):
            corpus.document(index)


def test_a_pickled_corpus_is_small_and_has_the_same_documents(folder):
    corpus = Corpus(folder, "train")
    fresh = pickle.dumps(corpus)
    last = corpus.document(359).tolist()
    assert len(corpus.lengths) == len(corpus.subsets) == 360
    packed = pickle.dumps(corpus)
    assert len(packed) < len(fresh) + 100 < 10_000
    assert pickle.loads(packed).document(359).tolist() == last


@pytest.mark.usefixtures("few_files")
def test_a_corpus_of_more_shards_than_files_may_be_open_is_read(copy, manifest):
    files = manifest.shards["train"][0]
    shards = [replace(files, stem=f"train/shard-{1000 + number}") for number in range(260)]
    for shard in shards:
        for file, link in zip(files.hashes, shard.hashes, strict=True):
            os.link(copy / file, copy / link)
    write_record(copy / FILE_NAME, replace(manifest, shards={**manifest.shards, "train": shards}))
    corpus = Corpus(copy, "train")
    assert corpus.lengths.tolist() == corpus.lengths[: files.documents].tolist() * 260
    last = corpus.document(len(corpus) - 1)
    assert last.tolist() == corpus.document(files.documents - 1).tolist()


def test_an_empty_split_is_refused(folder):
    with pytest.raises(ValueError, match="the valid split is empty.*train has 360 documents"):
        Corpus(folder, "valid")


def test_a_missing_file_of_subsets_is_named(copy):
    """One that contradicts the manifest: test_verify."""
    (copy / "train" / "shard-00000.subsets").unlink()
    with pytest.raises(ValueError, match=r"shard-00000\.subsets: no such file"):
        _ = Corpus(copy, "train").subsets


@pytest.mark.parametrize("unit", ["document", "sentence"])
def test_ids_beyond_the_vocabulary_are_refused_when_they_are_read(tokenizer_folder, tmp_path, unit):
    file = write_pile(tmp_path / "a.jsonl.zst", make_texts(20, 20))
    settings = Settings(valid_fraction=0.0, unit=unit)
    manifest = prepare([file], tmp_path / "corpus", tokenizer_folder, settings)
    data = tmp_path / "corpus" / "train" / "shard-00000.bin"
    ids = np.fromfile(data, dtype=np.uint16)
    ids[Corpus(tmp_path / "corpus", "train").lengths[:7].sum()] = manifest.vocab_size
    ids.tofile(data)
    corpus = Corpus(tmp_path / "corpus", "train")
    corpus.document(6)
    message = f"{data}: document 7 has id 320; accepted: 0 to 319"
    with pytest.raises(ValueError, match=message):
        corpus.document(7)
    if unit == "sentence":
        with pytest.raises(ValueError, match=message):
            corpus.sentences(7)

"""What is written opens in megatron-core as a user of it would open it, and merges as its own."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_prep.corpus import Corpus
from data_prep.indexed import import_megatron
from data_prep.manifest import Settings
from data_prep.run import prepare
from tests.data_prep.conftest import SENTENCE, write_pile

LENGTH = 32
VOCAB_SIZE = 320


@pytest.fixture(autouse=True)
def megatrons_warnings_are_its_own() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def folder(
    inputs: list[Path], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / "corpus"
    prepare(inputs, folder, tokenizer_folder, Settings(valid_fraction=0.2))
    return folder


def prefixes(folder: Path, split: str) -> list[str]:
    return sorted(str(file.with_suffix("")) for file in (folder / split).glob("*.bin"))


def config_of(kind: type[Any], folder: Path, **options: object) -> Any:
    """A configuration of three blends, one for each of Megatron's splits; no test split."""
    tokenizer = SimpleNamespace(
        vocab_size=VOCAB_SIZE, eod=2, pad=1, cls=0, sep=2, mask=VOCAB_SIZE - 1,
        inv_vocab={id: str(id) for id in range(VOCAB_SIZE)},
        unique_identifiers={"class": "stand-in"},
    )  # fmt: skip
    return kind(
        random_seed=7,
        sequence_length=LENGTH,
        blend_per_split=[(prefixes(folder, split), None) for split in ("train", "valid")] + [None],
        tokenizer=tokenizer,
        path_to_cache=str(folder.parent / f"cache-{kind.__name__}"),
        mid_level_dataset_surplus=0.0,
        **options,
    )


def build(kind: type[Any], config: Any) -> tuple[Any, Any]:
    """One epoch of training and of validation data."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    sizes = [None, None, None]
    train, valid, test = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    assert test is None
    return train, valid


def test_all_documents_are_read_in_order(folder: Path) -> None:
    corpus = Corpus(folder, "train")
    number = 0
    for prefix in prefixes(folder, "train"):
        dataset = import_megatron().IndexedDataset(prefix)
        for index in range(len(dataset)):
            assert np.array_equal(dataset[index], corpus.document(number))
            number += 1
    assert number == len(corpus)


def test_merging_by_megatron_s_builder_gives_our_shards_one_after_another(
    folder: Path, tmp_path: Path
) -> None:
    """The two calls that Megatron-LM's merge_datasets.py makes."""
    megatron = import_megatron()
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "merged.bin"), dtype=np.uint16)
    for prefix in prefixes(folder, "train"):
        builder.add_index(prefix)
    builder.finalize(str(tmp_path / "merged.idx"))
    merged = megatron.IndexedDataset(str(tmp_path / "merged"))
    corpus = Corpus(folder, "train")
    assert len(merged) == len(merged.document_indices) - 1 == len(corpus)
    assert merged.sequence_lengths.tolist() == corpus.lengths.tolist()
    assert all(np.array_equal(merged[i], corpus.document(i)) for i in range(len(corpus)))


def test_gpt_dataset_is_our_documents_end_to_end(folder: Path) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    options = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    train, valid = build(GPTDataset, config_of(GPTDatasetConfig, folder, **options))
    for blended, split in ((train, "train"), (valid, "valid")):
        corpus = Corpus(folder, split)
        first = 0
        for part in blended.datasets:
            documents = [corpus.document(first + int(i)) for i in part.document_index]
            first += len(part.document_index)
            expected = np.concatenate(documents)
            found = np.empty(len(part) * LENGTH, dtype=np.int64)
            for index, position in enumerate(part.shuffle_index):
                sample = part[index]
                start = int(position) * LENGTH
                found[start : start + LENGTH] = sample["tokens"]
                whole = expected[start + 1 : start + LENGTH + 1]
                assert np.array_equal(sample["labels"][: len(whole)], whole)
            length = min(len(found), len(expected))
            assert length > len(expected) - LENGTH
            assert np.array_equal(found[:length], expected[:length])
        assert first == len(corpus)


def test_bert_dataset_pairs_sentences_of_one_document(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )

    words = SENTENCE.split()
    texts = [
        " ".join(f"{words[i % 30].title()} {words[(i + n) % 30]}." for i in range(n, n + 6))
        for n in range(60)
    ]
    write_pile(tmp_path / "a.jsonl.zst", texts)
    folder = tmp_path / "corpus"
    settings = Settings(valid_fraction=0.2, unit="sentence")
    prepare([tmp_path / "a.jsonl.zst"], folder, tokenizer_folder, settings)
    config = config_of(
        BERTMaskedWordPieceDatasetConfig,
        folder,
        masking_probability=0.15,
        short_sequence_probability=0.1,
        masking_max_ngram=1,
        masking_do_full_word=False,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=True,
    )
    train, _ = build(BERTMaskedWordPieceDataset, config)
    corpus = Corpus(folder, "train")
    documents = {tuple(corpus.document(i).tolist()) for i in range(len(corpus))}
    assert len(train) > len(documents)
    for sample in (train[index] for index in range(len(train))):
        text = np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])
        ids = text[sample["padding_mask"] == 1].tolist()
        assert ids[0] == 0
        assert ids[-1] == 2
        # Two runs of whole sentences, each found in a document as it stands.
        kinds = sample["types"][sample["padding_mask"] == 1]
        assert set(kinds.tolist()) == {0, 1}
    assert documents

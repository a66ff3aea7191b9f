"""megatron-core opens and merges our files in the way that its users do."""

import warnings
from itertools import combinations
from types import SimpleNamespace

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
def megatrons_warnings_are_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def folder(corpus_and_manifest):
    return corpus_and_manifest[0]


def prefixes(folder, split):
    return sorted(str(file.with_suffix("")) for file in (folder / split).glob("*.bin"))


def config_of(kind, folder, **options):
    """Return a configuration with a blend for each of Megatron's splits and an empty test split."""
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


def build(kind, config, samples=None):
    """Build datasets with this number of samples per split, by default one epoch."""
    import torch.distributed
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    torch.distributed.init_process_group("gloo")  # the builders ask for their rank
    sizes = [samples, samples, None]
    train, valid, test = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()
    assert test is None
    return train, valid


def test_all_documents_are_read_in_order(folder):
    corpus = Corpus(folder, "train")
    number = 0
    for prefix in prefixes(folder, "train"):
        dataset = import_megatron().IndexedDataset(prefix)
        for index in range(len(dataset)):
            assert np.array_equal(dataset[index], corpus.document(number))
            number += 1
    assert number == len(corpus)


def test_megatrons_builder_merges_our_shards(folder, tmp_path):
    """Make the two calls of Megatron-LM's merge_datasets.py."""
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


def test_gpt_dataset_has_the_concatenated_documents(folder, run_ranks):
    [lengths] = run_ranks(1, gpt_streams, folder)
    for split, length in lengths.items():
        tokens = int(Corpus(folder, split).lengths.sum())
        shards = len(prefixes(folder, split))
        assert tokens - shards * LENGTH < length <= tokens


def gpt_streams(folder):
    """Return tokens of one epoch by split, after comparing them with the documents."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    options = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    blends = build(GPTDataset, config_of(GPTDatasetConfig, folder, **options))
    lengths = {}
    for split, blended in zip(("train", "valid"), blends, strict=True):
        corpus = Corpus(folder, split)
        first = lengths[split] = 0
        for part in blended.datasets:
            # Megatron shuffles documents, concatenates and cuts them, and shuffles the pieces.
            stream = np.concatenate([corpus.document(first + int(i)) for i in part.document_index])
            first += len(part.document_index)
            for index, position in enumerate(part.shuffle_index):
                sample, start = part[index], int(position) * LENGTH
                whole = stream[start : start + LENGTH + 1]
                assert np.array_equal(sample["tokens"][: len(whole) - 1], whole[:-1])
                assert np.array_equal(sample["labels"][: len(whole) - 1], whole[1:])
                lengths[split] += len(whole) - 1
        assert first == len(corpus)
    return lengths


def test_bert_dataset_pairs_sentences_of_one_document(tokenizer_folder, tmp_path, run_ranks):
    words = SENTENCE.split()
    texts = [
        " ".join(f"{words[i % 30].title()} {words[(i + n) % 30]}." for i in range(n, n + 6))
        for n in range(60)
    ]
    write_pile(tmp_path / "a.jsonl.zst", texts)
    folder = tmp_path / "corpus"
    settings = Settings(valid_fraction=0.2, unit="sentence")
    prepare([tmp_path / "a.jsonl.zst"], folder, tokenizer_folder, settings)
    corpus = Corpus(folder, "train")
    homes: dict[tuple[int, ...], set[int]] = {}  # of each run of whole sentences
    for document in range(len(corpus)):
        sentences = corpus.sentences(document)
        for first, last in combinations(range(len(sentences) + 1), 2):
            run = tuple(np.concatenate(sentences[first:last]).tolist())
            homes.setdefault(run, set()).add(document)
    [pairs] = run_ranks(1, bert_pairs, folder)
    # Megatron cuts longer ones to fit with its three special ids; `</s>` is not counted.
    whole = [pair for pair in pairs if sum(map(len, pair)) < LENGTH - 4]
    assert len(pairs) >= 100
    assert whole
    assert all(homes[tuple(first)] & homes[tuple(second)] for first, second in whole)


def bert_pairs(folder):
    """Return the two segments of ids of each training sample before masking."""
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )

    config = config_of(
        BERTMaskedWordPieceDatasetConfig,
        folder,
        masking_probability=0.15,
        short_sequence_probability=0.0,
        masking_max_ngram=1,
        masking_do_full_word=False,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=True,
    )
    train, _ = build(BERTMaskedWordPieceDataset, config, samples=100)
    pairs = []
    for sample in (train[index] for index in range(len(train))):
        text = np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])
        is_text = (sample["padding_mask"] == 1) & ~np.isin(text, [0, 2])
        pairs.append([text[is_text & (sample["types"] == kind)].tolist() for kind in (0, 1)])
    return pairs

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.indexed import IndexedReader
from data_prep.manifest import CorpusManifest, Count, Settings, ShardManifest, read_record
from data_prep.merge import merge
from data_prep.run import prepare
from data_prep.tokenizer import Tokenizer

Made = tuple[Path, CorpusManifest, list[ShardManifest]]


@pytest.fixture(scope="module")
def made(
    inputs: list[Path], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Made:
    """Return a corpus folder, its manifest, and those of its shards."""
    folder = tmp_path_factory.mktemp("merge") / "corpus"
    settings = Settings(max_tokens=64, valid_fraction=0.2)
    manifest = prepare(inputs, folder, tokenizer_folder, settings)
    files = sorted(folder.glob("shards/*.json"))
    return folder, manifest, [read_record(ShardManifest, file) for file in files]


def test_totals_match_the_files(made: Made) -> None:
    folder, manifest, _ = made
    for split, files in manifest.shards.items():
        ids = np.concatenate([IndexedReader(folder / file.stem).ids for file in files])
        assert manifest.totals[split].tokens == len(ids)
        assert manifest.totals[split].documents == (ids == Tokenizer.eos_id).sum()
    rejected = sum(rejects.count for rejects in manifest.rejects.values())
    kept = sum(total.documents for total in manifest.totals.values())
    assert sum(manifest.length_histogram.counts) == kept + rejected == 360


def test_totals_do_not_depend_on_the_order_of_the_shards(made: Made, tokenizer: Tokenizer) -> None:
    folder, manifest, shards = made
    turned = merge(shards[::-1], tokenizer, folder)
    assert merge(shards, tokenizer, folder) == manifest
    assert turned.totals == manifest.totals
    assert turned.subsets == manifest.subsets
    assert turned.length_histogram == manifest.length_histogram
    assert turned.unigram_perplexity == manifest.unigram_perplexity


def test_shards_without_documents_or_with_too_many_subsets_are_refused(
    made: Made, tokenizer: Tokenizer
) -> None:
    folder, _, shards = made
    empty = replace(shards[0], kept={}, rejects={}, files={})
    with pytest.raises(ValueError, match="no document kept: the inputs have no lines"):
        merge([empty], tokenizer, folder)
    many = {"train": {str(number): Count(1, 2, 3) for number in range(257)}}
    with pytest.raises(ValueError, match="257 different values of meta.pile_set_name"):
        merge([replace(shards[0], kept=many)], tokenizer, folder)

from dataclasses import replace

import pytest

from data_prep.manifest import Count, ShardManifest, read_record
from data_prep.merge import merge


@pytest.fixture
def shards(corpus_and_manifest):
    files = sorted(corpus_and_manifest[0].glob("shards/*.json"))
    return [read_record(ShardManifest, file) for file in files]


def test_totals_do_not_depend_on_the_order_of_the_shards(corpus_and_manifest, shards, tokenizer):
    folder, manifest = corpus_and_manifest
    turned = merge(shards[::-1], tokenizer, folder)
    assert merge(shards, tokenizer, folder) == manifest
    for name in ("totals", "subsets", "length_histogram", "unigram_perplexity"):
        assert getattr(turned, name) == getattr(manifest, name)


def test_too_many_subsets_are_refused(shards, tokenizer, tmp_path):
    many = {"train": {str(number): Count(1, 2, 3) for number in range(257)}}
    with pytest.raises(ValueError, match="257 different values of meta.pile_set_name"):
        merge([replace(shards[0], kept=many)], tokenizer, tmp_path)

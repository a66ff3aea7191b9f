"""Mixtures that are refused before anything starts."""

import pytest

from pretrain.checks.recipe import check, data_summary


def test_a_mixture_is_checked_and_each_corpus_summarised(mixed):
    config = mixed("a: weight: 2", "b: weight: 1")
    check(config, 2)
    summary = data_summary(config, 2)
    assert [sentence.partition(":")[0] for sentence in summary] == [
        *("a, train", "b, train", "a, valid", "b, valid")
    ]


@pytest.mark.parametrize(
    ("corpora", "message"),
    [
        (["a: weight: 1", "c: weight: 1"],
         "data.corpora.c: .* another vocabulary .*380 ids.* than .*400 ids"),
        (["a: weight: 1", "again: weight: 1"],
         "data.corpora.again: .* is the same corpus as .*; name it once"),
        (["a: weight: 0", "b: weight: 0"], "from step 0 on, the weights are 0.0, 0.0; accepted"),
    ],
)  # fmt: skip
def test_a_mixture_that_cannot_be_read_is_refused(mixed, corpora, message):
    with pytest.raises(ValueError, match=message):
        check(mixed(*corpora), 2)


def test_a_phase_that_reads_no_corpus_is_refused(mixed):
    phases = "phases=[{steps: 9}, {data: {corpora: {a: {weight: 0}}}}]"
    with pytest.raises(ValueError, match="phase 2: .*the weights are 0.0, 0.0"):
        check(mixed("a: weight: 1", "b: weight: 0", words=[phases]), 2)


def test_a_corpus_with_fewer_blocks_than_an_update_reads_of_it_is_refused(mixed):
    big = ["batch.global_batch_size=256"]
    with pytest.raises(ValueError, match="fewer than the 253 of batch.*smaller batch or weight"):
        check(mixed("a: weight: 80", "b: weight: 1", words=big), 2)

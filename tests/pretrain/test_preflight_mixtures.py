"""Mixtures that are refused before anything starts, and what a run's mixture may become."""

import pytest

from pretrain.config.load import RUN_FILE, dump
from pretrain.preflight import check, data_summary, refuse_other_recipe
from pretrain.run import folder as run_folder
from pretrain.run import ledger


@pytest.fixture
def mixed(recipe, corpus, other_corpus, other_vocabulary, tmp_path):
    """`mixed("a: WEIGHTS", "b: WEIGHTS", ...)`: a recipe of corpora of these names."""
    folders = {"a": corpus, "b": other_corpus, "c": other_vocabulary, "again": corpus}

    def load(*corpora, words=()):
        parts = (part.partition(": ") for part in corpora)
        text = ", ".join(f"{name}: {{path: {folders[name]}, {rest}}}" for name, _, rest in parts)
        settings = ['data.corpus=""', f"data.corpora={{{text}}}", *words]
        return recipe.load(tmp_path / "run", *settings)

    return load


def test_a_mixture_is_checked_and_each_corpus_summarised(mixed):
    config = mixed("a: weight: 2", "b: weight: 1")
    _, manifests = check(config, 2)
    assert list(manifests) == ["a", "b"]
    summary = data_summary(config)
    assert [sentence.partition(":")[0] for sentence in summary] == [
        *("a, train", "b, train", "a, valid", "b, valid")
    ]


@pytest.mark.parametrize(
    ("corpora", "message"),
    [
        (["a: weight: 1", "c: weight: 1"], "data.corpora.c: .* another vocabulary .*380 ids.* than "
         "data.corpora.a .*400 ids.*; accepted: .* the same --tokenizer"),
        (["a: weight: 1", "again: weight: 1"], "data.corpora.again: .* is the same corpus as "
         "data.corpora.a; accepted: each corpus once, with the sum of the weights"),
        (["a: weight: 0", "b: weight: 0"], "from step 0 on, the weights are 0, 0; accepted"),
        (["a: weight: 1, weight_from: {9: 0}", "b: weight: 0"], "from step 9 on, the weights"),
        (["a: weight: 1, weight_from: {40: 2}", "b: weight: 1"], "weight_from 40 is not below "
         "training.steps 40: the run would end before the change"),
    ],
)  # fmt: skip
def test_a_mixture_that_cannot_be_read_is_refused(mixed, corpora, message):
    with pytest.raises(ValueError, match=message):
        check(mixed(*corpora), 2)


def test_a_corpus_with_fewer_blocks_than_an_update_reads_of_it_is_refused(mixed):
    big = ["batch.global_batch_size=256"]
    with pytest.raises(ValueError, match="fewer than the 253 blocks of batch.*, or a smaller wei"):
        check(mixed("a: weight: 80", "b: weight: 1", words=big), 2)


@pytest.fixture
def resumed(mixed, tmp_path):
    """Check a recipe against a run on a and b of which 20 steps are done and 22 to 25 skipped."""
    old = mixed("a: weight: 2", "b: weight: 1, weight_from: {10: 3}")
    path = tmp_path / "run" / ledger.FILE_NAME
    path.parent.mkdir()
    run_folder.open_run(old, check(old, 2)[1])
    dump(old, path.parent / RUN_FILE)
    ledger.append(path, "commit", step=20, manifest="")
    ledger.append(path, "rollback", step=20, seed=2, skip=[22, 26], learning_rate_steps=0)
    return lambda config: refuse_other_recipe(config, check(config, 2)[1])


@pytest.mark.parametrize(
    "corpora",
    [
        ["a: weight: 2", "b: weight: 1, weight_from: {10: 3}"],
        ["a: weight: 2, weight_from: {26: 0}", "b: weight: 1, weight_from: {10: 3}"],
        ["a: weight: 4", "b: weight: 2, weight_from: {10: 6}"],  # the same shares
    ],
)
def test_weights_of_steps_to_come_may_change(resumed, mixed, corpora):
    resumed(mixed(*corpora))


@pytest.mark.parametrize(
    ("corpora", "message"),
    [
        (["a: weight: 2, weight_from: {25: 0}", "b: weight: 1, weight_from: {10: 3}"],
         r"weights by step were .*10, \[2.0, 3.0\].*, now .*25, \[0.0, 3.0\].*, but the steps "
         "before 26 are done; accepted: changes from step 26 on"),
        (["a: weight: 2", "b: weight: 1"], "accepted: changes from step 26 on"),
        (["b: weight: 1, weight_from: {10: 3}", "a: weight: 2"], "data.corpora.b digest: .*, now"),
        (["a: weight: 2"], "data.corpora: b is missing; accepted: with the weight 0"),
    ],
)  # fmt: skip
def test_what_was_read_or_skipped_stays(resumed, mixed, corpora, message):
    with pytest.raises(ValueError, match=message):
        resumed(mixed(*corpora))


def test_a_corpus_may_follow_those_of_a_run_of_one(mixed, recipe, corpus, tmp_path):
    old = recipe.load(tmp_path / "run")
    path = tmp_path / "run" / ledger.FILE_NAME
    path.parent.mkdir()
    run_folder.open_run(old, check(old, 2)[1])
    dump(old, path.parent / RUN_FILE)
    ledger.append(path, "commit", step=20, manifest="")
    later = mixed("a: weight: 1", "b: weight: 0, weight_from: {20: 1}")
    refuse_other_recipe(later, check(later, 2)[1])
    sooner = mixed("a: weight: 1", "b: weight: 0, weight_from: {19: 1}")
    with pytest.raises(ValueError, match="accepted: changes from step 20 on"):
        refuse_other_recipe(sooner, check(sooner, 2)[1])

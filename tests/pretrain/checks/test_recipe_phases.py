"""Phases that cannot be trained are refused before a run starts, by name."""

import json

import pytest

from pretrain.checks.recipe import check, data_summary


@pytest.fixture
def phased(recipe, corpus, other_corpus, other_vocabulary, tmp_path):
    """`phased(phase, *overrides)`: a recipe with this second phase; corpora by name."""
    folders = {"b": other_corpus, "c": other_vocabulary}
    moved = tmp_path / "moved"
    moved.symlink_to(corpus)
    folders["moved"] = moved

    def load(phase, *overrides):
        if name := phase.pop("corpus", None):
            phase["data"] = {"corpus": str(folders[name])}
        phases = json.dumps([{"steps": 20}, {"name": "second", **phase}])
        return recipe.load(tmp_path / "run", f"phases={phases}", *overrides)

    return load


def test_each_corpus_is_summarised_in_each_way_it_is_cut(phased):
    config = phased({"data": {"sequence_length": 48}})
    check(config, 2)
    starts = [sentence.split(" blocks")[0].split(":")[0] for sentence in data_summary(config, 2)]
    names = ("made@64", "made@48")
    assert starts == [f"{name}, {split}" for split in ("train", "valid") for name in names]


@pytest.mark.parametrize(
    ("phase", "overrides", "message"),
    [
        ({"corpus": "c"}, (), "phase 2 .second.: .* another vocabulary .*380 ids.*400 ids"),
        ({"corpus": "moved"}, (), "phase 2 .second.: .*moved is the same corpus as .*made"),
        ({"data": {"corpus": "none"}}, (), "phase 2 .second.: data.corpus: none: no"),
        (
            {"data": {"sequence_length": 128}},
            ("model.variant=baseline", "model.overrides.max_positions=64"),
            "phase 2 .second.: data.sequence_length 128 is above the model's max_positions 64",
        ),
        ({"batch": {"global_batch_size": 80}}, (), "phase 2 .second.: .*train split has .. blocks"),
        ({"batch": {"global_batch_size": 2}}, (), "phase 2 .second.: batch.global_batch_size 2"),
        ({"data": {"packing": "sentence-pairs"}}, (), "phase 2 .second.: packing sentence-p"),
    ],
)
def test_a_phase_that_cannot_be_trained_is_refused_by_name(phased, phase, overrides, message):
    with pytest.raises(ValueError, match=message):
        check(phased(phase, *overrides), 2)

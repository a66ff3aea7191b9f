"""What may change in a run that is resumed, and what its checkpoints must agree with."""

import dataclasses
import json

import pytest

from pretrain.checks.recipe import check
from pretrain.checks.resume import _other_recipe, refuse_other_checkpoint, refuse_other_recipe
from pretrain.config.load import RUN_FILE, dump, load
from pretrain.data.sources import SOURCES
from pretrain.records import folder as run_folder
from pretrain.records import ledger


def test_steps_with_the_learning_rate_0_are_not_added_to_a_run():
    linear = ["schedule.name=linear", "schedule.minimum_learning_rate=0"]
    old = load("small", [*linear, "training.steps=200"])
    longer = load("small", [*linear, "training.steps=300", "schedule.decay_steps=200"])
    (refused,) = _other_recipe(old, longer, 200, 200)
    assert refused.startswith("training.steps 300: the learning rate of the last steps would be 0")


def manifest_of(model, step=30, lineage=((0, 1), (20, 2)), **changed):
    """As it was read back from JSON."""
    return {
        "step": step,
        "lineage": [list(segment) for segment in lineage],
        "architecture": {**model.to_dict(), **changed},
    }


def test_a_checkpoint_is_compared_with_the_run_that_resumes_from_it(recipe, corpus, tmp_path):
    model, _ = check(recipe.load(tmp_path), 2)
    before = [[0, 1], [20, 2]]
    refuse_other_checkpoint(manifest_of(model), 30, model, before)
    for manifest, message in [
        (manifest_of(model, step=31), "step: 31, now 30"),
        (manifest_of(model, lineage=[(0, 1)]), r"lineage: .*, now \[\[0, 1\], \[20, 2\]\]"),
        (manifest_of(model, num_layers=7), f"num_layers: 7, now {model.num_layers}"),
        (manifest_of(model, gates="open"), r": missing \[\], unknown \['gates'\]"),
    ]:
        with pytest.raises(ValueError, match=f"checkpoint of step 30.*{message}"):
            refuse_other_checkpoint(manifest, 30, model, before)


def test_a_checkpoint_of_an_earlier_version_is_compared_by_what_its_record_means(
    recipe, corpus, tmp_path
):
    model, _ = check(recipe.load(tmp_path), 2)
    before = [[0, 1], [20, 2]]
    older = manifest_of(model)
    del older["architecture"]["layer_norm_epsilon"]
    refuse_other_checkpoint(older, 30, model, before)
    other = dataclasses.replace(model, layer_norm_epsilon=1e-6)
    with pytest.raises(ValueError, match="layer_norm_epsilon: 1e-05, now 1e-06"):
        refuse_other_checkpoint(older, 30, other, before)


def by_step(*stages):
    """Settings of a run on a and b by (first step, weight of a, weight of b, batch)."""
    phases = []
    for number, (first, a, b, *batch) in enumerate(stages):
        later = stages[number + 1][:1] if number + 1 < len(stages) else ()
        weights = {"a": {"weight": a}, "b": {"weight": b}}
        phase = {"steps": later[0] - first} if later else {}
        phase |= {"data": {"corpora": weights}} | ({"batch": batch[0]} if batch else {})
        phases.append(phase)
    return ["phases=" + json.dumps(phases)]


CHANGED = [(0, 2, 1), (10, 2, 3)]
"""What the run read so far."""


@pytest.fixture
def resumed(mixed, tmp_path):
    """Check a recipe against a run on a and b of which 20 steps are done and 22 to 25 skipped."""
    old = mixed("a: weight: 1", "b: weight: 1", words=by_step(*CHANGED))
    path = tmp_path / "run" / ledger.FILE_NAME
    path.parent.mkdir()
    run_folder.open_run(old, check(old, 2)[1])
    dump(old, path.parent / RUN_FILE)
    ledger.append(path, "commit", step=20, manifest="")
    ledger.append(path, "rollback", step=20, seed=2, skip=[22, 26], learning_rate_steps=0)
    return lambda config: refuse_other_recipe(config, check(config, 2)[1])


@pytest.mark.parametrize(
    "stages",
    [CHANGED, [*CHANGED, (26, 0, 3)], [(0, 4, 2), (10, 4, 6)]],  # the same shares
)
def test_weights_of_steps_to_come_may_change(resumed, mixed, stages):
    resumed(mixed("a: weight: 1", "b: weight: 1", words=by_step(*stages)))


@pytest.mark.parametrize(
    ("corpora", "stages", "message"),
    [
        (["a: weight: 1", "b: weight: 1"], [*CHANGED, (25, 0, 3)],
         r"weights by step were .*10, \[2.0, 3.0\].*, now .*25, \[0.0, 3.0\].*, but the steps "
         r"before 26 are done; change the weights from step 26 on"),
        (["a: weight: 2", "b: weight: 1"], [], "change the weights from step 26 on"),
        (["b: weight: 1", "a: weight: 1"], CHANGED, "data.corpora.b digest: .*, now"),
        (["a: weight: 2"], [], "data.corpora: b is missing"),
    ],
)  # fmt: skip
def test_what_was_read_or_skipped_stays(resumed, mixed, corpora, stages, message):
    with pytest.raises(ValueError, match=message):
        resumed(mixed(*corpora, words=by_step(*stages) if stages else []))


def test_batch_sizes_of_steps_that_were_skipped_stay(resumed, mixed):
    def larger_from(step):
        stages = [*CHANGED, (step, 2, 3, {"global_batch_size": 16})]
        return mixed("a: weight: 1", "b: weight: 1", words=by_step(*stages))

    resumed(larger_from(26))
    for step in (22, 25):
        message = rf"batch sizes of completed or skipped steps changed \(first: step {step}\)"
        with pytest.raises(ValueError, match=message):
            resumed(larger_from(step))


def test_a_corpus_may_follow_those_of_a_run_of_one(mixed, recipe, corpus, tmp_path):
    old = recipe.load(tmp_path / "run")
    path = tmp_path / "run" / ledger.FILE_NAME
    path.parent.mkdir()
    run_folder.open_run(old, check(old, 2)[1])
    dump(old, path.parent / RUN_FILE)
    ledger.append(path, "commit", step=20, manifest="")
    later = mixed("a: weight: 1", "b: weight: 0", words=by_step((0, 1, 0), (20, 1, 1)))
    refuse_other_recipe(later, check(later, 2)[1])
    sooner = mixed("a: weight: 1", "b: weight: 0", words=by_step((0, 1, 0), (19, 1, 1)))
    with pytest.raises(ValueError, match="change the weights from step 20 on"):
        refuse_other_recipe(sooner, check(sooner, 2)[1])


def test_a_run_goes_on_only_with_the_algorithm_that_cut_its_blocks(recipe, tmp_path, monkeypatch):
    config = recipe.load(tmp_path / "run")
    manifests = check(config, 1)[1]
    run_folder.lock(tmp_path / "run").close()
    run_folder.open_run(config, manifests)
    ledger.append(
        tmp_path / "run" / ledger.FILE_NAME, "attempt", attempt=1, step=0, cut=["chunked-1"]
    )
    refuse_other_recipe(config, manifests)
    monkeypatch.setattr(SOURCES["chunked"], "algorithm", 2)
    with pytest.raises(ValueError, match="cut by chunked-1, .* by chunked-2"):
        refuse_other_recipe(config, manifests)


@pytest.mark.parametrize("content", [None, "", '{"number": 0, "kind": "crash"}'])
@pytest.mark.parametrize("left", ["checkpoints/step-00000015", "metrics.jsonl"])
def test_what_a_run_has_saved_is_not_replaced_where_its_ledger_is_lost(
    recipe, tmp_path, content, left
):
    config = recipe.load(tmp_path / "run")
    run_folder.lock(tmp_path / "run").close()
    path = tmp_path / "run" / ledger.FILE_NAME
    if content:
        ledger.append(path, "crash", attempt=1, reason="its launcher ended")
    elif content is not None:
        path.touch()
    refuse_other_recipe(config, check(config, 1)[1])
    if left == "metrics.jsonl":
        (tmp_path / "run" / left).write_text("{}\n")
    else:
        (tmp_path / "run" / left).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{path}: .* {left}.* a backup.* new folder"):
        refuse_other_recipe(config, check(config, 1)[1])

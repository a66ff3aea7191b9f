"""What may change in a run that is resumed, and what its checkpoints must agree with."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import pytest

from pretrain.checks.recipe import check
from pretrain.checks.resume import check_checkpoint, check_run
from pretrain.data.mixture import Mixture
from pretrain.data.sources import SOURCES, open_source
from pretrain.records import folder as run_folder
from pretrain.records import ledger, segments
from pretrain.records.segments import Source
from tests.pretrain.builders import failing


def manifest_of(model, step=30, lineage=((0, 1), (20, 2)), **changed):
    """As it was read back from JSON."""
    return {
        "step": step,
        "lineage": [list(segment) for segment in lineage],
        "architecture": {**dataclasses.asdict(model), **changed},
    }


def test_a_checkpoint_is_compared_with_the_run_that_resumes_from_it(recipe, tmp_path):
    model = check(recipe.load(tmp_path), 2)
    before = [[0, 1], [20, 2]]
    check_checkpoint(manifest_of(model), 30, model, before)
    for manifest, message in [
        (manifest_of(model, step=31), "step: 31, now 30"),
        (manifest_of(model, lineage=[(0, 1)]), r"lineage: .*, now \[\[0, 1\], \[20, 2\]\]"),
        (manifest_of(model, num_layers=7), f"num_layers: 7, now {model.num_layers}"),
        (manifest_of(model, gates="open"), "unknown key 'gates'"),
    ]:
        with pytest.raises(ValueError, match=f"checkpoint of step 30.*{message}"):
            check_checkpoint(manifest, 30, model, before)


def test_a_checkpoint_of_an_earlier_version_is_compared_by_what_its_record_means(recipe, tmp_path):
    model = check(recipe.load(tmp_path), 2)
    before = [[0, 1], [20, 2]]
    older = manifest_of(model)
    del older["architecture"]["layer_norm_epsilon"]
    check_checkpoint(older, 30, model, before)
    other = dataclasses.replace(model, layer_norm_epsilon=1e-6)
    with pytest.raises(ValueError, match="layer_norm_epsilon: 1e-05, now 1e-06"):
        check_checkpoint(older, 30, other, before)


@pytest.fixture
def began(recipe, tmp_path):
    """`began(*words)`: a run of 60 steps, with checkpoints of steps 10 and 20."""

    def begin(*words, kept=(10, 20)):
        config = recipe.load(tmp_path / "run", "training.steps=60", *words)
        segments.begin(check_run(config))
        for step in kept:
            ledger.append(tmp_path / "run" / ledger.FILE_NAME, "commit", step=step, manifest="")
        return lambda *other: recipe.load(tmp_path / "run", "training.steps=60", *other)

    return begin


def test_what_decides_nothing_of_the_weights_may_change_at_any_start(began, corpus, tmp_path):
    load = began()
    moved = Path(shutil.copytree(corpus, tmp_path / "moved"))
    for word in ("batch.micro_batch_size=1", "spike.window=39", f"data.corpus={moved}"):
        assert check_run(load(word)).why == ""


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optimizer.learning_rate=0.5", r"learning_rate: .*, now 0.5; .*add `--from STEP`"),
        ("training.steps=70", "training.steps: 60, now 70; .*--from STEP"),
        ("phases=[{steps: 30}, {}]", r"phases: \[\], now .*--from STEP"),
        ("model.size=small", "model.size: .*the weights have its shapes.*; name a new folder"),
        ("optimizer.beta2=0.9", r"optimizer.beta2: .*\(its state goes on"),
        ("training.seed=3", "training.seed: .*name a new folder"),
    ],
)
def test_another_recipe_is_refused_with_its_differences_and_the_way_out(began, word, message):
    load = began()
    with pytest.raises(ValueError, match=f"is a run with another recipe.*{message}"):
        check_run(load(word))


def test_another_corpus_is_among_the_differences_and_in_the_table(
    began, other_corpus, corpus, tmp_path, monkeypatch
):
    load = began()
    words = f"data.corpus={other_corpus}", "optimizer.learning_rate=0.5"
    change = f"data.corpus: '{corpus.name}', now '{other_corpus.name}'"
    with pytest.raises(ValueError, match=f"another recipe: {change}; .*0.5; resume"):
        check_run(load(*words))
    course, file = check_run(load(*words), Source(20)), tmp_path / "run" / "run.yaml"
    before = file.read_bytes()
    monkeypatch.setattr(ledger, "append", failing(ledger.append, [errno.ENOSPC]))
    with pytest.raises(OSError, match="No space left"):
        segments.begin(course)
    assert file.read_bytes() == before  # the recipe that the ledger has
    segments.begin(course)
    assert file.read_bytes() != before
    records = ledger.read_ledger(tmp_path / "run" / ledger.FILE_NAME)
    _, row = segments.table(course.segments, ledger.run_state(records))
    assert change in row[-1]


def test_another_vocabulary_is_refused_also_where_the_recipe_ends_before_the_last_one_began(
    began, other_vocabulary, tmp_path
):
    load = began()
    segments.begin(check_run(load("optimizer.learning_rate=0.5"), Source(33)))
    shorter = load(f"data.corpus={other_vocabulary}", "training.steps=30")
    with pytest.raises(ValueError, match="vocabulary of 400 ids .*, now with one of 380"):
        check_run(shorter, Source(10))
    for path in (tmp_path / "run" / segments.RECIPES).iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"recipes/\w+\.yaml: is missing; restore it"):
        check_run(shorter, Source(10))


@pytest.mark.parametrize(
    ("step", "steps", "holds"),
    [(10, [0, 10], True), (20, [0, 20], True), (33, [0, 33], True), (60, [0, 60], True)]
    + [(step, [], False) for step in (0, 9, 15, 61)],
)
def test_another_recipe_holds_from_a_kept_checkpoint_or_a_step_to_come(began, step, steps, holds):
    load = began()
    config = load("training.steps=80", "optimizer.learning_rate=0.5")
    if not holds:
        with pytest.raises(ValueError, match=f"--from {step}: accepted: .*: 10, 20, 21 to 60"):
            check_run(config, Source(step))
        return
    course = check_run(config, Source(step))
    assert [part.first_step for part in course.segments.parts] == steps
    assert course.segments.at(step).config.optimizer.learning_rate == 0.5
    assert course.segments.at(step - 1).config.optimizer.learning_rate < 0.5
    segments.begin(course)
    # The same command goes on, without beginning anything again.
    assert check_run(config, Source(step)).why == ""
    assert check_run(config).segments == course.segments
    with pytest.raises(ValueError, match=f"training.steps {step} is not above --from {step}"):
        check_run(load(f"training.steps={step}"), Source(step))


def test_a_run_that_has_not_begun_goes_on_from_nowhere(recipe, tmp_path):
    with pytest.raises(ValueError, match="--from 5: .* has not begun"):
        check_run(recipe.load(tmp_path / "run"), Source(5))


def test_corpora_may_be_added_and_those_that_were_read_stay(mixed, recipe, tmp_path):
    words = ["training.steps=60"]
    old = recipe.load(tmp_path / "run", *words)
    segments.begin(check_run(old))
    ledger.append(tmp_path / "run" / ledger.FILE_NAME, "commit", step=20, manifest="")
    course = check_run(mixed("a: weight: 1", "b: weight: 3", words=words), Source(20))
    segments.begin(course)
    order, _ = segments.order_of(ledger.read_ledger(tmp_path / "run" / ledger.FILE_NAME))
    place = course.segments.sizes.first_block(20)
    assert order.mixture.counts(place) == [place, 0]
    assert [order.mixture.shares(place + n) for n in (-1, 0)] == [[1, 0], [0.25, 0.75]]


def test_another_corpus_in_the_place_of_one_that_was_read_is_refused(
    began, other_corpus, corpus, tmp_path
):
    copy = shutil.copytree(corpus, tmp_path / "copy")
    load = began(f"data.corpus={copy}")
    shutil.rmtree(copy)
    shutil.copytree(other_corpus, copy)
    config = load(f"data.corpus={copy}")
    with pytest.raises(ValueError, match=f"{copy}: digest .*, now .*add `--from STEP`"):
        check_run(config)
    with pytest.raises(ValueError, match=f"{copy}: is not the corpus that the run has read"):
        check_run(config, Source(20))


def test_another_corpus_alone_may_follow_from_a_step_on(began, other_corpus, tmp_path):
    load = began()
    config = load(f"data.corpus={other_corpus}")
    with pytest.raises(ValueError, match=f"{other_corpus}: digest .*add `--from STEP`"):
        check_run(config)
    segments.begin(check_run(config, Source(20)))
    records = ledger.read_ledger(tmp_path / "run" / ledger.FILE_NAME)
    (_, first), (step, second) = segments.recipes_of(tmp_path / "run", records)
    assert (step, first.data.corpus != second.data.corpus) == (20, True)
    order, sizes = segments.order_of(records)
    place = sizes.first_block(20)
    assert [order.mixture.shares(place + n) for n in (-1, 0)] == [[1, 0], [0, 1]]
    assert check_run(config, Source(20)).why == ""


@pytest.mark.parametrize("later", ["other blocks", "another corpus", "none"])
def test_what_phases_to_come_would_have_read_may_change(began, other_corpus, tmp_path, later):
    def phases(data):
        return "phases=" + json.dumps([{"steps": 30}, {"data": data}])

    load = began(phases({"sequence_length": 48}))
    data = {
        "other blocks": {"sequence_length": 32},
        "another corpus": {"corpus": str(other_corpus)},
    }
    config = load(phases(data.get(later, {})))
    course = check_run(config, Source(20))
    segments.begin(course)
    order, _ = segments.order_of(ledger.read_ledger(tmp_path / "run" / ledger.FILE_NAME))
    blocks = [len(open_source(source, "train")) for source in course.segments.sources]
    assert [lineage.total for lineage in order.lineages] == blocks
    assert order.mixture == Mixture.of_run(course.segments)
    assert check_run(config, Source(20)).why == ""


def test_a_corpus_may_be_called_as_the_keys_of_a_recipe_are(corpus, other_corpus, recipe, tmp_path):
    def load(weight):
        corpora = f"corpus: {{path: {corpus}, weight: {weight}}}, path: {{path: {other_corpus}}}"
        return recipe.load(tmp_path / "run", "data.corpus=''", f"data.corpora={{{corpora}}}")

    segments.begin(check_run(load(1)))
    with pytest.raises(ValueError, match=r"data.corpora.corpus.weight: 1.0, now 3.0"):
        check_run(load(3))


def test_a_run_goes_on_only_with_the_algorithm_that_cut_its_blocks(began, monkeypatch):
    load = began()
    monkeypatch.setattr(SOURCES["chunked"], "algorithm", 2)
    with pytest.raises(ValueError, match="cut by chunked-1, .* by chunked-2"):
        check_run(load())


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
    check_run(config)
    if left == "metrics.jsonl":
        (tmp_path / "run" / left).write_text("{}\n")
    else:
        (tmp_path / "run" / left).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{path}: .* {left}.* a backup.* new folder"):
        check_run(config)

"""Runs with phases: killed and continued, audited, forked, and what readers say of them."""

import contextlib
import functools
import json
import os
import re
import shutil

import pytest
import yaml

from data_prep.common import files
from pretrain.checks.resume import check_run
from pretrain.config.load import load
from pretrain.data.batches import PretrainingBatches
from pretrain.records import checkpoints, ledger, metrics, segments
from pretrain.records import folder as run_folder
from tests.pretrain.builders import lines_of, main, short, slow

SETTINGS = [*short(14, 3), "schedule.name=constant"]


@pytest.fixture(scope="module")
def attempt(train_ranks):
    """`attempt(folder, *overrides)`: exit code and output; `fails_at`: the step that fails."""

    def run(folder, *overrides, fails_at=None):
        def sabotage(rank):
            usual = PretrainingBatches.micro_batches

            @functools.wraps(usual)  # workers look it up by its name
            def failing(self, step, *arguments):
                if step == fails_at:
                    os._exit(9)
                return usual(self, step, *arguments)

            PretrainingBatches.micro_batches = failing

        with contextlib.suppress(BaseException) if fails_at else contextlib.nullcontext():
            words = [*SETTINGS, *overrides]
            ((code, output, errors),) = train_ranks(folder, *words, ranks=1, sabotage=sabotage)
            return code, output + errors

    return run


@pytest.fixture(scope="module")
def phases(corpus, other_corpus):
    """Three phases: one corpus; two, shorter, other masks, smaller batches; the first again."""
    both = {"first": {"path": str(corpus)}, "second": {"path": str(other_corpus), "weight": 2}}
    second = {
        **{"name": "short", "steps": 4, "objective": {"probability": 0.3}},
        **{"batch": {"global_batch_size": 4}, "training": {"evaluation_interval": 2}},
        "data": {"corpus": "", "corpora": both, "sequence_length": 48},
    }
    last = {"schedule": {"name": "wsd", "warmup_steps": 0, "cooldown_steps": 3}}
    return "phases=" + json.dumps([{"steps": 5}, second, last])


@pytest.fixture(scope="module")
def straight(attempt, phases, tmp_path_factory):
    """A run with phases that nothing disturbed."""
    folder = tmp_path_factory.mktemp("phased") / "run"
    assert "phase 2 (short): steps 5 to 9" in succeeded(attempt(folder, phases))
    return folder


def succeeded(answer):
    """What a command said that had the exit code 0."""
    code, said = answer
    assert code == 0, said
    return said


def final_weights(run, step=14):
    import torch

    (path,) = checkpoints.folder_of(run, step).glob("*_optim_states.pt")
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    return state["single_partition_of_fp32_groups"]


def same(left, right):
    return all((a == b).all() for a, b in zip(left, right, strict=True))


def test_every_step_has_the_settings_of_its_phase(straight):
    lines = lines_of(straight / metrics.METRICS)
    assert [line["step"] for line in lines] == list(range(14))
    assert [line["learning_rate"] for line in lines[1:11]] == [3e-3] * 10
    assert lines[12]["learning_rate"] > lines[13]["learning_rate"]
    shares = [line["targets"] / line["tokens"] for line in lines]
    assert min(shares[5:9]) > max(*shares[:5], *shares[9:])
    assert max(line["tokens"] for line in lines[5:9]) <= 4 * 48
    measured = lines_of(straight / metrics.VALIDATION)
    # A boundary is measured in both ways, so that either side has something to compare with.
    assert [line["step"] for line in measured] == [3, 5, 5, 6, 8, 9, 9, 12, 14]
    assert ["corpora" in line for line in measured] == [False] * 2 + [True] * 4 + [False] * 3
    scores = measured[2]["corpora"]
    assert scores["first"]["targets"] + scores["second"]["targets"] == measured[2]["targets"]
    assert {name.partition("/")[0] for name in measured[2]["subsets"]} == {"first", "second"}
    ids = [line["validation_id"] for line in measured]
    assert ids == [ids[0]] * 2 + [ids[2]] * 4 + [ids[0]] * 3
    assert ids[0] != ids[2]
    steps = ledger.run_state(ledger.read_ledger(straight / ledger.FILE_NAME)).checkpoints
    assert 9 in steps  # the end of the second phase


def test_the_audit_proves_each_corpus_in_each_way_it_was_cut(straight):
    said = succeeded(main("audit", straight))
    # 5 + 5 steps of 8 blocks: the third phase goes on in the order of the first. The second has 4
    # steps of 4 blocks: blocks of different lengths are counted apart.
    assert "14 steps survive, each once: 80 blocks of first@64 (" in said
    for name, blocks in (("first@48", 5), ("second", 11)):
        assert f"{blocks} blocks of {name} (" in said
        assert f"{name}, epoch 0: {blocks} blocks read, none twice" in said


def test_a_model_is_evaluated_on_the_blocks_of_the_phase_that_it_comes_from(
    straight, corpus, tmp_path
):
    model, results = tmp_path / "model", tmp_path / "results.json"
    assert main("export", straight, "--step", "9", "--output", model)[0] == 0
    succeeded(main("evaluate", model, "--data", corpus, "--json", results))
    (found,) = json.loads(results.read_text())
    lines = lines_of(straight / metrics.VALIDATION)
    (own,) = (line["corpora"]["first"] for line in lines if line["step"] == 9 and "corpora" in line)
    assert (found["length"], found["total"]["targets"]) == (48, own["targets"])
    assert found["total"]["loss"] == pytest.approx(own["loss"], rel=1e-6)


def surviving(name, *runs):
    """The lines of a file of each run, without those of steps that were done again."""
    return [metrics.surviving(lines_of(run / name)) for run in runs]


@pytest.mark.parametrize("fails_at", [10, *slow([4], [5], [6])])
def test_a_run_that_is_killed_in_any_phase_ends_with_the_same_bits(
    attempt, phases, straight, tmp_path, fails_at
):
    attempt(tmp_path / "run", phases, fails_at=fails_at)
    workers = f"training.data_workers={int(fails_at == 4)}"  # which prefetch into the next phase
    succeeded(attempt(tmp_path / "run", phases, workers))
    assert same(final_weights(straight), final_weights(tmp_path / "run"))
    for name, keys in (
        (metrics.METRICS, ("step", "loss", "blocks", "learning_rate")),
        (metrics.VALIDATION, ("step", "loss", "validation_id")),
    ):
        mine, others = surviving(name, straight, tmp_path / "run")
        assert [[x[k] for k in keys] for x in mine] == [[x[k] for k in keys] for x in others]
    assert main("audit", tmp_path / "run")[0] == 0


def test_phases_to_come_change_with_another_recipe_from_a_step_on(attempt, phases, tmp_path):
    run = tmp_path / "run"
    attempt(run, phases, fails_at=10)
    later = yaml.safe_load(phases.removeprefix("phases="))
    later[2] = {"data": {"sequence_length": 32}, "schedule": {"warmup_steps": 0}}
    changed = "phases=" + json.dumps(later)
    code, said = attempt(run, changed)
    assert (code, "phases: [" in said, "add `--from STEP`" in said) == (2, True, True)
    succeeded(attempt(run, changed, "--from=9"))
    said = succeeded(main("audit", run))
    assert "first@32, epoch 0: 40 blocks" in said
    assert "first@64, epoch 0: 40 blocks" in said
    assert "9 to 14  user, phase 3" in said


def test_a_recipe_without_phases_goes_on_from_one_with_them(attempt, tmp_path):
    run, branch = tmp_path / "run", tmp_path / "branch"
    plain = "batch.global_batch_size=4"
    attempt(run, "phases=[{batch: {global_batch_size: 4}}]", fails_at=7)
    for folder, source in ((branch, f"{run}@4"), (run, "6")):
        succeeded(attempt(folder, plain, f"--from={source}"))
        assert "14 steps survive, each once: 56 blocks" in succeeded(main("audit", folder))


def test_a_rollback_into_an_earlier_phase_trains_it_with_its_own_settings(
    attempt, phases, straight, tmp_path
):
    run = tmp_path / "run"
    attempt(run, phases, fails_at=10)
    path = run / ledger.FILE_NAME
    rise = {"channel": "fast", "loss": 9.0, "baseline": 5.0}
    ledger.append(path, "spike", attempt=1, step=8, onset=6, **rise)
    answer = {"rung": 2, "skip": [6, 8], "learning_rate_factor": 1.0, "learning_rate_steps": 0}
    ledger.append(path, "segment", why="spike", onset=6, step=4, seed=2, **answer)
    succeeded(attempt(run, phases))
    before, after = surviving(metrics.METRICS, straight, run)
    assert [line["seed"] for line in after] == [1] * 4 + [2] * 10
    rates = [[line["learning_rate"] for line in lines] for lines in (before, after)]
    assert rates[0] == rates[1]
    assert max(line["tokens"] for line in after[5:9]) <= 4 * 48 < after[4]["tokens"]
    assert "declared skipped" in succeeded(main("audit", run))


def contents(run):
    """The bytes of every file of a run."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def forked(source, step):
    return f"--from={source}@{step}"


def test_a_fork_that_changes_nothing_repeats_the_source_bit_for_bit(
    attempt, phases, straight, tmp_path
):
    run, before = tmp_path / "run", contents(straight)
    succeeded(attempt(run, phases, forked(straight, 6)))
    assert contents(straight) == before
    assert same(final_weights(straight), final_weights(run))
    keys = ("step", "loss", "blocks", "gradient_norm")
    mine, others = surviving(metrics.METRICS, straight, run)
    assert [[x[k] for k in keys] for x in mine] == [[x[k] for k in keys] for x in others]
    said = succeeded(main("audit", run))
    assert "14 steps survive, each once: 80 blocks of first@64 (" in said
    state = ledger.run_state(ledger.read_ledger(run / ledger.FILE_NAME))
    assert state.checkpoints[0] == 6
    code, said = main("status", run)
    assert f"continues as a fork of {straight} at step 6" in said
    main("status", run, "--report")
    recipe = state.segments[-1]["recipe"]
    row = ["6 to 9", "fork, phase 2 (short)", recipe, "1", f"from {straight}"]
    rows = re.split(r"\n +", (run / "report.md").read_text())
    assert row in [re.split("  +", each) for each in rows]
    # Done, and taken once: the same command trains nothing.
    code, said = attempt(run, phases, forked(straight, 6))
    assert (code, "is done already" in said) == (0, True)
    code, said = attempt(run, phases, forked(straight, 8))
    assert code == 2
    assert "began as a fork of" in said


def test_a_fork_of_a_changed_checkpoint_is_refused_and_one_that_is_killed_has_its_own_recipe(
    straight, tmp_path, monkeypatch
):
    """`status` names it as what to run next."""
    run, other = tmp_path / "run", tmp_path / "other"
    own = load(str(straight / "run.yaml"), [f"folder={run}"])
    manifest = checkpoints.folder_of(shutil.copytree(straight, other), 6) / checkpoints.MANIFEST
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with pytest.raises(ValueError, match="--from .*other: .*step-00000006/MANIFEST.json: is not"):
        segments.begin(check_run(own, segments.Source(6, other)))
    run_folder.lock(run).close()  # as an attempt does; it begins the copy anew
    monkeypatch.setattr(files, "fsync", lambda path: 1 / (not (run / ledger.FILE_NAME).exists()))
    with pytest.raises(ZeroDivisionError):
        segments.begin(check_run(own, segments.Source(6, straight)))
    assert load(str(run / "run.yaml")) == own


def test_a_decay_branch_has_the_sources_steps_and_a_schedule_of_its_own(
    attempt, phases, straight, tmp_path
):
    run = tmp_path / "run"
    branch = yaml.safe_load(phases.removeprefix("phases="))
    branch[2] = {"schedule": {"name": "linear", "warmup_steps": 0}}
    words = ["phases=" + json.dumps(branch), "training.steps=12", forked(straight, 9)]
    succeeded(attempt(run, *words))
    lines = surviving(metrics.METRICS, straight, run)
    assert lines[0][:9] == lines[1][:9]
    rates = [line["learning_rate"] for line in lines[1][9:]]
    assert rates == pytest.approx([3e-3, 2.1e-3, 1.2e-3])
    assert [line["blocks"] for line in lines[0][9:12]] == [line["blocks"] for line in lines[1][9:]]
    assert main("audit", run)[0] == 0


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("nowhere@5", [], "is not the folder of a run that has begun"),
        ("{run}@7", [], "no checkpoint of step 7; it kept 2, 4, 5, 6, 8"),
        ("{run}@8", ["training.seed=5"], "training.seed: 1, now 5 (the first weights"),
        ("{run}@8", ["optimizer.beta2=0.9"], "optimizer.beta2: 0.98, now 0.9 (its state goes on"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_before_it_begins(
    phases, straight, recipe, tmp_path, source, changes, message
):
    words = [recipe.path, f"folder={tmp_path / 'run'}", *SETTINGS, phases]
    code, said = main("supervise", *words, *changes, "--from", source.format(run=straight))
    assert (code, message in said) == (2, True), said
    assert not (tmp_path / "run").exists()


def test_each_corpus_has_one_name(straight, tmp_path):
    run, totals = tmp_path / "run", {"first@64": 80, "first@48": 5, "second": 11}
    shutil.copytree(straight, run)
    assert main("status", run, "--report")[0] == 0
    text = (run / "report.md").read_text()
    for name, total in totals.items():
        assert f"    {name}: {total} blocks drawn" in text
    lines = lines_of(run / metrics.METRICS)
    drawn = {name: [line[f"blocks/{name}"] for line in lines] for name in totals}
    assert drawn["first@64"] == [8] * 5 + [0] * 4 + [8] * 5
    assert {name: sum(counts) for name, counts in drawn.items()} == totals
    manifest = checkpoints.read_manifest(checkpoints.folder_of(run, 14))
    assert [corpus["name"] for corpus in manifest["corpora"]] == [*totals]
    assert len(manifest["lineage"]) == 3

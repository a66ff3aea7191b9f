"""What `status` says about a run."""

import dataclasses
import json
import math

import pytest

from data_prep.common.files import json_lines
from finetune import zeroclap as command_line
from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.config.sections import SupervisionConfig, TrainingConfig
from pretrain.records import folder as run_folder
from pretrain.records import ledger, metrics, pace, status
from tests.pretrain.histories import STEPS, History, spiked


@pytest.fixture
def run(tmp_path):
    """A run that spiked, was rolled back, crashed, and is not being trained."""
    history = spiked(skip=(10, 13))
    history.versions["zeroclap"] = "3c4d"
    history.begin(steps=2)
    history.add("crash", attempt=2, reason="the launcher ended with code 9")
    history.write(tmp_path / "run")
    return tmp_path / "run"


def shown(run, capsys):
    assert command_line.main(["status", str(run)]) == 0
    return capsys.readouterr().out


def read(run, capsys):
    assert command_line.main(["status", str(run), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_says_what_happened_in_order(run, capsys):
    text = shown(run, capsys)
    parts = [
        f"baseline base, {STEPS:,} steps, recipe's seed 5",
        f"not being trained; it would continue from step 9 of {STEPS:,}",
        "code changed between attempts 1 and 2: zeroclap 1a2b to 3c4d",
        "attempt 1 began from initial weights: 2 ranks, seed 5",
        "LOSS SPIKE confirmed at step 13: fast rise, loss 7 (usually 5), since step 10",
        "rolled back to the checkpoint of step 9, continuing with seed 6, without the blocks that "
        "steps 10 to 12 had read",
        "attempt 2 began from the checkpoint of step 9",
        "attempt 2 failed: the launcher ended with code 9",
        "checkpoints: 9",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_it_says_what_was_drawn_from_each_corpus(tmp_path, capsys):
    history = History(totals={"web": 50, "books": 20}, weights=[(0, [3, 1]), (6, [1, 1])])
    history.begin(steps=9)
    history.commit()
    history.train(4)
    history.roll_back(9, skip=(10, 12))
    history.begin(steps=2)
    history.write(tmp_path / "run")
    text = shown(tmp_path / "run", capsys)
    place = history.sizes.first_block(11)
    web, books = history.order.mixture.counts(place)
    epochs = history.order.epochs(place)
    skipped = [lineage.skipped_count for lineage in history.order.lineages]
    assert skipped == [6, 6]
    held = "its blocks hold 75.0% of its tokens; 50.0% of the last batch"
    assert f"web: {web} blocks drawn, {epochs[0]:.3g} epochs, 6 skipped; {held}" in text
    assert f"books: {books} blocks drawn, {epochs[1]:.3g} epochs, 6 skipped; {held}" in text


def test_what_the_blocks_hold_and_what_was_read_are_two_figures(tmp_path, capsys):
    """A run that read a ten-thousandth of its corpus does not say that it reads all of it."""
    history = History(total=100_000)
    history.begin(steps=2)
    history.write(tmp_path / "run")
    text = shown(tmp_path / "run", capsys)
    assert "corpus: 4 blocks drawn, 4e-05 epochs; its blocks hold 75.0% of its tokens\n" in text
    assert "reads" not in text


def test_it_says_what_the_run_is_doing(run, capsys):
    path = run / ledger.FILE_NAME
    with run_folder.lock(run):
        assert "training now, attempt 2: step" in shown(run, capsys)
        ledger.append(path, "suspect", onset=8, step=10, channel="slow", loss=6.0, baseline=5.0)
        text = shown(run, capsys)
        assert "under suspicion of a loss spike since step 8" in text
        assert "checkpoints: 9 (tainted: after the onset)" in text
    assert "not being trained" in shown(run, capsys)
    ledger.append(path, "spike", onset=8, step=12, channel="slow", loss=6.0, baseline=5.0)
    assert "stopped at a loss spike, not yet rolled back" in shown(run, capsys)
    ledger.append(path, "gave-up", reason="it looks structural")
    assert "\ngiven up: it looks structural; it would continue from step" in shown(run, capsys)
    ledger.append(path, "done", step=STEPS)
    assert f"finished: {STEPS:,} of {STEPS:,} steps in 2 attempts" in shown(run, capsys)


@pytest.mark.parametrize("attempts", [0, 1])
def test_what_was_undone_does_not_count_before_a_step_repeats_it(tmp_path, capsys, attempts):
    history = spiked()
    history.measure(9)
    history.measure(14)
    for _ in range(attempts):
        history.begin()
    history.write(tmp_path / "run")
    found = read(tmp_path / "run", capsys)
    assert (found["step"], found["validation"]["step"]) == (9, 9)


def test_an_attempt_that_lost_its_supervisor_is_told_with_the_way_to_adopt_it(run, capsys):
    """A run that was started without a supervisor has no log of its attempt, and lost none."""
    needed = f"no supervisor: run `zeroclap supervise {run}/run.yaml --nodes 2` to adopt it"

    def found():
        values = read(run, capsys)
        return needed in shown(run, capsys), values["orphaned"], values["next"] is not None

    (run / "logs").mkdir()
    with run_folder.lock(run):
        assert found() == (False, False, False)
        (run / "logs" / "attempt-001.log").touch()  # the one before was supervised
        assert found() == (False, False, False)
        (run / "logs" / "attempt-002.log").touch()
        assert found() == (True, True, True)
        with run_folder.lock(run, run_folder.SUPERVISOR_LOCK):
            assert found() == (False, False, False)
    assert found() == (False, False, True)  # it does not train, and may be continued


def test_a_slow_rank_is_named_while_the_run_is_trained(run, capsys):
    path = run / metrics.METRICS
    lines = metrics.read_metrics(path)
    slow = {"slowest_rank": 1, "slowest_rank_seconds": 0.5, "other_ranks_seconds": 0.2}
    lines += [{**lines[-1], "step": 11 + step, **slow} for step in range(pace.LEAST_STEPS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "is slow" not in shown(run, capsys)
    with run_folder.lock(run):
        assert "rank 1 on there is slow: it works 0.5 s in a step" in shown(run, capsys)
        found = read(run, capsys)["slow_rank"]
    assert found == {"rank": 1, "host": "there", "seconds": 0.5, "others_seconds": 0.2}


def test_a_folder_that_is_not_a_run_is_refused(tmp_path, capsys):
    assert command_line.main(["status", str(tmp_path)]) == 2
    assert "has no run.yaml and no supervised.yaml" in capsys.readouterr().err
    (tmp_path / "base").mkdir()
    for path, message in (
        (tmp_path, f"it contains the runs {tmp_path / 'base'}"),
        (tmp_path / "bsae", "no such folder"),
        (tmp_path / "base" / ledger.FILE_NAME, "is a file; name the run's folder"),
    ):
        (tmp_path / "base" / ledger.FILE_NAME).touch()
        assert command_line.main(["status", str(path)]) == 2
        assert message in capsys.readouterr().err


def validate(run, *losses):
    """Write measurements after 3, 6, 9, ... steps, by the first attempt."""
    line = {"attempt": 1, "targets": 9, "subsets": {}}
    lines = [
        {**line, "step": 3 * n, "loss": loss, "perplexity": math.exp(loss)}
        for n, loss in enumerate(losses, start=1)
    ]
    (run / metrics.VALIDATION).write_bytes(json_lines(lines))


def test_it_names_the_newest_and_the_best_validation_the_log_and_the_next_command(run, capsys):
    (run / "logs").mkdir()
    for number in (1, 2, 10):
        (run / "logs" / f"attempt-{number:03d}.log").touch()
    (run / "logs" / "attempt-011-node-001.log").touch()
    validate(run, 5.5, 5.0, 5.25)
    text = shown(run, capsys)
    expected = "validation after 9 steps: loss 5.2500, perplexity 190.57 (best 148.41 after 6)"
    assert expected in text.splitlines()
    assert text.splitlines()[-2:] == [
        f"log: {run}/logs/attempt-010.log",
        f"next: zeroclap supervise {run}/run.yaml --nodes 2",  # one alone has half the ranks
    ]
    with_hostfile = RunConfig(supervision=SupervisionConfig(hostfile="hosts"))
    recipes.dump(dataclasses.replace(with_hostfile, folder=str(run)), run / "run.yaml")
    assert shown(run, capsys).endswith(f"next: zeroclap supervise {run}/run.yaml\n")
    ledger.append(run / ledger.FILE_NAME, "done", step=STEPS)
    assert f"next: zeroclap export {run} --output" in shown(run, capsys)


def test_json_has_the_state_the_scores_and_null_for_what_is_unknown(run, capsys):
    found = read(run, capsys)
    assert (found["state"], found["step"], found["steps"]) == ("stopped", 11, STEPS)
    assert (found["loss"], found["tokens_per_second"]) == (5.0, 200.0)
    assert found["eta_seconds"] == (STEPS - 11) * 0.5
    assert (found["attempts"], found["rollbacks"], found["checkpoints"]) == (2, 1, [9])
    assert found["reason"] == "the launcher ended with code 9"
    for name in ("validation", "best_validation", "log", "suspected_since"):
        assert found[name] is None
    validate(run, 5.0, math.inf)
    found = read(run, capsys)
    assert found["validation"] == {"step": 6, "loss": None, "perplexity": None}
    assert found["best_validation"]["step"] == 3
    (run / "metrics.jsonl").unlink()
    found = read(run, capsys)
    assert (found["step"], found["loss"]) == (0, None)
    (corpus,) = found["corpora"]
    assert (corpus["name"], corpus["blocks"], corpus["share_of_tokens"]) == ("corpus", 0, 0.75)
    ledger.append(run / ledger.FILE_NAME, "gave-up", reason="it looks structural")
    found = read(run, capsys)
    assert (found["state"], found["reason"]) == ("given-up", "it looks structural")
    with run_folder.lock(run, run_folder.SUPERVISOR_LOCK):
        assert read(run, capsys)["state"] == "starting"


def test_a_run_whose_first_attempt_has_not_begun_is_shown(run, capsys):
    (run / "run.yaml").rename(run / run_folder.SUPERVISED)
    (run / ledger.FILE_NAME).unlink()
    (run / metrics.METRICS).unlink()
    text = shown(run, capsys)
    assert f"not being trained; it would continue from step 0 of {STEPS:,}" in text
    assert text.endswith(f"next: zeroclap supervise {run}/supervised.yaml\n")


def test_a_finished_run_that_is_being_extended_is_not_finished(run, capsys):
    ledger.append(run / ledger.FILE_NAME, "done", step=STEPS)
    assert status.view(run).activity == status.FINISHED
    recipes.dump(RunConfig(training=TrainingConfig(steps=STEPS + 1)), run / run_folder.SUPERVISED)
    with run_folder.lock(run, run_folder.SUPERVISOR_LOCK):
        assert status.view(run).activity == status.STARTING


def test_the_next_command_of_a_run_that_was_moved_names_its_folder(run, capsys):
    moved = run.rename(run.parent / "moved here")
    command = f"zeroclap supervise '{moved}/run.yaml' 'folder={moved}' --nodes 2"
    assert shown(moved, capsys).endswith(f"next: {command}\n")

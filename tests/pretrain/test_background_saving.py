"""Attempts that write checkpoints while training goes on, and what may happen meanwhile."""

# ruff: noqa: F811 - fixtures

import errno
import os
import time

import pytest

from data_prep.common.exit_codes import EXIT_PREEMPTED, EXIT_SPIKE
from pretrain.records import checkpoints, control, ledger, metrics
from tests.pretrain.train.test_train import assert_same_run, attempt, straight  # noqa: F401

BACKGROUND = "training.background_saving=true"


def writing_of(step, action):
    """Act in the thread that writes a rank's files of one checkpoint, before it writes."""
    from pretrain.engine.engine import Engine

    original = Engine.begin_save

    def begin_save(self, folder, in_memory):
        complete = original(self, folder, in_memory)

        def act():
            if folder.name.startswith(f"step-{step:08d}"):
                action(folder)
            complete()

        return act

    Engine.begin_save = begin_save


def records(run, *kinds):
    found = ledger.read_ledger(run / ledger.FILE_NAME)
    return [(r["kind"], r["step"]) for r in found if not kinds or r["kind"] in kinds]


def metrics_have(run, step):
    return any(line["step"] == step for line in metrics.read_metrics(run / metrics.METRICS))


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_training_goes_on_and_the_checkpoint_does_not_exist_until_all_ranks_have_written(
    attempt,
    straight,
    tmp_path,
):
    """Rank 1 writes the checkpoint of step 2 after step 2 itself was done and recorded."""

    def sabotage(rank):
        def wait(staging):
            assert staging.name.endswith(".partial")
            wait_for(lambda: metrics_have(tmp_path, 2))
            assert records(tmp_path, "commit") == []
            assert not list(staging.glob("*pp_rank_1_*")), "rank 1 has not written yet"
            assert not checkpoints.folder_of(tmp_path, 2).exists()

        if rank:
            writing_of(2, wait)

    answers = attempt(tmp_path, BACKGROUND, sabotage=sabotage)
    assert [code for code, _, _ in answers] == [0, 0], answers
    assert records(tmp_path, "commit") == [("commit", step) for step in (2, 4, 6)]
    for step in (2, 4, 6):
        checkpoints.read_manifest(checkpoints.folder_of(tmp_path, step))
        assert_same_run(tmp_path, straight, step)


def test_a_disk_that_is_full_in_the_background_costs_that_checkpoint_alone(
    attempt,
    straight,
    tmp_path,
):
    def sabotage(rank):
        def refuse(staging):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staging))

        if rank:
            writing_of(4, refuse)

    answers = attempt(tmp_path, BACKGROUND, sabotage=sabotage)
    assert [code for code, _, _ in answers] == [0, 0], answers
    assert "WARNING: no checkpoint of step 4: " in answers[0][1]
    found = records(tmp_path, "commit", "save-failed")
    assert found == [("commit", 2), ("save-failed", 4), ("commit", 6)]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert not [name for name in names if name.startswith("step-00000004")]
    assert_same_run(tmp_path, straight, 6)


@pytest.mark.parametrize("why", ["stop", "spike"])
def test_what_ends_an_attempt_waits_for_the_checkpoint_that_is_being_written(
    why,
    attempt,
    straight,
    tmp_path,
):
    """Either comes while rank 1 still writes the checkpoint of step 2."""

    def sabotage(rank):
        from pretrain.spikes.live import SpikeWatch
        from pretrain.train.client import SupervisorClient

        verdict = SupervisorClient.verdict

        def ask(self, steps):
            if steps == 3 and why == "stop":
                control.request_stop(self._run, self._token)
            return verdict(self, steps)

        def judge(self, record):
            return EXIT_SPIKE if record.step == 2 and why == "spike" else 0

        SupervisorClient.verdict, SpikeWatch.__call__ = ask, judge
        if rank:
            writing_of(2, lambda staging: wait_for(lambda: metrics_have(tmp_path, 2)))

    answers = attempt(tmp_path, BACKGROUND, sabotage=sabotage)
    codes = [code for code, _, _ in answers]
    found = records(tmp_path, "commit", "preempted")
    if why == "spike":
        assert (codes, found) == ([EXIT_SPIKE] * 2, [("commit", 2)])
    else:
        expected = [("commit", 2), ("commit", 3), ("preempted", 3)]
        assert (codes, found) == ([EXIT_PREEMPTED] * 2, expected)
        assert [code for code, _, _ in attempt(tmp_path, BACKGROUND)] == [0, 0]
        assert_same_run(tmp_path, straight, 6)

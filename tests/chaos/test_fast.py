"""The part of the chaos suite that `make test` runs; the rest is in test_faults.py."""

import contextlib
import io
import os

import pytest

from data_prep.common.exit_codes import EXIT_PREEMPTED
from pretrain.records import control, heartbeat
from pretrain.records.control import ControlFile
from tests.chaos.conftest import SHORT


@pytest.fixture
def attempt(run_ranks, recipe, tmp_path):
    """`attempt(token)`: one attempt with this token at the run below `tmp_path`."""
    from pretrain.train import __main__ as train

    (tmp_path / "run").mkdir()  # as a supervisor does

    def run(token):
        def work():
            os.environ[control.TOKEN_VARIABLE] = token
            with contextlib.redirect_stdout(io.StringIO()):
                return train.main([str(recipe.path), f"folder={tmp_path / 'run'}", *SHORT])

        return run_ranks(2, work)

    return run


def test_an_attempt_that_is_asked_to_stop_saves_and_the_next_one_continues(
    attempt, chaos, undisturbed
):
    control.request_stop(chaos.run, "first")
    assert attempt("first") == [EXIT_PREEMPTED] * 2
    assert chaos.kinds() == ["segment", "attempt", "commit", "preempted"]
    assert chaos.records()[-1]["step"] == 1
    assert heartbeat.read_heartbeat(chaos.run, "first").stage == "step"
    assert attempt("second") == [0, 0]
    assert chaos.start_steps() == [0, 1]
    chaos.assert_same_as(undisturbed)


def test_an_attempt_that_was_superseded_does_not_start(attempt, chaos, capfd):
    control.write(chaos.run, ControlFile("newer", 7, control.RUN))
    assert attempt("older") == [2, 2]
    assert chaos.records() == []
    assert "(the newest is attempt 7); this one stops" in capfd.readouterr().err

"""The part of the chaos suite that `make test` runs; the rest is in test_faults.py."""

from data_prep.common.exit_codes import EXIT_PREEMPTED
from pretrain.records import control, heartbeat
from pretrain.records.control import ControlFile


def test_an_attempt_that_is_asked_to_stop_saves_and_the_next_one_continues(
    attempt, chaos, undisturbed
):
    control.request_stop(chaos.run, "first")
    assert [code for code, *_ in attempt("first")] == [EXIT_PREEMPTED] * 2
    assert chaos.kinds() == ["segment", "attempt", "commit", "preempted"]
    assert chaos.records()[-1]["step"] == 1
    assert heartbeat.read_heartbeat(chaos.run, "first").stage == "step"
    assert [code for code, *_ in attempt("second")] == [0, 0]
    assert chaos.start_steps() == [0, 1]
    chaos.assert_same_as(undisturbed)


def test_an_attempt_that_was_superseded_does_not_start(attempt, chaos):
    control.write(chaos.run, ControlFile("newer", 7, control.RUN))
    (code, _, errors), (other, *_) = attempt("older")
    assert (code, other) == (2, 2)
    assert chaos.records() == []
    assert "(the newest is attempt 7); this one stops" in errors

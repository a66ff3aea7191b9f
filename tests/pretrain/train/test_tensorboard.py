"""TensorBoard curves."""

import errno
import os
import threading

import pytest

from pretrain.records.figures import curves
from pretrain.train.trackers import FOLDER, TensorBoard
from tests.pretrain.builders import step_record


def show(board, step, loss=2.0):
    board.scalars(step, curves(step_record(step, loss)))


def events_of(folder):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
    return events


def test_the_curve_replaces_what_a_later_attempt_does_again(tmp_path):
    for attempt, steps in ((1, range(10)), (2, range(6, 12))):
        board = TensorBoard(tmp_path, steps[0], print)
        for step in steps:
            show(board, step, loss=float(attempt))
        board.close()
    kept = [(e.step, e.value) for e in events_of(tmp_path / FOLDER).Scalars("train/loss")]
    assert kept == [(step, 1.0 if step < 6 else 2.0) for step in range(12)]


def test_tensorboard_gets_every_curve(tmp_path):
    board = TensorBoard(tmp_path, 0, print)
    show(board, 4)
    board.scalars(4, {"validation/loss": 1.5})
    board.close()
    events = events_of(tmp_path / FOLDER)
    assert set(events.Tags()["scalars"]) == {
        *("train/loss", "validation/loss", "data/epoch", "optimizer/learning_rate"),
        *("optimizer/gradient_norm", "optimizer/loss_scale"),
        *("speed/step_seconds", "speed/data_seconds"),
    }
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (4, 2.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_curves_that_cannot_be_written_are_dropped_with_one_warning_until_opened_again(
    tmp_path, monkeypatch
):
    from tensorboard.compat.tensorflow_stub.io import gfile

    warnings = []
    board = TensorBoard(tmp_path, 0, warnings.append)
    show(board, 0)
    board.sync(1)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(gfile.LocalFileSystem, "append", full)
        patch.setattr(gfile.LocalFileSystem, "write", full)
        for step in range(1, 40):
            show(board, step)
            if step % 10 == 0:
                board.sync(step + 1)
    (warning,) = warnings
    assert "No space left on device" in warning
    board.sync(40)
    show(board, 40)
    board.close()
    for thread in threading.enumerate():
        if getattr(thread, "exception", None):  # TensorBoard's: it ends with this error
            thread.join()
    parts = [events_of(file) for file in (tmp_path / FOLDER).iterdir()]
    curves = [part.Scalars("train/loss") for part in parts if part.Tags()["scalars"]]
    assert sorted(event.step for curve in curves for event in curve) == [0, 40]
    assert len(warnings) == 1

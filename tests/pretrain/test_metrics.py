"""What a run measured, through crashes and rollbacks."""

import json

import pytest

from pretrain import metrics
from pretrain.loop import StepRecord


def record(step, loss=2.0):
    return StepRecord(step, loss, 1.0, 1e-3, 1, 0.5, 1200, 180, 2.0, 0.1)


@pytest.fixture
def json_lines():
    """Opens JsonLines files, and closes them at the test's end."""
    opened = []

    def open_lines(path):
        opened.append(metrics.JsonLines(path))
        return opened[-1]

    yield open_lines
    for one in opened:
        one._file.close()


def lines(*steps, attempt=1):
    return [{"attempt": attempt, "step": step} for step in steps]


def test_records_come_back_as_they_were_written(json_lines, tmp_path):
    path = tmp_path / "deep" / "a.jsonl"
    written = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]
    writer = json_lines(path)
    for line in written:
        writer.write(line)
        assert metrics.read(path)[-1] == line  # without closing: a kill loses nothing
    assert metrics.read(path) == written
    assert metrics.read(tmp_path / "none.jsonl") == []


def test_a_number_that_is_not_finite_is_null_for_json_has_none(json_lines, tmp_path):
    writer = json_lines(tmp_path / "a.jsonl")
    for number in (float("inf"), float("-inf"), float("nan")):
        writer.write({"step": 1, "loss": number})
    assert (tmp_path / "a.jsonl").read_text().count("null") == 3
    assert metrics.read(tmp_path / "a.jsonl") == [{"step": 1, "loss": None}] * 3
    line = {**vars(record(7)), "loss": None, "gradient_norm": None}
    assert "loss not finite  gradient norm not finite" in metrics.progress_line(line, 9)


def test_a_torn_last_line_is_not_read_and_does_not_spoil_the_next(json_lines, tmp_path):
    path = tmp_path / "a.jsonl"
    for torn in (b"{", b'{"step": 2', b'{"step": 2}'):
        path.write_bytes(b'{"step": 1}\n' + torn)
        assert metrics.read(path) == [{"step": 1}]
        json_lines(path).write({"step": 3})
        assert metrics.read(path) == [{"step": 1}, {"step": 3}]


def test_a_line_in_the_middle_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match="a.jsonl: line 2 is no JSON"):
        metrics.read(path)


def test_what_survives_is_the_newest_attempt_at_each_step():
    first, second = lines(*range(10)), lines(*range(6, 9), attempt=2)
    third = lines(*range(3, 12), attempt=3)
    assert metrics.surviving(first) == first
    assert metrics.surviving(first + second) == first[:6] + second
    assert metrics.surviving(first + second + third) == first[:3] + third
    assert metrics.surviving([]) == []


def test_a_step_s_line_has_every_number_and_the_attempt(tmp_path):
    writer = metrics.MetricsWriter(tmp_path, 3)
    writer(record(7))
    writer._lines._file.close()
    (line,) = metrics.read(tmp_path / metrics.METRICS)
    assert line["attempt"] == 3
    assert StepRecord(**{k: v for k, v in line.items() if k != "attempt"}) == record(7)


def test_progress_is_printed_now_and_then_and_at_the_end():
    written = []
    printer = metrics.ProgressPrinter(3, seconds=1000.0, write=written.append)
    for step in range(3):
        printer(record(step))
    assert len(written) == 2
    assert written[0].startswith("step 0/3  loss 2.0000")
    assert "600 tokens/s  0:00:04 left" in written[0]
    assert written[1].startswith("step 2/3")


def events_of(folder):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
    return events


def test_the_stitched_curve_replaces_what_a_later_attempt_does_again(tmp_path):
    for attempt, steps in ((1, range(10)), (2, range(6, 12))):
        board = metrics.TensorBoard(tmp_path, attempt, steps[0])
        board.text(steps[0], f"attempt {attempt} began")
        for step in steps:
            board(record(step, loss=float(attempt)))
    kept = [(e.step, e.value) for e in events_of(tmp_path / "stitched").Scalars("train/loss")]
    assert kept == [(step, 1.0 if step < 6 else 2.0) for step in range(12)]
    first = events_of(tmp_path / "attempt-001").Scalars("train/loss")
    assert [event.step for event in first] == list(range(10))


def test_tensorboard_gets_every_curve(tmp_path):
    board = metrics.TensorBoard(tmp_path, 1, 0)
    board(record(4))
    board.scalars(4, {"validation/loss": 1.5})
    events = events_of(tmp_path / "attempt-001")
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "optimizer/gradient_norm",
        "optimizer/loss_scale",
        "optimizer/learning_rate",
        "speed/tokens_per_second",
        "data/epoch",
        "validation/loss",
    }
    (event,) = events.Scalars("speed/tokens_per_second")
    assert (event.step, event.value) == (4, 600.0)


def test_json_lines_are_one_line_each(json_lines, tmp_path):
    json_lines(tmp_path / "a").write({"text": "a\nb"})
    assert json.loads((tmp_path / "a").read_text()) == {"text": "a\nb"}
    assert (tmp_path / "a").read_text().count("\n") == 1

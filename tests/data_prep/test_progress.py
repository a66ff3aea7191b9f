import pytest

from data_prep.common.wording import duration, in_short
from data_prep.progress import Done, ProgressReport, rates


def test_log_has_a_line_every_ten_seconds_and_one_at_the_end(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 11.0, 12.0, 19.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    report = ProgressReport("prepare", 2, 10_000)
    report.update(Done(10, 1_000_000))  # too soon for a line
    report.update(Done(110, 22_000_000, 4_400_000, 2_000))
    report.finish_part()  # too soon
    report.update(Done(2000, 40_000_000, 8_000_000, 10_000))
    report.finish_part()
    assert capsys.readouterr().err.splitlines() == [
        "prepare: 0 of 2 shards, 110 documents, 10 documents/s, 2.0 MB/s, 0.40 M tokens/s, "
        "20% read, 0:00:44 left",
        "prepare: 2 of 2 shards, 2,000 documents, 100 documents/s, 2.0 MB/s, 0.40 M tokens/s",
    ]


def test_remaining_time_is_unknown_before_anything_is_read():
    assert "left" not in rates(Done(5, 100, 20, 0), 1000, 3.0)
    assert "left" not in rates(Done(), 0, 0.0)


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (7, "7"), (1234, "1.23 k"), (999_600, "1 M"), (2.5e6, "2.5 M"), (3e11, "300 G")],
)
def test_numbers_are_short(number, words):
    assert in_short(number) == words


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0:00:00"), (59.6, "0:01:00"), (61, "0:01:01"), (9e4, "25:00:00")]
)
def test_durations_are_hours_minutes_and_seconds(seconds, text):
    assert duration(seconds) == text


def test_terminal_shows_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    report = ProgressReport("prepare", 3)
    for _ in range(3):
        report.finish_part()
    report.update(Done(30, 3_000_000))
    report.say("a separate line")
    report.close()
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "30 documents" in shown
    assert "prepare: a separate line" in shown

import pytest

from data_prep.progress import ProgressReport


def test_lines_are_few_and_the_last_says_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 11.0, 12.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with ProgressReport(2, "prepare") as report:
        report.update(0, 10, 1_000_000)  # too soon
        report.update(1, 110, 22_000_000)
        report.update(1, 120, 23_000_000)  # too soon
        report.update(2, 200, 40_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "prepare: 1 of 2 shards, 110 documents, 10 documents/s, 2.0 MB/s",
        "prepare: 2 of 2 shards, 200 documents, 10 documents/s, 2.0 MB/s",
    ]


def test_person_at_a_terminal_gets_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with ProgressReport(3, "prepare") as report:
        report.update(3, 30, 3_000_000)
        report.say("a line of its own")
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "30 documents" in shown
    assert "prepare: a line of its own" in shown

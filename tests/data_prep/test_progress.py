import pytest

from data_prep.progress import Done, ProgressReport, duration, rates


def test_lines_are_few_and_the_last_says_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 11.0, 12.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with ProgressReport(2, "prepare", 10_000) as report:
        report.update(0, Done(10, 1_000_000))  # too soon
        report.update(1, Done(110, 22_000_000, 4_400_000, 2_000))
        report.update(1, Done(120, 23_000_000))  # too soon
        report.update(2, Done(2000, 40_000_000, 8_000_000, 10_000))
    assert capsys.readouterr().err.splitlines() == [
        "prepare: 1 of 2 shards, 110 documents, 10 documents/s, 2.0 MB/s, 0.40 M tokens/s, "
        "20% read, 44 s to go",
        "prepare: 2 of 2 shards, 2,000 documents, 100 documents/s, 2.0 MB/s, 0.40 M tokens/s",
    ]


def test_nothing_is_foretold_before_anything_is_read() -> None:
    assert "to go" not in rates(Done(5, 100, 20, 0), 1000, 3.0)
    assert "to go" not in rates(Done(), 0, 0.0)


def test_work_is_summed() -> None:
    assert Done.total([]) == Done()
    assert Done.total([Done(1, 2, 3, 4), Done(10, 20, 30, 40)]) == Done(11, 22, 33, 44)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0 s"),
        (59.6, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3600, "1 h 00 min"),
        (9e4, "25 h 00 min"),
    ],
)
def test_durations_are_short(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_person_at_a_terminal_gets_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with ProgressReport(3, "prepare") as report:
        report.update(3, Done(30, 3_000_000))
        report.say("a line of its own")
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "30 documents" in shown
    assert "prepare: a line of its own" in shown

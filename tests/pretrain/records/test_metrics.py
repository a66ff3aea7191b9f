"""The records of a run's measurements, through crashes and rollbacks."""

import json
import re

import pytest

from pretrain.loop.protocols import TermLoss
from pretrain.records import metrics, progress, wording
from tests.pretrain.builders import step_record


def record(step, loss=2.0):
    return step_record(step, loss)


STEP = metrics.line_of(record(1))
SCORE = {"attempt": 1, "step": 2, "loss": 1.5, "perplexity": 4.5, "targets": 9, "subsets": {}}


def lines(*steps, attempt=1):
    return [{"attempt": attempt, "step": step} for step in steps]


def test_records_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "deep" / metrics.METRICS
    writer = metrics.JsonLines(path)
    for line in ({**STEP, "loss": None}, {**STEP, "text": "a\nb"}):
        writer.write(line)
        read = metrics.read_metrics(path)[-1]  # without closing: a kill loses nothing
        assert read == {name: line[name] for name in read}
    assert len(metrics.read_metrics(path)) == 2
    assert metrics.read_metrics(tmp_path / "none.jsonl") == []


def test_progress_says_which_numbers_are_not_finite():
    line = {**metrics.line_of(record(7)), "loss": None, "gradient_norm": None}
    assert progress.progress_line([line], 9).count("not finite") == 2


def test_a_torn_last_line_is_not_read_and_does_not_spoil_the_next(tmp_path):
    path, whole = tmp_path / metrics.METRICS, json.dumps(STEP).encode()
    for before in (0, 1):
        for torn in (b"", b"{", whole[:-1], whole):
            path.write_bytes((whole + b"\n") * before + torn)
            assert len(metrics.read_metrics(path)) == before
            metrics.JsonLines(path).write(STEP)
            assert len(metrics.read_metrics(path)) == before + 1


@pytest.mark.parametrize(
    ("usual", "spoiled", "reason"),
    [
        *((STEP, text, "is not valid JSON: ") for text in (b"{", b"\0\0\0", b"\xff", b"[" * 9999)),
        (STEP, b"7", "7 is not accepted; it must be a mapping"),
        (STEP, {"step": "2"}, "step: '2' is not accepted; it must be a whole number"),
        (STEP, {"tokens": True}, "tokens: True is not accepted; it must be a whole number"),
        (STEP, {"seconds": 0}, "seconds: 0 is not accepted; it must be above 0"),
        (STEP, {"loss": [1]}, "loss: [1] is not accepted; it must be a number"),
        (STEP, {"terms": {"masked": {}}}, "terms.masked.loss: is missing"),
        (SCORE, {"targets": None}, "targets: None is not accepted; it must be a whole number"),
        (SCORE, {"subsets": {"a": {**SCORE, "loss": "x"}}}, "subsets.a.loss: 'x' is not accepted"),
    ],
)
def test_a_spoiled_line_is_left_out_and_told_with_its_key(usual, spoiled, reason, tmp_path):
    path, told = tmp_path / (metrics.METRICS if usual is STEP else metrics.VALIDATION), []
    line = spoiled if isinstance(spoiled, bytes) else json.dumps({**usual, **spoiled}).encode()
    path.write_bytes(b"\n".join([json.dumps(usual).encode(), line, line, b'{"st']))
    assert len(metrics.read_metrics(path, told.append)) == 1
    assert f"{path}: 2 lines left out as not valid, the first is line 2: {reason}" in told[0]


def test_a_link_is_refused_and_its_target_keeps_its_last_line(tmp_path):
    target, link = tmp_path / "notes", tmp_path / metrics.METRICS
    target.write_text("mine")
    link.symlink_to(target)
    with pytest.raises(ValueError, match=f"{link}: is a symbolic link"):
        metrics.JsonLines(link)
    assert target.read_text() == "mine"


def evaluation(step, loss, name, attempt=1):
    return {"step": step, "loss": loss, "validation_id": name, "attempt": attempt}


def test_the_best_is_among_those_that_measured_the_same_as_the_newest():
    first = [evaluation(10, 5.0, "a"), evaluation(20, 4.0, "a")]
    assert metrics.best_validation(first) is first[1]
    second = [*first, evaluation(20, 6.0, "b"), evaluation(30, 5.5, "b"), evaluation(40, 5.7, "b")]
    assert metrics.best_validation(second) is second[3]
    again = [*second, evaluation(50, 4.5, "a")]
    assert metrics.best_validation(again) is first[1]
    assert metrics.best_validation([]) is None


def test_evaluations_after_one_step_survive_beside_each_other():
    """Those of a phase's end and of the next one's beginning, until the steps are repeated."""
    both = [evaluation(20, 4.0, "a"), evaluation(20, 6.0, "b")]
    kept = lines(*range(20))
    assert metrics.surviving_validation(both, kept) == both
    second = evaluation(20, 6.5, "b", attempt=2)  # the first attempt ended between the two
    assert metrics.surviving_validation([both[0], second], kept) == [both[0], second]
    repeated = [evaluation(20, 4.5, "a", attempt=2), second]
    rolled_back = metrics.surviving([*kept, *lines(*range(15, 20), attempt=2)])
    assert metrics.surviving_validation([*both, *repeated], rolled_back) == repeated


def test_what_survives_is_the_newest_attempt_at_each_step():
    first, second = lines(*range(10)), lines(*range(6, 9), attempt=2)
    third = lines(*range(3, 12), attempt=3)
    assert metrics.surviving(first) == first
    assert metrics.surviving(first + second) == first[:6] + second
    assert metrics.surviving(first + second + third) == first[:3] + third
    assert metrics.surviving(first + second + lines(9, 10) + third) == first[:3] + third
    assert metrics.surviving([]) == []


def test_a_measurement_of_an_abandoned_lineage_does_not_count_before_it_is_repeated():
    """Rolled back from 8 to 3, stopped at 6 before the validation loss was measured there."""
    kept = metrics.surviving(lines(*range(8)) + lines(*range(3, 6), attempt=2))
    validation = lines(2, 4, 6)
    assert metrics.surviving_validation([*validation, *lines(8)], kept) == lines(2)
    late = lines(4, attempt=2) + lines(6, attempt=3)
    assert metrics.surviving_validation(validation + late, kept) == lines(2) + late
    assert metrics.surviving_validation(validation, []) == validation


def test_a_step_s_line_has_every_number_and_the_attempt():
    line = metrics.line_of(record(7), 3)
    assert line["attempt"] == 3
    assert "terms" not in line
    fields = {k: v for k, v in line.items() if k not in ("attempt", "blocks")}
    assert step_record(**fields, batch_digest=line["blocks"]) == record(7)
    names = {*vars(record(7)), *vars(record(7).result)}
    others = {"result", "measured", "terms", "figures", "batch_digest"}
    assert fields.keys() == names - others


def test_a_line_has_every_term_where_there_are_several():
    terms = {"masked": TermLoss(2.0, 7), "order": TermLoss(None, 0)}
    assert metrics.line_of(step_record(7, terms=terms))["terms"] == {
        "masked": {"loss": 2.0, "targets": 7},
        "order": {"loss": None, "targets": 0},
    }


def test_progress_is_printed_now_and_then_and_at_the_end(now, capsys):
    printer = progress.ProgressPrinter(3)
    for step in range(3):
        printer(record(step))
    written = capsys.readouterr().out.splitlines()
    assert len(written) == 2
    assert written[0].startswith("step 1/3  loss 2.0000  ? left")
    assert written[0].endswith(" 600 tokens/s  ends not known yet")
    assert written[1].startswith("step 3/3")
    assert re.search(r" 0:00:00 left .* ends (\d{4}-\d\d-\d\d )?\d\d:\d\d \S+$", written[1])


def test_progress_renews_one_line_on_a_terminal_and_leaves_the_last(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(progress, "_RENEW_SECONDS", 0.0)
    printer = progress.ProgressPrinter(4, prefix="[s] ")
    for step in range(3):
        printer(record(step))
    printer.say("a line")
    printer.say("another")
    printer(record(3))
    shown = [f"\r\x1b[K[s] step {done}/4  loss 2.0000  0:" for done in range(1, 5)]
    shown[0] = shown[0].replace("  0:", "  ? ")
    shown.insert(3, "\n[s] a line\n[s] another\n")
    assert capsys.readouterr().out == "".join([*shown, "\n"])  # 29 columns: the cursor has the last


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *((0, r"\d\d:\d\d \S+"), (10 * 86400, r"\d{4}-\d\d-\d\d \d\d:\d\d \S+")),
        (1e15, "the end of time"),
    ],
)
def test_the_expected_end_has_its_day_unless_that_is_today(seconds, shown):
    assert re.fullmatch(shown, wording.clock_time(seconds))


def test_the_time_left_is_of_the_usual_step_not_of_the_last_one():
    records = [{**metrics.line_of(record(step)), "seconds": 2.0} for step in range(60)]
    records[0]["seconds"] = records[-1]["seconds"] = 900.0
    assert "0:01:20 left" in progress.progress_line(records, 100)
    older = [{**records[1], "seconds": 50.0}] * 60
    assert "0:01:20 left" in progress.progress_line(older + records[1:], 100)


def test_the_step_that_compiles_kernels_does_not_make_the_end_an_hour_away():
    lines = [{"step": step, "seconds": 60.0 if step < 2 else 1.0} for step in range(3)]
    assert progress.seconds_left(lines, 103) == 100
    first, again = ({"attempt": n, "step": 3, "seconds": 0.1} for n in (2, 3))
    # Relaunches compile again.
    assert progress.seconds_left([*lines, first, again], 103) == 99
    assert progress.seconds_left([first], 103) is progress.seconds_left([], 103) is None


def test_the_share_of_the_peak_that_is_used_is_shown_where_the_peak_is_known():
    line = metrics.line_of(record(0))
    assert progress.progress_line([line], 9).endswith("tokens/s")
    text = progress.progress_line([{**line, "mfu": 0.37, "computed_mfu": 0.305}], 9)
    assert text.endswith("tokens/s  37.0% MFU (30.5% by the pairs computed)")


def test_a_validation_of_several_terms_is_described_by_each_and_not_by_their_perplexity():
    def line(step, masked, sop):
        terms = {name: {"loss": loss} for name, loss in (("masked", masked), ("sop", sop))}
        return {"step": step, "loss": masked + sop, "perplexity": 0.0, "terms": terms}

    text = wording.validation_line([line(3, 5.0, 0.5), line(6, 5.25, 0.5)])
    assert text == (
        "validation after 6 steps: loss 5.7500, masked 5.2500, sop 0.5000 (best 5.5000 after 3)"
    )


def test_the_first_validation_on_other_blocks_says_that_it_is():
    lines = [
        {**evaluation(80, loss, name), "perplexity": 1.0}
        for loss, name in ((5.5, "a"), (5.6, "b"), (5.4, "b"))
    ]
    marked = ["next phase's blocks" in wording.validation_line(lines[:n]) for n in (1, 2, 3)]
    assert marked == [False, True, False]

"""The report of a run."""

from types import SimpleNamespace

import pytest

from finetune import zeroclap as command_line
from pretrain.records import ledger, report
from tests.pretrain.histories import STEPS, History, spiked

SCORE = {"loss": 5.1, "perplexity": 164.0, "targets": 1200}


@pytest.fixture
def history():
    made = spiked()
    made.begin(steps=20)
    made.add("done", attempt=2, step=STEPS)
    return made


def test_the_report_has_picture_table_validation_and_history(
    history, tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    history.measure(5, 4.9, attempt=1)
    corpora = {"all": {"loss": 4.0, "perplexity": 54.6, "targets": 7}}
    history.measure(20, **SCORE, subsets={"A": SCORE, "B": SCORE}, corpora=corpora)
    history.write(run)
    monkeypatch.chdir(run)
    assert command_line.main(["status", ".", "--report"]) == 0
    assert capsys.readouterr().out == "report.md\n"
    text = (run / "report.md").read_text()
    assert text.startswith("# run\n")
    assert (run / "loss.png").stat().st_size > 10_000
    for part in (
        f"    finished: {STEPS:,} of {STEPS:,} steps in 2 attempts\n",
        "![training and validation loss](loss.png)",
        "| tokens read by the surviving steps | 2,900 |",
        "| tokens/s, median | 200 |",
        "| steps computed; lost to rollbacks and crashes | 34; 5 (14.7%) |",
        "| elapsed time; spent in steps | 0:00:00; 0:00:17 |",
        "| 2; 1; 1; 0 |",
        "\n    9 to 133,082  spike ",
        "\n    corpus: ",
        "## Validation after 20 steps",
        *("| all | 1,200 | 5.1000 | 164.00 |", "| B | 1,200 | 5.1000 | 164.00 |"),
        "| all | 7 | 4.0000 | 54.60 |",
        "| all, best (after 5 steps) | 10 | 4.9000 | 134.29 |",
        "\n    next: zeroclap export . --output MODEL\n",
        "  LOSS SPIKE confirmed at step 13",
    ):
        assert part in text


def test_the_speed_is_the_median_also_of_an_even_number_of_steps():
    lines = [{"tokens": tokens, "seconds": 1.0} for tokens in (100, 300)]
    records = [{"time": 0.0, "kind": "crash"}]
    state = ledger.run_state([])
    seen = SimpleNamespace(records=records, state=state, all_lines=lines, lines=lines)
    assert report.costs(seen)["tokens/s, median"] == "200"


def test_a_report_of_several_terms_gives_each_and_no_perplexity_of_their_sum(history, tmp_path):
    run = tmp_path / "run"
    pairs = {"loss": 0.7, "perplexity": 2.01, "targets": 16}
    parts = {"terms": {"masked": SCORE, "sop": pairs}, "subsets": {"A": SCORE, "B": SCORE}}
    history.measure(20, **SCORE, **parts)
    history.write(run)
    assert command_line.main(["status", str(run), "--report"]) == 0
    rows = (run / "report.md").read_text().partition("## Validation")[2].splitlines()[4:9]
    assert rows == [
        "| all | 1,200 | 5.1000 | - |",
        "| masked | 1,200 | 5.1000 | 164.00 |",
        "| sop | 16 | 0.7000 | 2.01 |",
        "| A | 1,200 | 5.1000 | - |",
        "| B | 1,200 | 5.1000 | - |",
    ]


def test_a_run_without_steps_has_no_report_yet(tmp_path, capsys):
    run, history = tmp_path / "run", History()
    history.begin()
    history.write(run)
    assert command_line.main(["status", str(run), "--report"]) == 2
    assert "has no steps to draw" in capsys.readouterr().err

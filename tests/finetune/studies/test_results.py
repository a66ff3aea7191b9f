"""Figures of arms: pairs by seed, intervals, the best level, tokens to a loss."""

import json
import math
import re
from types import SimpleNamespace

import pytest
from scipy import stats

from finetune.studies import report, results
from finetune.studies.checks import check_arms
from finetune.studies.results import LOSS, Curve, Results
from finetune.studies.study import Arm, FineTuning, comparisons, finetuning_arms, load, runs_of
from pretrain.records import ledger, status
from tests.finetune.conftest import result_like

PLAIN = SimpleNamespace(finetune=None, best="", subsets=False)
OURS, THEIRS = Arm((("head", "RoBERTa"),), {}), Arm((("head", "CLAP"),), {})


def measured(**losses):
    """A table of losses by seed for each of the two arms; None: not measured."""
    read = {
        (arm, seed): {} if loss is None else {LOSS: loss}
        for arm, values in ((OURS, losses["ours"]), (THEIRS, losses["theirs"]))
        for seed, loss in enumerate(values)
    }
    return results.table(read)


def test_the_interval_is_that_of_a_paired_t_test_over_the_seeds_that_both_have():
    ours, theirs = [4.0, 4.2, 4.5, 4.1], [3.9, 4.0, 4.4, 4.15]
    tables = measured(ours=[*ours, 99.0, 98.0], theirs=[*theirs, None])
    found = results.paired(tables, OURS, THEIRS).loc[LOSS]
    expected = stats.ttest_rel(theirs, ours).confidence_interval(0.95)
    assert found.seeds == 4
    assert found["mean"] - found.half_width == pytest.approx(expected.low)
    assert found["mean"] + found.half_width == pytest.approx(expected.high)
    assert report._difference(0.2, 0.1) == "**+0.200 ± 0.100**"
    assert report._difference(-0.1, 0.2) == "-0.100 ± 0.200"


def test_one_seed_has_no_interval_and_no_seed_no_difference():
    found = results.paired(measured(ours=[4.0], theirs=[3.0, 2.0]), OURS, THEIRS).loc[LOSS]
    assert report._difference(found["mean"], found.half_width) == "-1"
    found = results.paired(measured(ours=[4.0, 3.0], theirs=[3.0, 2.0]), OURS, THEIRS).loc[LOSS]
    assert report._difference(found["mean"], found.half_width) == "-1"  # of constant answers
    found = results.paired(measured(ours=[4.0, None], theirs=[None, 2.0]), OURS, THEIRS).loc[LOSS]
    assert report._difference(found["mean"], found.half_width) == ""


def test_of_the_best_factor_the_level_with_the_lowest_mean_loss_is_left():
    def arm(head, rate):
        return Arm((("head", head), ("rate", rate)), {})

    losses = {
        arm("RoBERTa", "1e-3"): [4.0, 4.4],
        arm("RoBERTa", "2e-3"): [4.1, 4.1],
        arm("CLAP", "1e-3"): [3.8, 3.8],
        arm("CLAP", "2e-3"): [3.0, math.inf],
    }
    read = {(a, seed): {LOSS: v} for a, vs in losses.items() for seed, v in enumerate(vs)}
    tables = results.table(read)
    found = results._best(Results(tables, {}, tables, {}, []), "rate")
    assert [*found.pretraining] == [arm("RoBERTa", "2e-3"), arm("CLAP", "1e-3")]
    assert comparisons(found.pretraining, "rate") == [(arm("RoBERTa", "2e-3"), arm("CLAP", "1e-3"))]
    alone = {OURS: found.pretraining[arm("RoBERTa", "2e-3")]}
    study = SimpleNamespace(best="rate", pairs=())
    assert report._comparison("Differences", study, [], alone) == ""


def test_a_run_that_diverged_has_an_infinite_loss_and_ends_no_report():
    tables = measured(ours=[4.0, 4.1], theirs=[math.inf, 4.0])
    found = results.paired(tables, OURS, THEIRS).loc[LOSS]
    assert report._difference(found["mean"], found.half_width) == "+inf"
    assert "inf (4.00 to inf)" in report._table("Pretraining", tables, report._median)
    assert "inf ± nan" in report._latex(tables)


def test_the_numbers_of_a_cell_have_equally_many_digits_and_a_short_cost_is_not_zero():
    tables = measured(ours=[74.5, 75.5, 76.5], theirs=[9.5, 10.5, 12.5])
    assert "75.50 ± 1.00" in report._latex(tables)
    table = report._table("Fine-tuning", tables, report._median)
    assert "| 75.50 (74.50 to 76.50) |" in table
    assert "| 10.50 (9.50 to 12.50) |" in table
    assert report._sum_up("device hours", 0.1 / tables[OURS][LOSS]) == "0.00397"


def test_the_report_has_a_line_for_every_number_and_an_empty_cell_for_none():
    tables = results.table({(OURS, 1): {LOSS: 4.0, "spikes": 0}, (THEIRS, 2): {LOSS: 3.0}})
    rows = report._csv(Results(tables, {}, {}, {}, [])).splitlines()
    assert rows == [
        "part,arm,seed,figure,value",
        "pretraining,RoBERTa,1,validation loss,4.0",
        "pretraining,RoBERTa,1,spikes,0.0",
        "pretraining,CLAP,2,validation loss,3.0",
    ]
    assert report._csv(Results({}, {}, {}, {}, [])).splitlines() == rows[:1]
    table = report._table("Cost", tables, report._sum_up).splitlines()
    assert table[-2:] == ["| RoBERTa | 4 | 0 |", "| CLAP | 3 |  |"]


@pytest.fixture
def view(monkeypatch, tmp_path):
    """Runs that have begun, and whether each is finished; a text is an error."""
    found = {}

    def look(run):
        if isinstance(found[run.parent.name], str):
            raise ValueError(found[run.parent.name])
        return SimpleNamespace(activity=status.FINISHED if found[run.parent.name] else "")

    def begin(runs):
        found.update(runs)
        for name in runs:
            (tmp_path / name / "run").mkdir(parents=True)
            (tmp_path / name / "run" / ledger.FILE_NAME).touch()

    monkeypatch.setattr(status, "view", look)
    monkeypatch.setattr(results, "_curve", lambda view: Curve([], [], [], []))
    monkeypatch.setattr(results, "_cost", lambda view: {})
    return begin


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_a_row_of_scores_is_a_seed_of_fine_tuning_where_pretraining_has_one(view, tmp_path, seeds):
    """So a study with one pretrained model an arm has intervals."""
    for arm, of_arm in ((OURS, {1: 0.5, 2: 0.6}), (THEIRS, {1: 0.7, 2: 0.6, 3: 0.8})):
        for seed, value in of_arm.items():
            folder = tmp_path / f"{arm.folder}-seed1" / "scores" / "all" / f"CoLA-{seed}"
            folder.mkdir(parents=True)
            result = result_like("CoLA", seed, collapsed=seed > 1, value=value)
            # Of another epoch, which the study does not report.
            result["best"] = result_like("CoLA", value=0.9)["best"]
            (folder / "result.json").write_text(json.dumps(result))
    runs = runs_of([OURS, THEIRS], [1])
    view({run.name: True for run in runs})
    wanted = FineTuning(["CoLA"], seeds=[1, 2, 3])
    loaded = SimpleNamespace(best="", subsets=False, seeds=seeds, finetune=wanted)
    collected = results.collect(loaded, runs, tmp_path)
    assert collected.unfinished == [f"1 of 3 fine-tunings of {OURS.folder}-seed1"]
    found = collected.finetuning
    table = report._table("Fine-tuning", found, report._median)
    latex = report._latex(found)
    assert re.search(r"CLAP & 70.00( ± 10.00)? & 2 ", latex)  # a number in LaTeX as well
    assert "Scores of collapsed runs count." in latex
    assert "collapsed" not in report._latex(collected.pretraining)
    if len(seeds) > 1:
        assert found[THEIRS].to_dict("index") == {1: {"CoLA": pytest.approx(70), "collapsed": 2}}
        assert "| CLAP | 70.00 | 2 |" in table
        # A mean over two seeds is not compared with one over three.
        assert results.paired(found, OURS, THEIRS).loc["CoLA"].seeds == 0
        assert "| RoBERTa |  | 1 |" in table
    else:
        assert found[THEIRS]["CoLA"].tolist() == pytest.approx([70, 60, 80])
        assert "| CLAP | 70.00 (60.00 to 80.00) | 2 |" in table
        assert results.paired(found, OURS, THEIRS).loc["CoLA"].seeds == 2


def test_runs_that_cannot_be_read_or_are_not_finished_are_named_and_left_out(view, tmp_path):
    """Their arms keep their order: the others are compared with the first one."""
    runs = runs_of([OURS, THEIRS], [1, 2, 3])
    first, second, third, fourth = (run.name for run in runs[:4])
    changed = "ledger.jsonl: record 3 was changed"
    view({first: changed, second: True, third: True, fourth: False})
    found = results.collect(PLAIN, runs, tmp_path)
    not_begun = "2 of 6 runs, which have not begun"
    assert found.unfinished == [not_begun, f"{first} ({changed})", fourth]
    assert [*found.pretraining] == [OURS, THEIRS]
    evaluation = tmp_path / third / "evaluation.json"
    for damage in ('[{"total": {}}]', "{", "5", "[5]", "null"):
        evaluation.write_text(damage)
        found = results.collect(PLAIN, runs, tmp_path)
        assert f"{third} ({evaluation}: is damaged: " in found.unfinished[2]
        assert [*found.pretraining] == [THEIRS]


def test_a_damaged_result_of_a_fine_tuning_is_named(tmp_path):
    path = tmp_path / "CoLA-pretrained-seed1" / "result.json"
    path.parent.mkdir()
    for damage in ('{"plan": {}, "best": {}, "last": {}, "epochs": []}', "{", "[]"):
        path.write_text(damage)
        with pytest.raises(ValueError, match=re.escape(f"{path}: not a result of ")):
            results._scores(tmp_path)


def test_names_of_arms_are_text_in_every_table():
    arm = Arm((("cost", r"$5 | a_b \ {x}^2 ~ 6 %"),), {})
    measured = results.table({(arm, 1): {LOSS: 4.0}, (arm, 2): {LOSS: 5.0}})
    row = report._table("Pretraining", measured, report._median).splitlines()[4]
    assert len(re.split(r"(?<!\\)\|", row)) == 4
    (row,) = [
        line for line in report._latex(measured).splitlines() if "cost" in line or "a\\_b" in line
    ]
    assert row == (
        r"\$5 | a\_b \textbackslash \space \{x\}\textasciicircum 2 \textasciitilde \space 6 \%"
        r" & 4.5000 ± 0.7071 \\"
    )


def test_the_cost_has_abandoned_steps_and_the_devices_of_each_attempt():
    lines = [  # the second attempt repeats step 1
        {"attempt": attempt, "step": step, "tokens": 100, "seconds": 1800}
        for attempt, step in [(1, 0), (1, 1), (2, 1)]
    ]
    records = [{"kind": "attempt", "attempt": n, "ranks": ranks} for n, ranks in ((1, 8), (2, 4))]
    seen = SimpleNamespace(
        all_lines=lines, records=records, state=SimpleNamespace(spikes=[], rollbacks=[1])
    )
    found = results._cost(seen)
    assert (found["tokens"], found["device hours"], found["rollbacks"]) == (300, 10, 1)


def test_arms_that_differ_in_several_settings_are_confounded_setting_by_setting(
    study_file, tmp_path
):
    """Also those of fine-tuning; a level that changes one setting confounds nothing."""
    path = tmp_path / "study.yaml"
    path.write_text(
        study_file.read_text().replace("variant: alibi}", "variant: learned-clap}")
        + "finetune: {tasks: [CoLA], factors: {way: {a: {}, b: {pooling: mean, epochs: 3}}}}\n"
    )
    loaded = load(str(path), toy=False)
    checked = check_arms(loaded, [])
    pretraining = results.table({(arm, 1): {LOSS: 4.0} for arm in checked})
    text = report._comparison("Differences", loaded, checked, pretraining)
    listed = dict(line[2:].split(": ") for line in text.splitlines() if line.startswith("- "))
    clap = "model.embedding_norm, model.head, model.normalize_embeddings"
    assert set(listed.values()) == {clap}
    assert len(listed) == 2  # with and without dropout, which alone is one setting
    assert "Of one seed, which gives no interval." in text
    first = next(iter(checked)).levels
    ways = [Arm((*first, *way.levels), way.settings) for way in finetuning_arms(loaded)]
    scores = results.table({(way, 1): {"CoLA": 1.0} for way in ways})
    text = report._comparison("Differences", loaded, checked, scores)
    assert "learned, some, b − learned, some, a: epochs, pooling" in text

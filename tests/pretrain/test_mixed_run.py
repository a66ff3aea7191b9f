"""A run on two corpora: a weight change, a spike, two ranks, then more steps on one rank."""

import itertools
import json

import pytest

from pretrain.data.mixture import Mixture
from pretrain.records import checkpoints, ledger, metrics, wording
from tests.pretrain.builders import main

FAULT = ["fault.random_labels=[22, 34]"]
LONGER = ["training.steps=52", "supervision.processes_per_node=1"]


def corpora(first, second, *changes):
    """Settings of a run on a and b, with (step, weight of b) of each change."""
    firsts = [step for step, _ in changes]
    lengths = [{"steps": end - first} for first, end in itertools.pairwise([0, *firsts])]
    weights = [{}, *({"data": {"corpora": {"b": {"weight": weight}}}} for _, weight in changes)]
    phases = [{**length, **each} for length, each in zip([*lengths, {}], weights, strict=True)]
    return [
        'data.corpus=""',
        f"data.corpora={{a: {{path: {first}, weight: 2}}, b: {{path: {second}}}}}",
        f"phases={json.dumps(phases)}",
    ]


@pytest.fixture(scope="module")
def run(recipe, corpus, other_corpus, tmp_path_factory):
    """The run's folder and the settings that it ended with."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    words = [recipe.path, f"folder={folder}", *FAULT]
    before = corpora(corpus, other_corpus, (8, 3))
    code, said = main("supervise", *words, *before)
    assert code == 0, said
    assert "b, train: " in said
    # Another recipe without a step that it holds from: refused, and the run stays as it is.
    after = corpora(corpus, other_corpus, (8, 3), (44, 0.5))
    code, said = main("supervise", *words, *LONGER, *after)
    assert (code, "add `--from STEP`" in said) == (2, True)
    code, said = main("supervise", *words, *LONGER, *after, "--from", 40)
    assert code == 0, said
    return folder


@pytest.mark.slow
def test_every_block_of_each_corpus_was_read_once_an_epoch(run):
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    attempts = [record for record in records if record["kind"] == "attempt"]
    assert [record["ranks"] for record in attempts] == [2, 2, 1]
    assert len(ledger.segments(records, ledger.SPIKE)) == 1
    code, said = main("audit", run)
    assert code == 0, said
    assert "52 steps survive" in said
    assert "a, epoch 0: " in said
    assert "b, epoch 0: " in said
    assert "each once" in said
    # Another share than the weights say is found.
    (run / metrics.METRICS).write_text(
        (run / metrics.METRICS)
        .read_text()
        .replace(metrics.read_metrics(run / metrics.METRICS)[-1]["blocks"], "0" * 16)
    )
    code, said = main("audit", run)
    assert code == 1
    assert "step 51 read other blocks" in said


@pytest.mark.slow
def test_status_report_and_checkpoints_say_what_was_drawn_from_each(run):
    weights = [(0, [2, 1]), (8, [2, 3]), (44, [2, 0.5])]
    counts = Mixture.by_step(weights, lambda step: 8 * step).counts(8 * 52)
    code, said = main("status", run, "--json")
    assert code == 0
    drawn = json.loads(said)["corpora"]
    assert [(c["name"], c["blocks"], c["share"]) for c in drawn] == [
        ("a", counts[0], 0.8),
        ("b", counts[1], 0.2),
    ]
    report = (run / "report.md").read_text()
    assert f"- a: {counts[0]:,} blocks drawn, {wording.epochs(drawn[0]['epochs'])} epochs" in report
    lines = metrics.surviving(metrics.read_metrics(run / metrics.METRICS))
    assert [sum(line[f"blocks/{name}"] for line in lines) for name in "ab"] == counts
    assert "| b/" in report
    measured = metrics.read_metrics(run / metrics.VALIDATION)[-1]
    assert {*measured["corpora"]} == {"a", "b"}
    targets = [score["targets"] for score in measured["corpora"].values()]
    assert sum(targets) == measured["targets"]
    manifest = checkpoints.read_manifest(checkpoints.folder_of(run, 52))
    assert [c["name"] for c in manifest["corpora"]] == ["a", "b"]
    assert len(manifest["lineage"]) == 2

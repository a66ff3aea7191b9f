"""What rank 0 writes while an attempt runs."""

import pytest

from pretrain.config.run import RunConfig
from pretrain.data.lineage import Lineage
from pretrain.records import ledger
from pretrain.train.log import RunLog
from pretrain.train.resume import Start


@pytest.fixture
def log(tmp_path):
    path = tmp_path / ledger.FILE_NAME
    ledger.append(
        path, "attempt", attempt=1, token="t", step=0, pid=1, host="here", ranks=1, seed=1
    )
    state = ledger.run_state(ledger.read_ledger(path))
    start = Start(1, "t", 0, state, Lineage.begin(10, 1), 1.0, 100, [])
    return RunLog(RunConfig(folder=str(tmp_path)), start)


def kinds(folder):
    return [record["kind"] for record in ledger.read_ledger(folder / ledger.FILE_NAME)]


def test_a_superseded_attempt_records_nothing(log, tmp_path):
    path = tmp_path / ledger.FILE_NAME
    ledger.append(path, "attempt", attempt=2, token="u", step=0, pid=2, host="there")
    with pytest.raises(ValueError, match="attempt 2"):
        log.record("suspect", step=12)
    assert kinds(tmp_path) == ["attempt", "attempt"]


def test_a_log_without_files_of_its_own_still_records(log, tmp_path):
    before = sorted(tmp_path.iterdir())
    log.sync(10)
    scores = {"total": {"loss": 2.0, "perplexity": 7.4, "targets": 9}, "terms": {}, "subsets": {}}
    log.validated(10, scores, "a")
    log.record("commit", step=10)
    log.close()
    assert kinds(tmp_path) == ["attempt", "commit"]
    assert sorted(tmp_path.iterdir()) == before


def test_evaluations_that_cannot_be_compared_are_other_curves(log, monkeypatch):
    shown = []
    log.open([])
    monkeypatch.setattr(log, "_scalars", lambda step, values: shown.append({*values}))
    scores = {"total": {"loss": 2.0, "perplexity": 7.4, "targets": 9}, "terms": {}, "subsets": {}}
    for step, measure in ((10, "a"), (20, "a"), (20, "b")):
        log.validated(step, scores, measure)
    first = {"validation/loss", "validation/perplexity"}
    assert shown == [first, first, {f"{name}@b" for name in first}]
    log.close()

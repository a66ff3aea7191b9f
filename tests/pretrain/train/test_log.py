"""What rank 0 writes while an attempt runs."""

import dataclasses
import errno
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pretrain.checks import needs
from pretrain.config.run import RunConfig
from pretrain.data.lineage import Lineage
from pretrain.data.mixture import Mixture
from pretrain.data.order import Order
from pretrain.loop.protocols import MicroBatch
from pretrain.records import checkpoints, ledger, metrics
from pretrain.records.checkpoints import ResumePoint
from pretrain.records.figures import PAIRS
from pretrain.records.segments import Course
from pretrain.train import setup
from pretrain.train.attempt import Attempt
from pretrain.train.log import RunLog, discontinuity, recorded_loss
from pretrain.train.measurements import Measurements
from pretrain.train.setup import ResumeState
from pretrain.train.trackers import TensorBoard
from tests.pretrain.builders import step_record
from tests.pretrain.histories import SEED, History, recipe


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / ledger.FILE_NAME
    begun = {"attempt": 1, "token": "t", "step": 0, "pid": 1, "host": "here"}
    ledger.append(path, "attempt", **begun, ranks=1, seed=1, micro_batch_size=1)
    state = ledger.run_state(ledger.read_ledger(path))
    order = Order.begin(Mixture(((0, (1,)),)), [10], 1)
    start = ResumeState(1, "t", 0, state, order, 100, [{"name": ""}], 1)
    config = RunConfig(folder=str(tmp_path))
    monkeypatch.setattr(RunLog, "_announcement", list)
    run = SimpleNamespace(config=config, run_folder=tmp_path, segments=config.segments, start=start)
    run.architecture, run.group = config.architecture(97), SimpleNamespace(world_size=2)
    run.environment = {"accelerator": "NVIDIA H100 80GB HBM3"}
    opened = RunLog(run)
    opened.open()
    yield opened
    opened.close()


def test_a_superseded_attempt_records_nothing(log, tmp_path):
    path = tmp_path / ledger.FILE_NAME
    ledger.append(path, "attempt", attempt=2, token="u", step=0, pid=2, host="there")
    with pytest.raises(ValueError, match="attempt 2"):
        log.record("suspect", step=12)
    assert [record["kind"] for record in ledger.read_ledger(path)] == ["attempt", "attempt"]


def test_the_share_of_the_peak_counts_all_pairs_and_those_computed(log):
    now, model = log._setup.config, log._setup.architecture
    length = now.data.sequence_length
    positions = now.batch.global_batch_size * length
    computed = (positions * 12 * length / 4, positions * 12 * length / 8)  # of both ranks
    found = log._figures(step_record(0, measured={PAIRS: computed}))
    for name, pairs in (("mfu", 12 * length), ("computed_mfu", 12 * length * 3 / 8)):
        flops = needs.flops_per_token(model, length, now.objective.target_share, pairs) * positions
        assert found[name] == pytest.approx(flops / step_record(0).seconds / (2 * 989e12))
    log._setup.environment["accelerator"] = "cpu"
    assert not {"mfu", "computed_mfu"} & log._figures(step_record(0)).keys()


def test_an_empty_micro_batch_adds_no_pairs_to_those_computed(log):
    setup = log._setup
    setup.model, setup.process = torch.nn.Linear(1, 1), SimpleNamespace(device=torch.device("cpu"))
    setup.model.head = None
    setup.environment["attention_backend"] = "dense"
    batch = MicroBatch(0, {"document_ids": np.ones((2, 8), bool)}, 16, (3,))
    take = Measurements(setup).take
    assert take(0.0, [batch, batch.emptied()])[PAIRS] == take(0.0, [batch])[PAIRS] > 0


def test_evaluations_that_cannot_be_compared_are_other_curves(log, monkeypatch):
    shown = []
    monkeypatch.setattr(log, "_scalars", lambda step, values: shown.append({*values}))
    scores = {"total": {"loss": 2.0, "perplexity": 7.4, "targets": 9}, "terms": {}, "subsets": {}}
    for step, validation_id in ((10, "a"), (20, "a"), (20, "b")):
        log.validated(step, scores, validation_id)
    first = {"validation/loss", "validation/perplexity"}
    assert shown == [first, first, {f"{name}@b" for name in first}]


def test_evaluations_without_an_id_are_read(log, tmp_path):
    line = {"attempt": 1, "step": 9, "loss": 2.0, "perplexity": 7.4, "subsets": {}}
    (tmp_path / metrics.VALIDATION).write_text(f"{json.dumps(line)}\n")
    log.open()


def test_an_attempt_draws_again_what_tensorboard_drops_at_its_first_step(log, monkeypatch):
    """The validation after as many updates; later ones are measured again."""
    for step, loss in ((0, 4.0), (10, 3.0), (10, 2.0), (20, 1.0)):
        total = {"loss": loss, "perplexity": 7.4, "targets": 9}
        log.validated(step, {"total": total, "terms": {}, "subsets": {}}, "a")
    shown = []
    monkeypatch.setattr(TensorBoard, "scalars", lambda _, *point: shown.append(point))
    log._start = dataclasses.replace(log._start, step=10)
    log.open()
    assert shown == [(10, {"validation/loss": 2.0, "validation/perplexity": 7.4})]


LINES = [
    {"attempt": attempt, "seed": seed, "step": step, "loss": loss}
    for attempt, seed, step, loss in (
        *((1, 1, 10, 5.0), (1, 1, 11, 5.1), (1, 1, 12, None)),
        *((2, 1, 10, 6.0), (3, 2, 10, 7.0)),
    )
]


def test_the_seed_of_an_attempt_is_that_of_the_order_in_its_first_step(tmp_path, monkeypatch):
    """The checkpoint that the rollback went back to was damaged; then the batch grew."""
    monkeypatch.setattr(setup, "_remove_rejected", lambda *_: None)
    history = History(sizes=[(0, 2)])
    history.roll_back(6)
    seeds = []
    for size in (2, 4):
        history.segment("user", 6, recipe([(0, size)]))
        history.write(run := tmp_path / str(size))
        course = Course(RunConfig(folder=str(run)), None, {})
        points = (ResumePoint(step, None, {}) for step in (4, 5, 6))
        starts = [setup.begin(course, None, {}, point, "t", 0) for point in points]
        seeds.append([start.seed - SEED for start in starts])
    assert seeds == [[0, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize(
    ("step", "seed", "micro_batch_size", "kernels", "expected"),
    [
        (10, 1, 4, "dense", 5.0),
        (10, 1, 8, "dense", 6.0),
        (10, 2, 8, "dense", 7.0),
        (10, 2, 8, "flex", math.nan),
        (10, 2, 4, "dense", math.nan),
        (12, 1, 4, "dense", math.nan),  # metrics.jsonl has null where a loss is not finite
        (13, 1, 4, "dense", math.nan),
    ],
)
def test_the_loss_to_repeat_is_that_of_the_same_seed_micro_batches_and_kernels(
    step, seed, micro_batch_size, kernels, expected
):
    attempts = [(1, 4, "dense"), (2, 8, "dense"), (3, 8, "dense"), (4, micro_batch_size, kernels)]
    names = ("attempt", "micro_batch_size", "kernels")
    records = [{"kind": "attempt", **dict(zip(names, each, strict=True))} for each in attempts]
    state = ledger.run_state([{"kind": "segment", "why": "start", "step": 0, "seed": seed}])
    start = ResumeState(4, "t", step, state, Lineage.begin(10, seed), 0, [], seed)
    found = recorded_loss(LINES, records, start)
    assert found == pytest.approx(expected, nan_ok=True)
    # Another recipe has other losses from its step on.
    for first in (step, step + 1):
        later = [*records, {"kind": "segment", "recipe": "0a1b", "step": first}]
        found = recorded_loss(LINES, later, start)
        assert found == pytest.approx(math.nan if first == step else expected, nan_ok=True)


@pytest.mark.parametrize(
    ("loss", "recorded", "reason"),
    [
        (5.00001, 5.0, ""),
        (5.0002, 5.0, "loss 5.000200; an earlier attempt computed 5.000000 in this step"),
        (math.nan, 5.0, "loss nan; an earlier attempt computed 5.000000 in this step"),
        (5.0, math.nan, ""),
    ],
)
def test_a_first_loss_that_differs_from_the_recorded_one_is_named(loss, recorded, reason):
    assert discontinuity(loss, recorded) == reason


def test_a_commit_counts_though_older_checkpoints_cannot_be_deleted_now(monkeypatch):
    def fails(step):
        raise OSError(errno.ESTALE, "Stale file handle")

    said = []
    monkeypatch.setattr(checkpoints, "manifest_hash", lambda run, step: "hash")
    log = SimpleNamespace(record=lambda kind, **_: said.append(kind), warn_once=said.append)
    run, group = SimpleNamespace(run_folder=""), SimpleNamespace(world_size=1)
    Attempt._commit(SimpleNamespace(setup=run, group=group, log=log, _delete_old=fails), 5)
    assert said[0] == "commit"
    assert "older checkpoints are not deleted for now: [Errno 116] Stale file handle" in said[1]

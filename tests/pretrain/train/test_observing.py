"""Whether the first loss after a resume is the one that was recorded."""

import math

import pytest

from pretrain.data.lineage import Lineage
from pretrain.records import ledger
from pretrain.train.observing import continuity_check, recorded_loss
from pretrain.train.resume import Start
from tests.pretrain.builders import step_record

LINES = [
    {"attempt": attempt, "seed": seed, "step": step, "loss": loss}
    for attempt, seed, step, loss in (
        *((1, 1, 10, 5.0), (1, 1, 11, 5.1), (1, 1, 12, None)),
        *((2, 1, 10, 6.0), (3, 2, 10, 7.0)),
    )
]


@pytest.mark.parametrize(
    ("step", "seed", "micro_batch_size", "expected"),
    [
        (10, 1, 4, 5.0),
        (10, 1, 8, 6.0),
        (10, 2, 8, 7.0),
        (10, 2, 4, math.nan),
        (12, 1, 4, math.nan),  # metrics.jsonl has null where a loss is not finite
        (13, 1, 4, math.nan),
    ],
)
def test_the_loss_to_repeat_is_that_of_the_same_seed_and_micro_batches(
    step, seed, micro_batch_size, expected
):
    sizes = {1: 4, 2: 8, 3: 8}
    records = [
        {"kind": "attempt", "attempt": attempt, "micro_batch_size": size}
        for attempt, size in sizes.items()
    ]
    state = ledger.run_state([{"kind": "segment", "why": "start", "step": 0, "seed": seed}])
    start = Start(4, "t", step, state, Lineage.begin(10, seed), 1.0, 0, [])
    found = recorded_loss(LINES, records, start, micro_batch_size)
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("losses", "recorded", "reason"),
    [
        ([5.00001, 9.0], 5.0, ""),
        ([5.0002, 5.0], 5.0, "loss 5.000200 where the same step, done before, had 5.000000"),
        ([math.nan], 5.0, "loss nan where the same step, done before, had 5.000000"),
        ([5.0], math.nan, ""),
    ],
)
def test_the_first_loss_alone_is_compared(losses, recorded, reason):
    reports = []
    observe = continuity_check(10, recorded, lambda *report: reports.append(report))
    for step, loss in enumerate(losses, start=10):
        observe(step_record(step, loss))
    assert reports == ([(10, reason)] if reason else [])

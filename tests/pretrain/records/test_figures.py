"""Figures beside a step's loss."""

import math

import pytest

from pretrain.loop.protocols import TermLoss
from pretrain.records.figures import BETA, MEMORY, SECONDS, curves, figures, perplexity
from tests.pretrain.builders import step_record

MEASURED = {SECONDS: (0.1, 0.4, 0.2), MEMORY: (4e9, 6e9, 5e9), BETA: (1.25,)}


def record_of(measured=MEASURED, loss=2.0, **more):
    return step_record(7, loss, tokens=1500, measured=measured, **more)


RECORD = record_of()


def figures_of(record=RECORD, deviations=None):
    counted = {"loss_deviations": record.result.loss, "other": math.nan}
    return figures(record, 2000, deviations or counted)


def test_figures_say_what_a_step_was_like():
    assert figures_of() == {
        "perplexity": math.exp(2.0),
        "tokens_per_second": 750.0,
        "padding": 0.25,
        "loss_deviations": 2.0,
        "beta": 1.25,
        "slowest_rank": 1,
        "slowest_rank_seconds": 0.4,
        "other_ranks_seconds": pytest.approx(0.15),
        "memory_bytes": 6e9,
    }


@pytest.mark.parametrize(
    ("record", "absent"),
    [
        (record_of({**MEASURED, BETA: (math.nan,)}), {"beta"}),
        (record_of(loss=math.nan), {"perplexity", "loss_deviations"}),
        (
            record_of({SECONDS: (0.1,), MEMORY: (6e9,), BETA: (1.25,)}),
            {"slowest_rank", "slowest_rank_seconds", "other_ranks_seconds"},
        ),
        (
            record_of({SECONDS: (math.nan,) * 2, MEMORY: (math.nan,) * 2}),
            {"slowest_rank", "slowest_rank_seconds", "other_ranks_seconds", "memory_bytes", "beta"},
        ),
    ],
    ids=["beta elsewhere", "not finite", "one rank", "first step, no CLAP"],
)
def test_a_figure_that_is_not_known_is_left_out(record, absent):
    assert figures_of().keys() - figures_of(record).keys() == absent


def test_the_perplexity_of_several_terms_is_that_of_the_tokens():
    terms = {"masked-lm": TermLoss(1.5, 100), "sentence-order": TermLoss(0.5, 8)}
    assert perplexity(record_of(terms=terms)) == math.exp(1.5)


def test_every_figure_has_one_curve():
    shown = figures_of(deviations={"loss_deviations": 1.0, "gradient_norm_deviations": 2})
    found = curves(record_of(figures=shown))
    assert sorted(set(shown.values()) - set(found.values())) == []
    assert found["spike/gradient_norm_deviations"] == 2

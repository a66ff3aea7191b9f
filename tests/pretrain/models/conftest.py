"""Results that the tests of tables and of pictures share."""

import pytest

from pretrain.models.scores import Measured, Refusal
from tests.pretrain.models.results import evaluation


@pytest.fixture
def measured():
    """Perplexities of Press et al. 2022, table 2; one length could not be measured."""
    early = {0: (90.0,), 16: (40.0,), 256: (20.0,)}
    sinusoidal = [
        evaluation(3512, 178.97, {**early, 512: (150.0,), 2048: (1e304,)}, interpolated=25.0),
        evaluation(512, 20.05, early),
    ]
    alibi = [
        evaluation(512, 19.73, early),
        Refusal(1000, "no memory"),
        evaluation(3512, 18.40, {**early, 512: (18.0,), 2048: (17.0,)}),
    ]
    return [Measured("sinusoidal", 512, sinusoidal), Measured("alibi", 600, alibi)]

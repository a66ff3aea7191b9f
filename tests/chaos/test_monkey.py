"""Random faults, after which the run is what it would have been: monkey.py, a few faults long."""

import pytest

from tests.chaos import monkey


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        # Their 15 faults are of all kinds.
        pytest.param("zero1-fp32", 37, marks=pytest.mark.slow),
        pytest.param("zero3-bf16-workers", 14, marks=pytest.mark.long),
        pytest.param("zero2-shrinking", 33, marks=pytest.mark.long),
    ],
)
def test_a_run_that_random_faults_strike_ends_as_if_nothing_had_happened(name, seed, tmp_path):
    print(monkey.play(tmp_path / "monkey", name, faults=15, seed=seed))

"""Random faults, after which the run is what it would have been: monkey.py, a few faults long."""

import pytest

from tests.chaos import monkey


@pytest.mark.slow
def test_a_run_that_random_faults_strike_ends_as_if_nothing_had_happened(tmp_path):
    # With this seed the nine faults are one of each kind.
    print(monkey.play(tmp_path / "monkey", "zero1-fp32", faults=9, seed=4778))

"""Random faults, after which the run is what it would have been: monkey.py, five faults long."""

import pytest

from tests.chaos import monkey


@pytest.mark.slow
def test_a_run_that_random_faults_strike_ends_as_if_nothing_had_happened(tmp_path):
    # With this seed: torn lines, a full disk, stale control files, a process that is stopped until
    # it is killed, and a damaged checkpoint. test_faults.py has the other kinds.
    print(monkey.play(tmp_path / "monkey", "zero1-fp32", faults=5, seed=10108))

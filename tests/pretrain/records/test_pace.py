"""How long ranks work by themselves, and which of them is slow."""

import pytest

from pretrain.records import pace

HOSTS = [f"gpu-{rank}" for rank in range(4)]


def lines(count, rank=1, seconds=0.523, others=0.4):
    names = ("slowest_rank", "slowest_rank_seconds", "other_ranks_seconds")
    return [dict(zip(names, (rank, seconds, others), strict=True))] * count


def test_a_slow_rank_is_named_with_its_host():
    slow = pace.slow_rank(lines(pace.LEAST_STEPS), HOSTS)
    assert str(slow) == (
        "rank 1 on gpu-1 is slow: it works 0.523 s in a step by itself, the others 0.4 s; every "
        "step waits for it"
    )


@pytest.mark.parametrize(
    ("seen", "slow"),
    [
        ([], None),
        (lines(pace.LEAST_STEPS - 1), None),
        ([{}] * 5 + lines(pace.LEAST_STEPS), 1),
        (lines(pace.STEPS, seconds=0.49), None),
        (lines(24, rank=1) + lines(26, rank=2), 2),
        (lines(25, rank=1) + lines(25, rank=2), None),
        (lines(40, rank=3) + lines(pace.STEPS, seconds=0.4), None),
        (lines(45) + lines(5, seconds=0.1), 1),
    ],
    ids=["none", "few", "enough", "alike", "most", "by turns", "long ago", "a short lull"],
)
def test_a_rank_is_slow_if_the_others_wait_for_it_in_most_steps(seen, slow):
    found = pace.slow_rank(seen, HOSTS)
    assert (found and found.rank) == slow


def test_ranks_that_share_cores_are_not_slow():
    seen = lines(pace.STEPS, seconds=2.0)
    assert not pace.slow_rank(seen, ["here"] * 4, "cpu")
    assert pace.slow_rank(seen, ["here"] * 4, "NVIDIA H100 80GB HBM3")
    assert pace.slow_rank(seen, HOSTS, "cpu")


def test_a_backward_pass_counts_as_two_forward_passes():
    assert pace.own_seconds(1.0, 2.0) == 7.0

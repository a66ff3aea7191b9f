"""Actions that succeed or fail on all ranks alike."""

import pytest

from pretrain.run.collective import Failure, Group, on_every_rank


def test_a_reason_is_given_once_with_its_ranks_unless_all_ranks_have_it():
    def message(*reasons):
        def refuse():
            raise ValueError(reasons[0])

        with pytest.raises(Failure) as caught:
            on_every_rank(refuse, lambda mine: [mine, *((0, r) for r in reasons[1:])])
        return str(caught.value)

    assert message("full", "", "full") == "full (rank 0, 2)"
    assert message("full", "full", "full") == "full"
    assert message("full", "gone", "") == "full (rank 0); gone (rank 1)"
    assert on_every_rank(lambda: 3, lambda mine: [mine, (4, "")]) == [3, 4]


def test_rank_0_alone_acts_and_every_rank_gets_its_result():
    answers = (3, "")
    assert Group(1, 2, lambda mine: [answers, mine]).on_rank_0(pytest.fail) == 3
    with pytest.raises(Failure, match=r"full \(rank 0\)"):
        Group(1, 2, lambda mine: [(None, "full"), mine]).on_rank_0(pytest.fail)

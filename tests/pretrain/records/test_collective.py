"""Actions that succeed or fail on all ranks alike."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pretrain.records import collective
from pretrain.records.collective import Failure, Group, on_every_rank


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
    assert Group(1, 2, lambda mine: ["", mine], lambda mine: 3).on_rank_0(pytest.fail) == 3
    with pytest.raises(Failure, match=r"full \(rank 0\)"):
        Group(1, 2, lambda mine: ["full", mine], lambda mine: None).on_rank_0(pytest.fail)


def test_the_result_of_rank_0_is_broadcast_and_only_the_reason_gathered():
    gathered = []
    group = Group(0, 1, lambda mine: gathered.append(mine) or [mine], lambda mine: [mine])
    assert group.on_rank_0(lambda: "a long result") == ["a long result"]
    assert gathered == [""]


def test_ranks_meet_again_and_again_while_rank_0_takes_long(monkeypatch):
    monkeypatch.setattr(collective, "_WAIT_SECONDS", 0.01)
    met = threading.Barrier(2, timeout=10)
    shared = [None, None]
    times = []

    def rank(number):
        def gather(value):
            shared[number] = value
            met.wait()
            values = list(shared)
            met.wait()
            times.append(time.monotonic())
            return values

        group = Group(number, 2, gather, lambda value: gather(value)[0])
        done = group.on_rank_0_slowly(lambda: time.sleep(0.2) or number)
        with pytest.raises(Failure, match=r"^full \(rank 0\)$"):
            group.on_rank_0_slowly(refuse)
        return done

    def refuse():
        raise ValueError("full")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [0, 0]
    assert len(times) > 10

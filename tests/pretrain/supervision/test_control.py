"""The small files by which supervisor, trainer and agents speak."""

import errno
import os
import signal
from pathlib import Path

import pytest

from data_prep import files
from pretrain.supervision import control as orders
from pretrain.supervision.control import Order

ORDER = Order("aa", 3, orders.RUN, nodes=2, processes_per_node=4, address="10.0.0.1", port=999)


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in orders._LEAVE}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_order_that_counts_is_the_last_that_was_given(tmp_path):
    assert orders.read(tmp_path) is None
    for order in (Order("zz", 1, orders.RUN), ORDER):
        orders.give(tmp_path, order)
        assert orders.read(tmp_path) == order


def test_a_file_that_is_no_order_is_refused_by_name(tmp_path):
    orders.give(tmp_path, ORDER)
    path = orders.folder_of(tmp_path) / "order.json"
    path.write_text('{"what": 1}')
    with pytest.raises(ValueError, match=r"order.json: is no order .*delete it"):
        orders.read(tmp_path)


def test_an_attempt_is_superseded_by_another_order_and_by_its_own_end(tmp_path):
    assert not orders.superseded(tmp_path, "aa")
    orders.give(tmp_path, ORDER)
    assert not orders.superseded(tmp_path, "aa")
    orders.refuse_superseded(tmp_path, "aa")
    assert orders.superseded(tmp_path, "bb")
    # Nobody ordered it: a person's own attempt, which the locks keep apart.
    assert not orders.superseded(tmp_path, "")
    with pytest.raises(ValueError, match=r"no longer counts .*attempt 3"):
        orders.refuse_superseded(tmp_path, "bb")
    orders.give(tmp_path, Order("aa", 3, orders.STOP))
    assert orders.superseded(tmp_path, "aa")


def test_a_request_to_stop_is_for_one_attempt_and_goes_with_it(tmp_path):
    orders.request_stop(tmp_path, "aa")
    assert orders.stop_requested(tmp_path, "aa")
    assert not orders.stop_requested(tmp_path, "bb")
    orders.give(tmp_path, ORDER)
    assert orders.stop_requested(tmp_path, "aa")
    orders.give(tmp_path, Order("bb", 4, orders.RUN))
    assert not orders.stop_requested(tmp_path, "aa")


def test_requests_are_counted_rather_than_obeyed_and_only_in_the_block():
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    requests = orders.Requests()
    with requests.counted():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert requests.count == 2
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(
    ("environ", "on_termination"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "CROSS_RANK": "0"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "x"}, False),
    ],
)
def test_a_rank_that_is_signalled_asks_for_a_stop_and_on_sigterm_below_srun_only(
    tmp_path, environ, on_termination
):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orders.stop_on_signals(tmp_path, "aa", environ)
    os.kill(os.getpid(), signal.SIGTERM)
    assert orders.stop_requested(tmp_path, "aa") == on_termination
    os.kill(os.getpid(), signal.SIGUSR1)
    assert orders.stop_requested(tmp_path, "aa")


def unreadable(monkeypatch, name, *numbers):
    """Let a file's reads fail so often, each with an error of a network file system."""
    read_bytes, left = Path.read_bytes, list(numbers)
    monkeypatch.setattr(files, "_PAUSES", (0.0, 0.0, 0.0))

    def fails(self):
        if self.name == name and left:
            raise OSError(left.pop(), "for a moment", str(self))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", fails)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EAGAIN])
def test_an_order_that_cannot_be_read_for_a_moment_is_read(tmp_path, monkeypatch, number):
    orders.give(tmp_path, ORDER)
    unreadable(monkeypatch, "order.json", *[number] * 3)
    assert orders.read(tmp_path) == ORDER


def test_an_order_that_cannot_be_read_supersedes_nobody_and_is_not_taken_for_none(
    tmp_path, monkeypatch
):
    orders.give(tmp_path, Order("bb", 4, orders.RUN))
    with monkeypatch.context() as patch:
        unreadable(patch, "order.json", *[errno.ESTALE] * 100)
        assert not orders.superseded(tmp_path, "aa")
        orders.refuse_superseded(tmp_path, "aa")
        with pytest.raises(OSError, match="order.json"):
            orders.read(tmp_path)
    assert orders.superseded(tmp_path, "aa")


def test_a_request_on_a_disk_that_refuses_is_no_request_and_ends_nothing(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", fails)
        patch.setattr(Path, "exists", fails)
        orders.stop_on_signals(tmp_path, "aa", {})
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not orders.stop_requested(tmp_path, "aa")

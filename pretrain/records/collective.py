"""Collective actions, which succeed on all ranks or fail on all."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

from data_prep.common.wording import few

Gather = Callable[[Any], list[Any]]
"""Returns every rank's value, on every rank, in rank order."""
T = TypeVar("T")
_WAIT_SECONDS = 60.0
"""Far below the timeout of a collective, which is 10 minutes."""


class Failure(Exception):
    """An action failed on at least one rank; every rank raises this."""


def on_every_rank(action: Callable[[], T], gather: Gather) -> list[T]:
    """Return the result of `action` on each rank, once all ranks are done.

    Raises:
        Failure: with the reasons, on every rank, if `action` raised OSError or ValueError on any.
    """
    answers = gather(_attempt(action))
    _check([reason for _, reason in answers])
    return [value for value, _ in answers]


def _attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of `action` and "", or None and why it failed."""
    try:
        return action(), ""
    except (OSError, ValueError) as error:
        return None, str(error) or type(error).__name__


def _check(reasons: Sequence[str]) -> None:
    if any(reasons):
        raise Failure(join_reasons(reasons))


def join_reasons(reasons: Sequence[str]) -> str:
    """Join each rank's reason ("" for none); ranks are named where not all gave the same."""
    parts = []
    for reason in dict.fromkeys(filter(None, reasons)):
        ranks = [rank for rank, other in enumerate(reasons) if other == reason]
        where = "" if len(ranks) == len(reasons) else f" (rank {few(ranks)})"
        parts.append(reason + where)
    return "; ".join(parts)


@dataclasses.dataclass(frozen=True)
class Group:
    """The ranks of an attempt, for code that does not import torch."""

    rank: int
    """This process's."""
    world_size: int
    gather: Gather
    broadcast: Callable[[Any], Any]
    """Returns rank 0's value on every rank."""

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Return, on every rank, the result of `action` on rank 0.

        Raises:
            Failure: on every rank, if `action` raised OSError or ValueError.
        """
        value, reason = (None, "") if self.rank else _attempt(action)
        # Not gathered: a gather takes memory for the longest value on every rank, times the ranks.
        value = self.broadcast(value)
        _check(self.gather(reason))  # rank 0 too goes on only when all have the value
        return cast(T, value)

    def on_rank_0_slowly(self, action: Callable[[], T]) -> T:
        """Like `on_rank_0`, for actions longer than a collective's timeout; runs in a thread.

        The ranks meet every minute, so that no collective waits longer.
        """
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(action) if self.rank == 0 else None
            while any(self.gather(bool(result and wait([result], _WAIT_SECONDS).not_done))):
                pass
        return self.on_rank_0(lambda: cast(Future[T], result).result())

"""What to do about a confirmed spike: the ladder of rollbacks, its budgets, and what it needs kept.

Pure functions over plain numbers and the ledger's records. A spike that comes back near an earlier
one climbs the ladder; one far from all others starts at its foot:

1. another seed, from a checkpoint at least `margin_steps` before the onset; where updates were not
   finite, from the newest at or before it: what came before them was sound;
2. the same, and the data around the onset is skipped (Chowdhery et al. 2022, PaLM, section 5.1:
   restarted about 100 steps before, 200 to 500 batches skipped);
3. twice as far back, with the learning rate lowered until well past the onset;
4. give up: what three different ways past the spot did not cure is structural.

A checkpoint of step n has seen the steps below n: one with n <= onset saw nothing of the spike.
Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pretrain.config.run import SpikeConfig

RUNGS = 3
_SOUND_UNTIL_ONSET = ("non-finite", "loss-scale")
"""Channels of updates that are not finite, not of a loss that rises for a while unnoticed."""
_BUDGET_STEPS = 10_000


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Go back to a checkpoint and on from there, with something changed."""

    step: int
    """Of the checkpoint; 0: from the initial weights."""
    seed: int
    """Never used before."""
    rung: int
    """1 to 3."""
    skip: tuple[int, int] | None = None
    """Steps [first, end) of the abandoned attempt whose blocks are not read again."""
    learning_rate_factor: float = 1.0
    learning_rate_steps: int = 0
    """How many steps, from `step` on, the factor holds."""


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """Stop, and say why."""

    reason: str


def plan(
    spikes: Sequence[Mapping[str, Any]],
    rollbacks: Sequence[Mapping[str, Any]],
    checkpoints: Collection[int],
    seeds: Collection[int],
    policy: SpikeConfig,
) -> Rollback | GiveUp:
    """What to do about the newest of the confirmed spikes.

    Args:
        spikes: the ledger's spikes that the budgets count, oldest first, with `onset` and `step`
            (of the confirmation: the last step that the abandoned attempt read) and `channel`. The
            newest is the one to answer.
        rollbacks: the rollbacks that the budgets count, oldest first, with `step` (where they went
            back to), `rung` and the `onset` that they answered. Those before a person started a
            run again that had been given up are left out, by whoever calls.
        checkpoints: steps of the committed checkpoints on the surviving lineage.
        seeds: every seed that was ever used.
        policy: margins and budgets.
    """
    spike = spikes[-1]
    onset, last_read = spike["onset"], spike["step"]
    near = [r for r in rollbacks if abs(r["onset"] - onset) <= policy.region_steps]
    reason = _exhausted(onset, near, rollbacks, policy) or _nothing_left(onset, checkpoints, policy)
    if reason:
        return GiveUp(reason)
    rung = 1 + max((r["rung"] for r in near), default=0)
    seed = max(seeds) + 1
    if rung == RUNGS:
        depth = 2 * max(policy.margin_steps, *(r["onset"] - r["step"] for r in near))
        step = _target(onset, depth, checkpoints)
        return Rollback(
            step,
            seed,
            rung,
            learning_rate_factor=policy.learning_rate_factor,
            learning_rate_steps=onset - step + policy.learning_rate_steps,
        )
    if rung == 1:
        depth = 0 if spike["channel"] in _SOUND_UNTIL_ONSET else policy.margin_steps
        return Rollback(_target(onset, depth, checkpoints), seed, rung)
    step = _target(onset, policy.margin_steps, checkpoints)
    first = max(step, onset - policy.skip_before_steps)
    # What lies beyond the last step was not read; the new seed deals it out anew in any case.
    return Rollback(step, seed, rung, (first, min(onset + policy.skip_after_steps, last_read + 1)))


def _exhausted(
    onset: int,
    near: Sequence[Mapping[str, Any]],
    rollbacks: Sequence[Mapping[str, Any]],
    policy: SpikeConfig,
) -> str:
    """Which budget is spent, in words; "" where none is."""
    lately = [r for r in rollbacks if abs(r["onset"] - onset) < _BUDGET_STEPS]
    if any(r["rung"] >= RUNGS for r in near):
        cause = (
            f"the spike at step {onset} came back after {len(near)} rollbacks in its region: "
            "another order, skipped data and a lower learning rate did not help"
        )
    elif len(lately) >= policy.rollbacks_per_10k_steps:
        cause = (
            f"the spike at step {onset} follows {len(lately)} rollbacks within "
            f"{_BUDGET_STEPS:,} steps (spike.rollbacks_per_10k_steps)"
        )
    elif len(rollbacks) >= policy.max_rollbacks:
        cause = (
            f"the spike at step {onset} follows {len(rollbacks)} rollbacks (spike.max_rollbacks)"
        )
    else:
        return ""
    return (
        f"{cause}. The instability looks structural, not a matter of data order: look at the "
        "learning rate, the warm-up, beta2, gradient clipping, precision and the architecture"
    )


def _nothing_left(onset: int, checkpoints: Collection[int], policy: SpikeConfig) -> str:
    """Why there is nothing to go back to, in words; "" where there is, or little would be lost.

    Retention keeps what the loss's channels need. An evaluation may date a rise much further back.
    """
    oldest = min(checkpoints, default=0)
    if oldest <= onset or onset <= policy.region_steps:
        return ""
    return (
        f"the spike began at step {onset} or later, and the oldest checkpoint left is of step "
        f"{oldest}: to start anew from step 0 is for you to decide. To go on as it is, start the "
        "run again"
    )


def _target(onset: int, depth: int, checkpoints: Collection[int]) -> int:
    """The newest checkpoint at least `depth` steps before an onset.

    Where none is that early: the oldest from before the onset, and 0 where there is none at all.
    """
    clean = [step for step in checkpoints if step <= onset]
    early = [step for step in clean if step <= onset - depth]
    return max(early, default=min(clean, default=0))


def possible_onsets(
    step: int,
    suspected: Collection[int],
    rollbacks: Sequence[Mapping[str, Any]],
    policy: SpikeConfig,
) -> list[tuple[int, int]]:
    """Where the onsets may lie that the ladder may yet be asked about.

    Args:
        step: the newest.
        suspected: onsets of the suspicions that are open.
        rollbacks: as `plan` takes them.
        policy: margins.

    Returns:
        Ranges (first, last) of steps: the last steps, in which a spike may have begun that nobody
        suspects yet; each open suspicion's onset; and the onsets of rollbacks so near that their
        ladder may be climbed further.
    """
    earliest = step - policy.longest_delay
    near = [r["onset"] for r in rollbacks if abs(r["onset"] - earliest) <= policy.region_steps]
    return [(earliest, step), *((onset, onset) for onset in (*suspected, *near))]


def protected(
    onsets: Collection[tuple[int, int]], checkpoints: Collection[int], policy: SpikeConfig
) -> set[int]:
    """Checkpoints that must not be deleted: every possible target of the ladder.

    For each range, from the deepest target of its first onset up to its last one: a spike that
    comes back after a rollback may begin as early as where that went back to.

    Args:
        onsets: the ranges that `possible_onsets` returned.
        checkpoints: steps of the committed checkpoints on the surviving lineage.
        policy: margins.
    """
    kept: set[int] = set()
    for first, last in onsets:
        once = _target(first, policy.margin_steps, checkpoints)
        twice = _target(once, policy.margin_steps, checkpoints)
        depth = max(first - once, once - twice, policy.margin_steps)
        deepest = _target(twice, 2 * depth, checkpoints)
        kept.update(step for step in checkpoints if deepest <= step <= last)
    return kept


def most_kept(interval: int, newest: int, policy: SpikeConfig) -> int:
    """Upper bound on the checkpoints that retention keeps at once.

    `protected` keeps most where rollbacks lie as far back as the ladder still looks: everything
    from their deepest target to the newest step. A suspicion of long ago (validation) keeps its own
    targets besides. How far back a target lies depends on where an onset falls between two
    checkpoints, so every such place is tried.

    Args:
        interval: steps between two checkpoints.
        newest: how many of the newest are kept in any case.
        policy: margins.
    """
    reach = policy.region_steps + policy.longest_delay + 8 * policy.margin_steps
    last = interval * (20 + reach // interval)
    saved = range(interval, last + 1, interval)
    onsets = range(last - policy.longest_delay - interval, last - policy.longest_delay)
    after_rollbacks = max(
        len(protected([(onset - policy.region_steps, last)], saved, policy)) for onset in onsets
    )
    of_one = max(len(protected([(onset, onset)], saved, policy)) for onset in onsets)
    return max(after_rollbacks, newest) + of_one

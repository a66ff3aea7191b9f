"""Rollback policy: the response to a confirmed spike, and the checkpoints that it may need.

Pure functions of the ledger's records and plain numbers. Spikes whose onsets lie near each other
climb a ladder of rollbacks; a spike far from all others starts at its first rung:

1. another seed, from a checkpoint at least `margin_steps` before the onset; or, where updates were
   not finite, from the newest checkpoint at or before it, since nothing before it was affected;
2. the same, and the data around the onset is skipped (Chowdhery et al. 2022, PaLM, section 5.1:
   restarted about 100 steps before, 200 to 500 batches skipped);
3. twice as far back, with a lower learning rate until well past the onset;
4. give up: an instability that three different remedies did not cure is structural.

A checkpoint of step n has seen the steps below n, so one with n <= onset has seen nothing of the
spike.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pretrain.config.run import RunConfig
from pretrain.config.sections import SpikeConfig
from pretrain.records import ledger
from pretrain.spikes import drift

_LAST_RUNG = 3
REGION_STEPS = 1000
"""Spikes that begin within this distance count as the same problem: the next rollback changes
more."""
LOWERED_RATE, LOWERED_STEPS = 0.5, 1000
"""Factor on the learning rate after the third rollback, and the steps after the onset for which it
holds. Of the models that truly diverge (study spike-cures) 0.7 did not cure one."""
_NON_FINITE_CHANNELS = ("non-finite", "loss-scale")
"""Channels on which the onset is exact: the loss did not rise unnoticed before it."""
_BUDGET, _BUDGET_STEPS = 5, 10_000
"""Rollbacks, within this number of steps, after which a run is given up: a recipe that spikes more
often has a cause that rollbacks do not cure."""
_MOST_ROLLBACKS = 20
"""Rollbacks after which a run is given up, however far apart: as many as PaLM's largest model took
(Chowdhery et al. 2022, section 5.1)."""
_OLD_SPACING = drift.MEMORY // 2
"""Steps between the old checkpoints that are kept, for spikes that turn out to have begun with a
small rise thousands of steps before."""

Records = Sequence[ledger.Record]


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Go back to a checkpoint and continue from there with a change."""

    step: int
    """Step of the checkpoint; 0 starts from the initial weights."""
    seed: int
    """A seed that was never used before in this run."""
    rung: int
    """1 to 3."""
    skip: tuple[int, int] | None = None
    """Steps [first, end) of the abandoned attempt whose blocks are not read again."""
    learning_rate_factor: float = 1.0
    learning_rate_steps: int = 0
    """Number of steps, counted from `step`, that the factor applies to."""


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """Stop the run."""

    reason: str


def counted_rollbacks(records: Records) -> Records:
    """The rollbacks that budgets count: those since the run was last given up.

    Restarting a run that was given up resets its budgets.
    """
    last = max((n for n, record in enumerate(records) if record["kind"] == "gave-up"), default=-1)
    return ledger.segments(records[last + 1 :], ledger.SPIKE)


def answer_to_spike(records: Records, config: RunConfig) -> Rollback | GiveUp | None:
    """Plan the response to the newest spike in a ledger; None if every spike has been answered."""
    state = ledger.run_state(records)
    if state.unanswered_spike is None:
        return None
    rollbacks = counted_rollbacks(records)
    return plan(state.unanswered_spike, rollbacks, state.checkpoints, state.seeds, config.spike)


def plan(
    spike: Mapping[str, Any],
    rollbacks: Sequence[Mapping[str, Any]],
    checkpoints: Collection[int],
    seeds: Collection[int],
    policy: SpikeConfig,
) -> Rollback | GiveUp:
    """Plan the response to a confirmed spike.

    Args:
        spike: with `onset`, `step` (of the confirmation: the last step that the abandoned attempt
            read) and `channel`.
        rollbacks: the rollbacks that the budgets count, oldest first, each with `step` (where it
            went back to), `rung` and the `onset` of its spike.
        checkpoints: steps of the committed checkpoints on the surviving lineage.
        seeds: every seed that the run has used.
        policy: margins and budgets.
    """
    onset, last_read = spike["onset"], spike["step"]
    near = [r for r in rollbacks if abs(r["onset"] - onset) <= REGION_STEPS]
    reason = _spent_budget(onset, near, rollbacks) or _no_target(spike, checkpoints)
    if reason:
        return GiveUp(reason)
    rung = 1 + max((r["rung"] for r in near), default=0)
    seed = max(seeds) + 1
    if rung == 1:
        depth = 0 if spike["channel"] in _NON_FINITE_CHANNELS else policy.margin_steps
        return Rollback(_target(onset, depth, checkpoints), seed, rung)
    if rung == 2:
        step = _target(onset, policy.margin_steps, checkpoints)
        first = max(step, onset - policy.margin_steps)
        # Steps after the last one were not read, and the new seed permutes their blocks anyway.
        end = min(onset + max(1, 4 * policy.margin_steps), last_read + 1)
        return Rollback(step, seed, rung, skip=(first, end))
    depth = 2 * max(policy.margin_steps, *(r["onset"] - r["step"] for r in near))
    step = _target(onset, depth, checkpoints)
    return Rollback(
        step,
        seed,
        rung,
        learning_rate_factor=LOWERED_RATE,
        learning_rate_steps=onset - step + LOWERED_STEPS,
    )


def _spent_budget(
    onset: int, near: Sequence[Mapping[str, Any]], rollbacks: Sequence[Mapping[str, Any]]
) -> str:
    """Describe the exhausted budget; "" if there is none."""
    recent = [r for r in rollbacks if abs(r["onset"] - onset) < _BUDGET_STEPS]
    if any(r["rung"] >= _LAST_RUNG for r in near):
        cause = (
            f"came back after {len(near)} rollbacks in its region: another order, skipped data and "
            "a lower learning rate did not help"
        )
    elif len(recent) >= _BUDGET:
        cause = f"follows {len(recent)} rollbacks within {_BUDGET_STEPS:,} steps"
    elif len(rollbacks) >= _MOST_ROLLBACKS:
        cause = f"follows {len(rollbacks)} rollbacks"
    else:
        return ""
    return (
        f"the spike at step {onset} {cause}. The instability looks structural, not a matter of "
        "data order: look at the learning rate, the warm-up, beta2, gradient clipping, precision "
        "and the architecture"
    )


def _no_target(spike: Mapping[str, Any], checkpoints: Collection[int]) -> str:
    """Explain that no checkpoint is early enough; "" if one is, or little would be lost.

    Retention keeps the targets of the loss's channels. An evaluation may date a spike much further
    back.
    """
    onset, oldest = spike["onset"], min(checkpoints, default=0)
    if oldest <= onset or onset <= REGION_STEPS:
        return ""
    return (
        f"the spike began at step {onset} or later, and the oldest checkpoint left is of step "
        f"{oldest}: this run would end here at each start. Begin a new run, or continue it by "
        f"a fork of a checkpoint up to step {spike['step']} (`--from RUN@STEP` in a new folder) "
        "with a higher spike.validation_nats"
    )


def _target(onset: int, depth: int, checkpoints: Collection[int]) -> int:
    """Step of the newest checkpoint at least `depth` steps before an onset.

    If there is none, the oldest one from before the onset; 0 if there is none of these either.
    """
    clean = [step for step in checkpoints if step <= onset]
    early = [step for step in clean if step <= onset - depth]
    return max(early, default=min(clean, default=0))


def checkpoints_to_keep(records: Records, step: int, config: RunConfig) -> set[int]:
    """Steps of the checkpoints to keep: the newest, and every possible target of the ladder.

    A rise that nothing was suspected of yet may have begun at any step that the channel `drift`
    remembers, so one checkpoint in every `_OLD_SPACING` steps is kept that long.

    A checkpoint that was saved between two regular ones, because the run was asked to stop or had
    its last step there, is kept only while it is one of the newest two. Otherwise every stop would
    add one.

    Args:
        records: the ledger, with the commit of `step`.
        step: the newest step.
        config: gives the number of newest checkpoints to keep, and the policy.
    """
    state = ledger.run_state(records)
    rollbacks, interval = counted_rollbacks(records), config.training.checkpoint_interval
    onsets = possible_onsets(step, state.suspected, rollbacks, config.spike)
    stops = {r["step"] for r in records if r["kind"] in ("preempted", "done") and r["step"] < step}
    saved = [each for each in state.checkpoints if each not in stops or each % interval == 0]
    newest = {*state.checkpoints[-2:], *saved[-config.training.checkpoints_kept :]}
    targets = protected(onsets, saved, interval, config.spike, rollbacks)
    return {*newest, *targets, *old(saved, step, config.spike)}


def old(checkpoints: Sequence[int], step: int, policy: SpikeConfig) -> list[int]:
    """The sparse checkpoints from the last one before the earliest onset on."""
    sparse, before = _sparse(checkpoints), step - _old_steps(policy)
    return sparse[max(0, sum(each <= before for each in sparse) - 1) :]


def _old_steps(policy: SpikeConfig) -> int:
    return drift.MEMORY + drift.BLOCK + policy.margin_steps


def _sparse(checkpoints: Sequence[int]) -> list[int]:
    """The first checkpoint in every `_OLD_SPACING` steps, which stays the first."""
    return sorted({step // _OLD_SPACING: step for step in reversed(checkpoints)}.values())


def possible_onsets(
    step: int,
    suspected: Collection[int],
    rollbacks: Sequence[Mapping[str, Any]],
    policy: SpikeConfig,
) -> list[tuple[int, int]]:
    """Step ranges that may still contain the onset of a spike.

    Args:
        step: the newest step.
        suspected: onsets of the open suspicions.
        rollbacks: as in `plan`.
        policy: margins.

    Returns:
        Ranges (first, last): the last steps, where a spike may have begun that is not suspected
        yet; the onset of each open suspicion; and the onsets of earlier rollbacks whose spike may
        come back.
    """
    earliest = step - policy.longest_delay
    near = [r["onset"] for r in rollbacks if abs(r["onset"] - earliest) <= REGION_STEPS]
    return [(earliest, step), *((onset, onset) for onset in (*suspected, *near))]


def protected(
    onsets: Collection[tuple[int, int]],
    checkpoints: Collection[int],
    interval: int,
    policy: SpikeConfig,
    rollbacks: Sequence[Mapping[str, Any]] = (),
) -> set[int]:
    """Checkpoints that must not be deleted: every possible target of the ladder.

    For each range these reach from the deepest target of its first onset to its last onset, because
    a spike that comes back after a rollback may begin as early as the rollback's checkpoint.

    Args:
        onsets: ranges as returned by `possible_onsets`.
        checkpoints: steps of the committed checkpoints on the surviving lineage.
        interval: steps to the next checkpoint.
        policy: margins.
        rollbacks: as in `plan`.
    """
    kept: set[int] = set()
    for first, last in onsets:
        once = _target(first, policy.margin_steps, checkpoints)
        twice = _target(once, policy.margin_steps, checkpoints)
        # The newest checkpoint a margin before an onset is less than a margin and a gap before it.
        places = [twice, *(step for step in sorted(checkpoints) if twice < step < last), last]
        gap = max(interval, *(after - before for before, after in itertools.pairwise(places)))
        deepest = _target(twice, 2 * (policy.margin_steps + gap), checkpoints)
        kept.update(step for step in checkpoints if deepest <= step <= last)
        # An earlier rollback may have gone further: the interval or the margin was longer then.
        for onset, back in ((r["onset"], r["step"]) for r in rollbacks):
            deepest = _target(twice, 2 * (onset - back), checkpoints)
            newest = onset + REGION_STEPS - 2 * (onset - back)
            kept.update(step for step in checkpoints if deepest <= step <= newest)
    return kept


def usual_checkpoints_kept(config: RunConfig) -> int:
    """Most checkpoints that a run keeps if no spike is ever suspected; at times it is one fewer."""
    return max(_usually_kept(part.config) for part in config.segments.parts)


def _usually_kept(config: RunConfig) -> int:
    interval, steps = config.training.checkpoint_interval, config.training.steps
    first = interval * max(1, (steps - _longest_reach(config)) // interval)
    saved = [*_sparse(range(interval, first, interval)), *range(first, steps, interval), steps]
    commits = [{"number": n, "kind": "commit", "step": s} for n, s in enumerate(saved)]
    return len(checkpoints_to_keep(commits, steps, config))


def _longest_reach(config: RunConfig) -> int:
    """Steps before the newest one that hold every checkpoint which a rollback may go back to."""
    policy = config.spike
    reach = REGION_STEPS + policy.longest_delay + 8 * policy.margin_steps
    return reach + 20 * config.training.checkpoint_interval


def max_checkpoints_kept(config: RunConfig) -> int:
    """Upper bound on the number of checkpoints that a run keeps at once.

    While the newest one was saved at a stop between two regular ones it is one more.

    `protected` keeps most where rollbacks lie as far back as the ladder still looks: everything
    from their deepest target to the newest step. Old suspicions (validation; a small rise of the
    loss that goes on) keep their own targets as well. How far back a target lies depends on where
    an onset falls between two checkpoints, so every such place is tried. A segment ends with a
    checkpoint, which may lie between two regular ones.
    """
    parts = config.segments.parts
    return max(_most_kept(part.config) for part in parts) + len(parts) - 1


def _most_kept(config: RunConfig) -> int:
    """The same for the settings of one segment."""
    interval, policy = config.training.checkpoint_interval, config.spike
    last = interval * (_longest_reach(config) // interval)
    saved = range(interval, last + 1, interval)
    onsets = range(last - policy.longest_delay - interval, last - policy.longest_delay)
    after_rollbacks = max(
        len(protected([(onset - REGION_STEPS, last)], saved, interval, policy)) for onset in onsets
    )
    of_one = max(len(protected([(onset, onset)], saved, interval, policy)) for onset in onsets)
    saves = -(-config.training.steps // interval)
    old = 2 - -_old_steps(policy) // _OLD_SPACING
    return min(saves, max(after_rollbacks, config.training.checkpoints_kept) + 2 * of_one + old)

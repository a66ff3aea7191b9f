"""Rollback policy: the response to a confirmed spike, and the checkpoints that it may need.

Pure functions of the ledger's records and plain numbers. Spikes whose onsets lie near each other
climb a ladder of rollbacks; a spike far from all others starts at its first rung:

1. another seed, from a checkpoint at least `margin_steps` before the onset; or, where updates were
   not finite, from the newest checkpoint at or before it, since nothing before it was affected;
2. the same, and the data around the onset is skipped (Chowdhery et al. 2022, PaLM, section 5.1:
   restarted about 100 steps before, 200 to 500 batches skipped);
3. from a checkpoint another `margin_steps` before that of the second, with a lower learning rate
   until well past the onset; and again so for a spike soon after the rate has returned;
4. give up: an instability that three different remedies did not cure is structural.

A checkpoint of step n has seen the steps below n, so one with n <= onset has seen nothing of the
spike.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from data_prep.common.wording import count
from pretrain.config.run import RunConfig
from pretrain.config.sections import SpikeConfig
from pretrain.records import ledger
from pretrain.spikes import channels

_LAST_RUNG = 3
_MOST_MARGINS = 4
"""Margins that the ladder may go back in all: one on each of the first two rungs and two on the
third, because a spike that comes back may begin as early as the last rollback's checkpoint."""
REGION_STEPS = 1000
"""Spikes that begin within this distance count as the same problem: the next rollback changes
more."""
LOWERED_RATE, LOWERED_STEPS = 0.5, REGION_STEPS + 500
"""Factor on the learning rate after the third rollback, and the steps after the onset for which it
holds. Of the models that truly diverge (study spike-cures) 0.7 did not cure one. A spike that the
return of the rate causes may be dated up to two blocks of the channel `drift` before the return,
which is still outside the region."""
_NON_FINITE_CHANNELS = ("non-finite", "loss-scale")
"""Channels on which the onset is exact: the loss did not rise unnoticed before it."""
_BUDGET, _BUDGET_STEPS = 5, 10_000
"""Rollbacks, within this number of steps, after which a run is given up: a recipe that spikes more
often has a cause that rollbacks do not cure."""
_MOST_ROLLBACKS = 20
"""Rollbacks after which a run is given up, however far apart: as many as PaLM's largest model took
(Chowdhery et al. 2022, section 5.1)."""
_OLD_SPACING = channels.MEMORY // 2
"""Steps between the old checkpoints that are kept, for spikes that turn out to have begun with a
small rise thousands of steps before."""
_MOST_COUNTED = 1 << 16
"""Checkpoints of a run that are looked at to say how many it keeps: more than lie in the steps that
are remembered, and not all that a long run has."""

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
    # Where a spike follows the return of the rate, it has to be lowered for longer.
    returned = any(
        r["rung"] == _LAST_RUNG and 0 < onset - r["onset"] - REGION_STEPS <= LOWERED_STEPS
        for r in rollbacks
    )
    rung = _LAST_RUNG if returned else 1 + max((r["rung"] for r in near), default=0)
    seed, margin = max(seeds) + 1, policy.margin_steps
    step = _target(onset, margin, checkpoints)
    if rung == 1:
        exact = spike["channel"] in _NON_FINITE_CHANNELS
        return Rollback(_target(onset, 0, checkpoints) if exact else step, seed, rung)
    if rung == 2:
        # Steps after the last one were not read, and the new seed permutes their blocks anyway.
        end = min(onset + max(1, 4 * margin), last_read + 1)
        return Rollback(step, seed, rung, skip=(max(step, onset - margin), end))
    # The distance does not grow with the interval, which may have been shorter when a checkpoint
    # that far back was deleted.
    step = _target(step, max(1, margin), checkpoints)
    steps = onset - step + LOWERED_STEPS
    return Rollback(step, seed, rung, learning_rate_factor=LOWERED_RATE, learning_rate_steps=steps)


def _spent_budget(
    onset: int, near: Sequence[Mapping[str, Any]], rollbacks: Sequence[Mapping[str, Any]]
) -> str:
    """Describe the exhausted budget; "" if there is none."""
    recent = [r for r in rollbacks if abs(r["onset"] - onset) < _BUDGET_STEPS]
    if any(r["rung"] >= _LAST_RUNG for r in near):
        cause = (
            f"came back after {count(len(near), 'rollback')} in its region: another order, skipped "
            "data and a lower learning rate did not help"
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
    interval = config.training.checkpoint_interval
    stops = {r["step"] for r in records if r["kind"] in ("preempted", "done")}
    saved = [each for each in state.checkpoints if each not in stops or each % interval == 0]
    return {*state.checkpoints[-2:], *_kept(saved, step, state.suspected, config)}


def _kept(
    saved: Sequence[int], step: int, suspected: Collection[int], config: RunConfig
) -> set[int]:
    """Those of the checkpoints that were not saved at a stop."""
    targets = protected(saved, step, suspected, config.spike)
    newest = saved[-config.training.checkpoints_kept :]
    return {*newest, *targets, *old(saved, step, config.spike)}


def old(checkpoints: Sequence[int], step: int, policy: SpikeConfig) -> list[int]:
    """The first checkpoint in every `_OLD_SPACING` steps, from before the earliest onset on."""
    sparse = sorted({each // _OLD_SPACING: each for each in reversed(checkpoints)}.values())
    before = step - _old_steps(policy)
    return sparse[max(0, sum(each <= before for each in sparse) - 1) :]


def _old_steps(policy: SpikeConfig) -> int:
    return channels.MEMORY + channels.BLOCK + policy.margin_steps


def protected(
    checkpoints: Collection[int], step: int, suspected: Collection[int], policy: SpikeConfig
) -> set[int]:
    """Checkpoints that must not be deleted: every possible target of the ladder.

    The onset of a spike may be that of an open suspicion, or lie in the last steps if nothing is
    suspected of it yet. For each of these ranges the targets reach from the deepest one of its
    first step to its last step.

    Args:
        checkpoints: steps of the committed checkpoints on the surviving lineage.
        step: the newest step.
        suspected: onsets of the open suspicions.
        policy: margins.
    """
    kept: set[int] = set()
    onsets = [(step - policy.longest_delay, step), *((onset, onset) for onset in suspected)]
    for deepest, last in onsets:
        for _ in range(_MOST_MARGINS):
            deepest = _target(deepest, max(1, policy.margin_steps), checkpoints)
        kept.update(step for step in checkpoints if deepest <= step <= last)
    return kept


def usual_checkpoints_kept(config: RunConfig) -> int:
    """Most checkpoints that a run keeps if no spike is ever suspected; at times it is one fewer."""
    return max(_usually_kept(part.config) for part in config.segments.parts)


def _usually_kept(config: RunConfig) -> int:
    steps, interval = config.training.steps, config.training.checkpoint_interval
    saved = range(interval, steps, interval)[-_MOST_COUNTED:]
    return len(_kept([*saved, steps], steps, (), config))


def max_checkpoints_kept(config: RunConfig) -> int:
    """Upper bound on the number of checkpoints that a run keeps at once.

    While the newest one was saved at a stop between two regular ones it is one more.

    Old suspicions (validation; a small rise of the loss that goes on) keep their own targets as
    well. A segment ends with a checkpoint, which may lie between two regular ones.
    """
    parts = config.segments.parts
    return max(_most_kept(part.config) for part in parts) + len(parts) - 1


def _most_kept(config: RunConfig) -> int:
    """The same for the settings of one segment."""
    interval, policy = config.training.checkpoint_interval, config.spike
    of_one = 1 - _MOST_MARGINS * (-max(1, policy.margin_steps) // interval)
    of_last_steps = of_one - -policy.longest_delay // interval
    saves = -(-config.training.steps // interval)
    old = 2 - -_old_steps(policy) // _OLD_SPACING
    return min(saves, max(of_last_steps, config.training.checkpoints_kept) + 2 * of_one + old)

"""The spike policy asked by a run: what its ledger says, put to `policy`, with its recipe.

Pure functions of the ledger's records. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.config.run import RunConfig
from pretrain.run import ledger
from pretrain.spikes import policy

Records = Sequence[ledger.Record]


def since_given_up(records: Records) -> Records:
    """The records that budgets count: a person who starts a run again grants it new ones."""
    ends = [number for number, record in enumerate(records) if record["kind"] == "gave-up"]
    return records[ends[-1] + 1 :] if ends else records


def answer_to_spike(records: Records, config: RunConfig) -> policy.Rollback | policy.GiveUp | None:
    """What to do about the newest spike; None where there is none without an answer."""
    state = ledger.run_state(records, config.training.seed)
    if state.unanswered_spike is None:
        return None
    return policy.plan(
        spikes=state.spikes,
        rollbacks=_rollbacks(since_given_up(records)),
        checkpoints=state.checkpoints,
        seeds=state.seeds,
        policy=config.spike,
    )


def retained(records: Records, step: int, config: RunConfig) -> set[int]:
    """The checkpoints that stay after `step` updates: the newest, and all that the ladder may need.

    Args:
        records: of the ledger, the commit of `step` among them.
        step: the newest.
        config: says how many of the newest are kept.
    """
    state = ledger.run_state(records, config.training.seed)
    answered = _rollbacks(since_given_up(records))
    onsets = policy.possible_onsets(step, state.suspected, answered, config.spike)
    newest = state.checkpoints[-config.training.checkpoints_kept :]
    return {*newest, *policy.protected(onsets, state.checkpoints, config.spike)}


def most_retained(config: RunConfig) -> int:
    """Upper bound on the checkpoints of a run that are kept at once: see `retained`."""
    training = config.training
    saves = -(-training.steps // training.checkpoint_interval)
    kept = policy.most_kept(training.checkpoint_interval, training.checkpoints_kept, config.spike)
    return min(saves, kept)


def _rollbacks(records: Records) -> list[ledger.Record]:
    return [record for record in records if record["kind"] == "rollback"]

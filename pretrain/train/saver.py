"""Saving checkpoints during an attempt: commit, retention, and saves that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pretrain.records import checkpoints, ledger, metrics
from pretrain.records.best import best_checkpoint
from pretrain.records.collective import Failure
from pretrain.spikes.policy import checkpoints_to_keep
from pretrain.train.log import RunLog
from pretrain.train.prepared import Prepared

MAX_FAILED_SAVES = 3
"""So many failed saves in a row end the attempt."""


def may_continue(failed_saves: int, has_checkpoint: bool, is_last: bool) -> bool:
    """Whether training continues after a failed save.

    It does while little can be lost: an older checkpoint exists, and the disk may be given space
    before a later save. No save follows the last step.

    Args:
        failed_saves: number of failed saves in a row.
        has_checkpoint: whether an older checkpoint exists.
        is_last: whether this was the run's last save.
    """
    return failed_saves < MAX_FAILED_SAVES and has_checkpoint and not is_last


class Saver:
    """Saves the checkpoints of an attempt. Every rank calls `save` after the same steps."""

    def __init__(
        self,
        prepared: Prepared,
        log: RunLog,
        write: Callable[[Path], None],
    ) -> None:
        """Prepare to save.

        Args:
            prepared: the attempt.
            log: used on rank 0.
            write: writes this rank's part below a folder (`Engine.save`).
        """
        self._config, self._start, self._group = prepared.config, prepared.start, prepared.group
        self._run, self._facts = prepared.run_folder, prepared.facts
        self._log, self._write = log, write
        self._has_checkpoint = prepared.start.step > 0
        self.failed_saves = 0
        """Number of failed saves since the last one that succeeded."""

    def save(self, step: int) -> None:
        """Save after `step` updates.

        Raises:
            Failure: on every rank; a save failed and the attempt must end.
        """
        try:
            self._group.on_rank_0(lambda: self._prepare(step))
            checkpoints.save(
                self._run,
                step,
                self._facts(step),
                write=self._write,
                group=self._group,
                token=self._start.token,
                before_commit=self._log.refuse_superseded,
            )
            self._group.on_rank_0(lambda: self._commit(step))
        except Failure as failure:
            self.failed_saves += 1
            reason = str(failure)
            self._group.on_rank_0(lambda: self._report_failure(step, reason))
            is_last = step == self._config.training.steps
            if not may_continue(self.failed_saves, self._has_checkpoint, is_last):
                raise
        else:
            self.failed_saves, self._has_checkpoint = 0, True

    def _checkpoints(self) -> tuple[list[ledger.Record], tuple[int, ...]]:
        """The ledger's records, and the steps of the checkpoints that they lead to."""
        records = ledger.read_ledger(self._run / ledger.FILE_NAME)
        return records, ledger.run_state(records, self._config.training.seed).checkpoints

    def _prepare(self, step: int) -> None:
        self._log.sync(step)
        if self.failed_saves:  # a checkpoint that could not be recorded takes up space
            checkpoints.remove(self._run, {*self._checkpoints()[1]}, self._log.warn_once)
        checkpoints.refuse_small_disk(self._run, 1, self._start.checkpoint_size)

    def _commit(self, step: int) -> None:
        """Record a checkpoint in the ledger, so that the run can resume from it."""
        digest = checkpoints.manifest_hash(self._run, step)
        ranks = self._group.world_size
        self._log.record("commit", step=step, ranks=ranks, manifest=digest)
        try:
            self._delete_old(step)
        except OSError as error:  # the next commit tries again
            self._log.warn_once(f"WARNING: older checkpoints are not deleted for now: {error}")

    def _delete_old(self, step: int) -> None:
        """Delete the checkpoints that neither the recipe nor a possible rollback needs."""
        records, steps = self._checkpoints()
        keep = checkpoints_to_keep(records, step, self._config.phase(step - 1).config)
        if self._config.training.best_checkpoint_kept:
            validation = metrics.read_metrics(self._run / metrics.VALIDATION)
            best = best_checkpoint(records, validation, self._config.training.seed)
            keep |= {best["step"]} if best else set()
        for old in steps:
            if old not in keep:
                self._log.record("delete", step=old)
        checkpoints.remove(self._run, keep, self._log.warn_once)

    def _report_failure(self, step: int, reason: str) -> None:
        self._log.note("save-failed", step=step, reason=reason)
        self._log.say(f"WARNING: no checkpoint of step {step}: {reason}")

"""Saving checkpoints during an attempt: commit, retention, and saves that fail.

With `training.background_saving` a checkpoint is serialised to memory between two steps, written in
a thread while training goes on, and committed between two later steps: when every rank's files are
on disk, at the latest before the next checkpoint and before the attempt ends. Until then it does
not exist, as if the attempt were still in the middle of saving it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    """Saves the checkpoints of an attempt.

    Every rank calls each method after the same steps, except `is_ready`. It is the `Background` of
    the loop.
    """

    def __init__(
        self,
        prepared: Prepared,
        log: RunLog,
        begin_save: Callable[[Path, bool], Callable[[], None]],
    ) -> None:
        """Prepare to save.

        Args:
            prepared: the attempt.
            log: used on rank 0.
            begin_save: saves this rank's part below a folder (`Engine.begin_save`).
        """
        self._config, self._start, self._group = prepared.config, prepared.start, prepared.group
        self._run, self._facts = prepared.run_folder, prepared.facts
        self._log, self._begin_save = log, begin_save
        self._has_checkpoint = prepared.start.step > 0
        self._pending: checkpoints.Saving | None = None
        self.failed_saves = 0
        """Number of failed saves since the last one that succeeded."""

    def save(self, step: int) -> None:
        """Save after `step` updates; in the background, begin to, unless it is the last save.

        Raises:
            Failure: on every rank; a save failed and the attempt must end.
        """
        self.finish()
        training = self._config.training
        in_background = training.background_saving and step < training.steps
        with self._counted(step):
            self._group.on_rank_0(lambda: self._prepare(step))
            self._pending = checkpoints.begin(
                self._run,
                step,
                save=self._begin_save,
                group=self._group,
                token=self._start.token,
                in_background=in_background,
            )
        if not in_background:
            self.finish()

    def is_ready(self) -> bool:
        """Whether a checkpoint has begun, and this rank's files are written or have failed."""
        return self._pending is not None and self._pending.fingerprints.done()

    @property
    def begun(self) -> int | None:
        """The step of the checkpoint that is not committed yet, if any."""
        return self._pending.step if self._pending else None

    def finish(self) -> None:
        """Wait for the checkpoint that has begun, if any, and commit it.

        Raises:
            Failure: as `save`.
        """
        saving, self._pending = self._pending, None
        if saving is None:
            return
        with self._counted(saving.step):
            facts = self._facts(saving.step)
            checkpoints.commit(saving, facts, self._group, self._log.refuse_superseded)
            self._group.on_rank_0(lambda: self._commit(saving.step))
            self.failed_saves, self._has_checkpoint = 0, True

    @contextlib.contextmanager
    def _counted(self, step: int) -> Iterator[None]:
        """Count and report a save that fails in the block; raise if the attempt must end."""
        try:
            yield
        except Failure as failure:
            self.failed_saves += 1
            reason = str(failure)
            self._group.on_rank_0(lambda: self._report_failure(step, reason))
            is_last = step == self._config.training.steps
            if not may_continue(self.failed_saves, self._has_checkpoint, is_last):
                raise

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

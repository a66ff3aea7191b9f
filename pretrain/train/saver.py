"""Saving checkpoints during an attempt: commit and retention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from pretrain.config.load import public
from pretrain.records import checkpoints, ledger
from pretrain.spikes.policy import checkpoints_to_keep
from pretrain.train.log import RunLog
from pretrain.train.setup import Setup


class Saver:
    """Saves the checkpoints of an attempt. Every rank calls `save` after the same steps."""

    def __init__(self, setup: Setup, log: RunLog, write: Callable[[Path], None]) -> None:
        """Prepare to save.

        Args:
            setup: the attempt.
            log: used on rank 0.
            write: writes this rank's part below a folder (`Engine.save`).
        """
        self._setup, self._start, self._group = setup, setup.start, setup.group
        self._run, self._log, self._write = setup.run_folder, log, write

    def save(self, step: int) -> None:
        """Save after `step` updates.

        Raises:
            Failure: on every rank; the save failed.
        """
        self._group.on_rank_0(lambda: self._prepare(step))
        checkpoints.save(
            self._run,
            step,
            self._facts(step),
            write=self._write,
            group=self._group,
            token=self._start.token,
            before_commit=self._log.check_not_superseded,
        )
        self._group.on_rank_0(lambda: self._commit(step))

    def _facts(self, step: int) -> dict[str, object]:
        """What a reader of a checkpoint needs to know without the run's folder."""
        setup, order = self._setup, self._start.order
        blocks = setup.segments.sizes.first_block(step)
        manifest, *_ = setup.course.manifests.values()
        return {
            "architecture": dataclasses.asdict(setup.architecture),
            "recipe": public(setup.config),
            "deepspeed": setup.settings,
            "ranks": self._group.world_size,
            "lineage": order.identity(blocks),
            "position": {
                "blocks": blocks,
                "epoch": order.epoch(blocks),
                "learning_rate": setup.learning_rate(step),
            },
            "corpus": {
                "tokenizer_digest": manifest.tokenizer_digest,
                "vocab_size": manifest.vocab_size,
            },
            "corpora": self._start.corpora,
            "environment": setup.environment,
        }

    def _prepare(self, step: int) -> None:
        self._log.sync(step)
        checkpoints.check_disk_space(self._run, 1, self._start.checkpoint_size)

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
        records = ledger.read_ledger(self._run / ledger.FILE_NAME)
        steps = ledger.run_state(records).checkpoints
        keep = checkpoints_to_keep(records, step, self._setup.segments.at(step - 1).config)
        for old in steps:
            if old not in keep:
                self._log.record("delete", step=old)
        checkpoints.remove(self._run, keep, self._log.warn_once)

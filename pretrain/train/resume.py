"""The beginning of an attempt: what it continues from, and what it writes before the first step.

Rank 0 does this after all ranks have verified the checkpoints.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import tokenizer as tokenizers
from data_prep.common.arguments import as_invoked
from data_prep.common.files import write_json
from pretrain.config.load import RUN_FILE, dump
from pretrain.config.run import RunConfig
from pretrain.data.order import Order
from pretrain.records import checkpoints, folder, ledger
from pretrain.records.segments import RECIPES, Course


@dataclasses.dataclass(frozen=True)
class ResumeState:
    """How an attempt begins."""

    attempt: int
    token: str
    """Distinguishes this attempt from any other, even one that read the same ledger."""
    step: int
    """Its first."""
    state: ledger.RunState
    """The run's, before the attempt."""
    order: Order
    """The order of blocks that `state` leads to."""
    share_of_tokens: float
    """Share of the training splits' tokens that the blocks hold."""
    checkpoint_size: int
    """Bytes of a checkpoint; before the first one, an upper bound."""
    corpora: Sequence[Mapping[str, Any]]
    """As `segments.corpora_of` gives them."""

    @property
    def seed(self) -> int:
        """The seed in force from the first step on."""
        return self.state.seeds_by_step[-1][1]


def check_no_open_spike(config: RunConfig, state: ledger.RunState) -> None:
    """Refuse to continue from checkpoints that a loss spike may have spoiled.

    Raises:
        ValueError: a spike was not answered by a rollback.
    """
    spike = state.unanswered_spike
    if spike is not None:
        raise ValueError(
            f"{config.folder}: the loss has spiked since step {spike['onset']} and the run was not "
            f"rolled back yet; `{as_invoked('pretrain supervise')}` rolls it back and continues"
        )


def begin(
    course: Course,
    settings: Mapping[str, Any],
    start: ResumeState,
    resume_point: checkpoints.ResumePoint,
    hosts: Sequence[str],
    most_kept: int,
    environment: Mapping[str, Any],
) -> None:
    """Write down that an attempt begins, with which settings and from which step.

    Args:
        course: of the run.
        settings: DeepSpeed's.
        start: how the attempt begins.
        resume_point: the checkpoint that it continues from.
        hosts: of each rank.
        most_kept: upper bound on the checkpoints that are kept at once.
        environment: versions and machine.

    Raises:
        ValueError: the newest attempt ended in a spike that was not answered, or the disk has no
            room for the checkpoints that may be kept.
    """
    config = course.config
    check_no_open_spike(config, start.state)
    run = Path(config.folder)
    path = run / ledger.FILE_NAME
    for step, reason in resume_point.rejected.items():
        sys.stdout.write(f"checkpoint of step {step} rejected: {reason}\n")
        ledger.append(path, "reject", step=step, reason=reason)
    kept = {*start.state.checkpoints} - {*resume_point.rejected}
    # A checkpoint that could not be read may be intact: it stays until the next commit.
    records = ledger.read_ledger(path)
    rejected = {r["step"] for r in records if r["kind"] == "reject"}
    unproven = rejected - resume_point.damaged
    checkpoints.remove(run, kept | unproven, lambda text: sys.stdout.write(f"{text}\n"))
    # One more than are kept: the oldest is deleted after the newest is committed.
    missing = max(1, most_kept + 1 - len(kept))
    checkpoints.check_disk_space(run, missing, start.checkpoint_size)
    recipe = next(r["recipe"] for r in reversed(records) if "recipe" in r)
    for name in (RUN_FILE, f"{RECIPES}/{recipe}.yaml"):
        dump(config, run / name)
    write_json(run / "deepspeed.json", settings)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(run / folder.ENVIRONMENT, {**environment, "started": started})
    tokenizers.load(Path(course.segments.sources[0].path)).save(run / "tokenizer.json")
    ledger.append(
        path,
        "attempt",
        attempt=start.attempt,
        token=start.token,
        step=start.step,
        ranks=len(hosts),
        micro_batch_size=course.segments.at(start.step).config.batch.micro_batch_size,
        seed=start.seed,
        lineage=start.order.identity(),
        manifest=checkpoints.manifest_hash(run, start.step) if start.step else "",
        host=hosts[0],
        hosts=hosts,
        pid=os.getpid(),
        versions=environment["versions"],
    )

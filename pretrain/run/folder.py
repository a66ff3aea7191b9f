"""A run's folder while it is trained: who is at work in it, and what an attempt leaves there.

All of it is rank 0's business. Imports no torch, but for the version of the GPU.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from data_prep import files
from data_prep import tokenizer as tokenizers
from data_prep.manifest import CorpusManifest
from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.data.order import Lineage
from pretrain.run import checkpoints, ledger
from pretrain.spikes.decisions import most_retained
from pretrain.supervision import control as orders

LOCK = "train.lock"
"""Held by the attempt that is at work on a run."""


def lock(run: Path) -> TextIO:
    """Keep other attempts out of a run for as long as the file returned is open.

    Raises:
        ValueError: another attempt is at work; its process is named.
    """
    run.mkdir(parents=True, exist_ok=True)
    return files.lock(run / LOCK, "is being trained by another attempt")


def refuse_superseded(records: Sequence[ledger.Record], token: str) -> None:
    """Refuse to go on with an attempt when a later one has begun.

    The lock keeps them apart where it holds; on some network file systems it does not.

    Args:
        records: the ledger as it is now.
        token: of this attempt.

    Raises:
        ValueError: who began the newest attempt.
    """
    newest = [record for record in records if record["kind"] == "attempt"][-1]
    if newest["token"] != token:
        raise ValueError(
            f"attempt {newest['attempt']} (process {newest['pid']} on {newest['host']}) has begun "
            "on this run since; this one stops"
        )


def refuse_spike(config: RunConfig, state: ledger.RunState) -> None:
    """Refuse to go on from checkpoints that a spike may have spoiled.

    Raises:
        ValueError: the spike that was not answered, and who answers it.
    """
    spike = state.unanswered_spike
    if spike is not None:
        raise ValueError(
            f"{config.folder}: the loss has spiked since step {spike['onset']} and the run was not "
            "rolled back yet; `python -m pretrain supervise` does so, and goes on"
        )


def state_of(config: RunConfig, manifest: CorpusManifest) -> ledger.RunState:
    """Where a run stands; what it is made of is written down where it was not yet."""
    path, seed = Path(config.folder) / ledger.FILE_NAME, config.training.seed
    # A launch that failed early stands before it.
    if not any(record["kind"] == "created" for record in ledger.read(path)):
        ledger.append(
            path,
            "created",
            corpus=manifest.digest(),
            tokenizer=manifest.tokenizer_digest,
            vocab_size=manifest.vocab_size,
            seed=seed,
            batch=dataclasses.asdict(config.batch),
        )
    state = ledger.fold(ledger.read(path), seed)
    if reason := reject_damaged_result(path.parent, state):
        sys.stdout.write(f"the last checkpoint is damaged, its steps are done again: {reason}\n")
        state = ledger.fold(ledger.read(path), seed)
    return state


def reject_damaged_result(run: Path, state: ledger.RunState) -> str:
    """Check the last checkpoint of a run that is done; a reject of it undoes `done`.

    Returns:
        What is wrong with it; "" where it is whole, or the run is not done.

    Raises:
        OSError: it cannot be read, which proves nothing.
    """
    if not state.done or not state.checkpoints:
        return ""
    step = state.checkpoints[-1]
    try:
        checkpoints.read_manifest(checkpoints.folder_of(run, step))
    except ValueError as error:
        ledger.append(run / ledger.FILE_NAME, "reject", step=step, reason=str(error))
        return str(error)
    return ""


@dataclasses.dataclass(frozen=True)
class Start:
    """How an attempt begins."""

    attempt: int
    token: str
    """Tells this attempt from any other, even from one that read the same ledger at once."""
    step: int
    """Its first."""
    state: ledger.RunState
    """Of the run, before it began."""

    @property
    def seed(self) -> int:
        """In force from the first step on."""
        return self.state.segments[-1][1]


def begin(
    config: RunConfig,
    settings: Mapping[str, Any],
    state: ledger.RunState,
    newest: checkpoints.Newest,
    checkpoint_size: int,
    world_size: int,
    lineage: Lineage,
    token: str,
) -> Start:
    """Write down that an attempt begins: with what, and from which step.

    Args:
        config: the recipe.
        settings: DeepSpeed's.
        state: where the run stands.
        newest: the checkpoint to go on from.
        checkpoint_size: bytes that one takes.
        world_size: how many there are.
        lineage: the order of blocks that `state` leads to.
        token: of the attempt.

    Raises:
        ValueError: the newest attempt ended in a spike that nobody has answered, or the disk has no
            room for the checkpoints that retention may keep.
    """
    refuse_spike(config, state)
    run = Path(config.folder)
    path = run / ledger.FILE_NAME
    for step, reason in newest.rejected.items():
        sys.stdout.write(f"checkpoint of step {step} rejected: {reason}\n")
        ledger.append(path, "reject", step=step, reason=reason)
    kept = {*state.checkpoints} - {*newest.rejected}
    # One that could not be read may be whole: it stays until the next commit.
    unproven = {r["step"] for r in ledger.read(path) if r["kind"] == "reject"} - newest.damaged
    checkpoints.remove(run, kept | unproven, lambda text: sys.stdout.write(f"{text}\n"))
    # One more than is kept: the oldest goes when the newest stands.
    missing = max(1, most_retained(config) + 1 - len(kept))
    checkpoints.refuse_small_disk(run, missing, checkpoint_size)
    recipes.dump(config, run / "run.yaml")
    checkpoints.write_json(run / "deepspeed.json", settings)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    checkpoints.write_json(run / "environment.json", {**environment(), "started": started})
    tokenizers.load(Path(config.data.corpus)).save(run / "tokenizer.json")
    order = orders.read(run)
    number = order.attempt if order and order.token == token else state.next_attempt
    start = Start(number, token, newest.step, state)
    ledger.append(
        path,
        "attempt",
        attempt=start.attempt,
        token=start.token,
        step=start.step,
        ranks=world_size,
        micro_batch_size=config.batch.micro_batch_size,
        seed=start.seed,
        blocks=lineage.total,
        lineage=ledger.lineage_record(lineage),
        manifest=checkpoints.manifest_hash(run, newest.step) if newest.step else "",
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    return start


def environment() -> dict[str, object]:
    """Versions and machine, for whoever wants to repeat the run."""
    import torch

    packages = ("torch", "deepspeed", "megatron-core", "tokenizers", "numpy")
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "accelerator": accelerator,
        "cores": os.cpu_count(),
        "packages": {name: metadata.version(name) for name in packages},
    }

"""What rank 0 writes while an attempt runs.

The ledger, metrics.jsonl, validation.jsonl, TensorBoard, the console. A disk that is full ends the
attempt like any other error; the supervisor waits for room before the next one.
"""

import dataclasses
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_prep.common.wording import count
from pretrain.checks import devices, needs
from pretrain.config.load import public
from pretrain.data.batches import validation_note
from pretrain.engine.determinism import cache_use
from pretrain.loop.protocols import StepRecord
from pretrain.records import control, folder, ledger, metrics, pace, progress, wording
from pretrain.records.figures import BLOCKS, PAIRS, curves, figures
from pretrain.records.history import describe
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.live import SpikeWatch, declared_changes, history_before
from pretrain.train.setup import ResumeState, Setup
from pretrain.train.trackers import TensorBoard, WandbRun

_TOLERANCE = 1e-5
"""Relative. A step that is done again has the same loss but for the last bits."""


class RunLog:
    """The records of one attempt, of which only rank 0 opens and uses its own."""

    def __init__(self, setup: Setup) -> None:
        """Prepare to write the records of an attempt that the ledger knows."""
        self._setup, self._config, self._start = setup, setup.config, setup.start
        self._run = setup.run_folder
        self._ledger = self._run / ledger.FILE_NAME
        self._warned: set[str] = set()
        self._trackers: list[TensorBoard | WandbRun] = []
        self._paces: deque[Mapping[str, float]] = deque(maxlen=pace.STEPS)

    def open(self) -> None:
        """Open the files, announce the attempt and bring the detector to its first step.

        Raises:
            ValueError: a file is a symbolic link.
            OSError: names a file that cannot be opened.
        """
        config, start = self._config, self._start
        self._progress = progress.ProgressPrinter(config.training.steps)
        for text in self._announcement():
            self.say(text)
        lines, validation = (
            metrics.read_metrics(self._run / name, lambda text: self.say(f"WARNING: {text}"))
            for name in (metrics.METRICS, metrics.VALIDATION)
        )
        records = ledger.read_ledger(self._ledger)
        self._board = TensorBoard(self._run, start.step, self.say)
        self._trackers.append(self._board)
        if config.tracker == "wandb":
            self._trackers.append(WandbRun(self._run, public(config), start.attempt, self.say))
        self._metrics = metrics.JsonLines(self._run / metrics.METRICS)
        self._validation = metrics.JsonLines(self._run / metrics.VALIDATION)
        self._first_validation_id = (validation or [{}])[0].get("validation_id", "")
        if measured := [line for line in validation if line["step"] == start.step]:
            # TensorBoard drops it with the steps that are done again.
            self._board.scalars(start.step, self._validation_curves(measured[-1]))
        self._loss_before = recorded_loss(lines, records, start)
        self.watch = SpikeWatch(
            SpikeDetector(config.spike, declared_changes(self._setup.segments)),
            history_before(start.step, lines, validation),
            lambda event: self._suspicion(**dataclasses.asdict(event)),
        )

    def _announcement(self) -> Iterator[str]:
        """Lines that say what the attempt is, each short enough for a screen."""
        setup, config, start = self._setup, self._config, self._start
        yield (
            f"attempt {start.attempt}: {config.model.variant} {config.model.size}, "
            f"{needs.parameters(setup.architecture):,} parameters, "
            f"{setup.blocks.share_of_tokens:.1%} of the corpus, "
            f"steps {start.step} to {config.training.steps}, "
            f"{count(setup.group.world_size, 'rank')} ({setup.process.device}, "
            f"{config.training.deepspeed}, {setup.environment['attention_backend']})"
        )
        shares = start.order.mixture.shares(setup.segments.sizes.first_block(start.step))
        for corpus, share in zip(start.corpora, shares, strict=True):
            if corpus["name"]:
                yield f"{corpus['name']}: {share:.1%} of the blocks, of {corpus['blocks']:,}"
        yield validation_note(setup.segments.at(start.step).config.objective)

    def step(self, record: StepRecord) -> None:
        """Write a finished step; an observer of the loop."""
        record = dataclasses.replace(record, figures=self._figures(record))
        self._metrics.write(metrics.line_of(record, self._start.attempt))
        self._scalars(record.step, curves(record))
        self._progress(record)
        if record.step == self._start.step:
            if self._setup.environment["compiled"]:
                self.say(f"the attempt's first step took {record.seconds:.1f} s; {cache_use()}")
            if reason := discontinuity(record.result.loss, self._loss_before):
                self.record("discontinuity", step=record.step, reason=reason)
                self.say(f"WARNING: the run does not continue from step {record.step}: {reason}")
        self._paces.append(record.figures)
        if not record.step % pace.STEPS:
            setup = self._setup
            slow = pace.slow_rank(self._paces, setup.hosts, setup.environment["accelerator"])
            if slow:
                text = "is slow and every step waits for it; `status` says how slow"
                self.warn_once(f"WARNING: {slow.who} {text}")

    def _figures(self, record: StepRecord) -> dict[str, float]:
        """The figures that are shown beside a step's loss."""
        segments, start, step = self._setup.segments, self._start, record.step
        now, sizes = segments.at(step).config, segments.sizes
        length, target_share = now.data.sequence_length, now.objective.target_share
        positions = sizes.size(step) * length
        places = map(sizes.first_block, (step, step + 1))
        counts = zip(*map(start.order.mixture.counts, places), strict=True)
        drawn = zip((corpus["name"] for corpus in start.corpora), counts, strict=True)
        blocks = {f"{BLOCKS}{name}": end - first for name, (first, end) in drawn if name}
        counted = {**self.watch.deviations(record), **blocks}
        if kind := devices.kind_of(self._setup.environment["accelerator"]):
            peak = devices.DEVICES[kind].flops * self._setup.group.world_size
            computed = sum(record.measured[PAIRS]) / positions
            for name, pairs in (("mfu", None), ("computed_mfu", computed)):
                flops = needs.flops_per_token(self._setup.architecture, length, target_share, pairs)
                counted[name] = flops * positions / record.seconds / peak
        return figures(record, positions, counted)

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.scalars(step, values)

    def close(self) -> None:
        """End what shows the attempt elsewhere."""
        for tracker in self._trackers:
            tracker.close()

    def say(self, text: str) -> None:
        """Print a line."""
        self._progress.say(text)

    def warn_once(self, text: str) -> None:
        """Print a line unless it was printed before."""
        if text not in self._warned:
            self._warned.add(text)
            self.say(text)

    def record(self, kind: str, **fields: object) -> None:
        """Append to the ledger.

        Raises:
            ValueError: the attempt was superseded.
            OSError: names the ledger; nothing was appended.
        """
        self.check_not_superseded()
        ledger.append(self._ledger, kind, attempt=self._start.attempt, **fields)

    def sync(self, step: int) -> None:
        """Wait until everything is on disk that comes before a checkpoint after `step` updates.

        Raises:
            ValueError: the attempt was superseded.
            OSError: names the file that cannot be written.
        """
        self._metrics.sync()
        self._validation.sync()
        self.check_not_superseded()
        self._board.sync(step)

    def check_not_superseded(self) -> None:
        """Refuse to continue if another attempt has begun, or the supervisor has ended this one.

        Raises:
            ValueError: names the other attempt.
        """
        folder.check_not_superseded(ledger.read_ledger(self._ledger), self._start.token)
        control.check_not_superseded(self._run, control.token_of(os.environ))

    def validated(self, step: int, scores: Mapping[str, Any], validation_id: str) -> None:
        """Write a measurement on the validation split after `step` updates.

        Args:
            step: number of updates.
            scores: `total` with loss, perplexity and number of targets; `subsets`, and `terms` and
                `corpora` if there are several, with the same by name.
            validation_id: `DataPipeline.validation_id`: losses with an equal one can be compared.
        """
        parts = dict(scores)
        total = parts.pop("total")
        if not parts["terms"]:
            del parts["terms"]
        line = {"attempt": self._start.attempt, "step": step, **total}
        line |= {"validation_id": validation_id, **parts}
        self._validation.write(line)
        self._first_validation_id = self._first_validation_id or validation_id
        self._scalars(step, self._validation_curves(line))
        self.say(wording.validation_line([line]))

    def _validation_curves(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return the points of a line of validation.jsonl, by curve, without those not finite."""
        blocks = line.get("validation_id", "")
        # What cannot be compared is another curve.
        other = "" if blocks == self._first_validation_id else f"@{blocks}"
        values = {f"validation/{name}": line[name] for name in ("loss", "perplexity")}
        for name, score in line.get("terms", {}).items():
            values[f"validation/loss/{name}"] = score["loss"]
        for name, score in {**line["subsets"], **line.get("corpora", {})}.items():
            values[f"validation perplexity/{name}"] = score["perplexity"]
        return {f"{name}{other}": value for name, value in values.items() if value is not None}

    def _suspicion(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - a record's values
        """Record what the spike detector found: the fields of an `Event`."""
        self.say(describe({"kind": kind, **fields}))
        self.record(kind, **fields)


def recorded_loss(
    lines: Sequence[Mapping[str, Any]], records: Sequence[ledger.Record], start: ResumeState
) -> float:
    """Return the loss that the attempt's first step had before; NaN if it had none that is finite.

    No seed is used twice, so an equal seed means an equal history, under the same recipe. Attempts
    with another micro-batch size, which keys the dropout, or on other kernels have other losses.

    Args:
        lines: of metrics.jsonl, from before the attempt.
        records: of the ledger, with the attempt's own.
        start: how the attempt begins.
    """
    own = next(record for record in reversed(records) if record["kind"] == "attempt")
    attempts: set[int] = set()
    for record in records:
        if "recipe" in record and record["step"] <= start.step:
            attempts.clear()
        elif record["kind"] == "attempt" and all(
            record.get(name) == own.get(name) for name in ("micro_batch_size", "kernels")
        ):
            attempts.add(record["attempt"])
    found = [
        metrics.loss_of(line)
        for line in lines
        if (line["step"], line["seed"]) == (start.step, start.seed) and line["attempt"] in attempts
    ]
    return found[-1] if found else math.nan


def discontinuity(loss: float, recorded: float) -> str:
    """Return why a loss is not the one that the same step had before; "" if it is, or had none."""
    # Not `>`, which would be false for NaN.
    if math.isnan(recorded) or abs(loss - recorded) <= _TOLERANCE * abs(recorded):
        return ""
    return f"loss {loss:.6f}; an earlier attempt computed {recorded:.6f} in this step"

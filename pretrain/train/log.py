"""What rank 0 writes while an attempt runs.

The ledger, metrics.jsonl, validation.jsonl, TensorBoard, the console. A disk that is full ends the
attempt like any other error; the supervisor waits for room before the next one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.config.load import public
from pretrain.config.run import RunConfig
from pretrain.loop.protocols import StepRecord
from pretrain.records import control, folder, ledger, metrics
from pretrain.records.figures import curves
from pretrain.records.history import describe, since_last_attempt
from pretrain.train.resume import Start
from pretrain.train.trackers.tensorboard_run import TensorBoard
from pretrain.train.trackers.tracker import Shown, Tracker
from pretrain.train.trackers.wandb_run import WandbRun


class RunLog:
    """The records of one attempt.

    Only rank 0 opens its own: the others have no files of curves and no trackers.
    """

    def __init__(self, config: RunConfig, start: Start) -> None:
        """Prepare to write the records of an attempt that the ledger knows."""
        self._config, self._start = config, start
        self._run = Path(config.folder)
        self._ledger = self._run / ledger.FILE_NAME
        self._warned: set[str] = set()
        self._progress: metrics.ProgressPrinter | None = None
        self._trackers: list[Tracker] = []
        self._metrics: metrics.MetricsWriter | None = None
        self._validation: metrics.JsonLines | None = None
        self._measures: list[str] = []

    def open(self, validation: Sequence[metrics.Line]) -> list[Callable[[StepRecord], None]]:
        """Open the files for the attempt's first step; returns the observers that write them.

        Args:
            validation: the lines of validation.jsonl.
        """
        start = self._start
        shown = Shown(self._run, public(self._config), start.attempt, start.step, self.say)
        self._trackers.append(TensorBoard(shown))
        if self._config.tracker == "wandb":
            self._trackers.append(WandbRun(shown))
        for text in since_last_attempt(ledger.read_ledger(self._ledger)):
            self._text(start.step, text)
        self._metrics = metrics.MetricsWriter(self._run, start.attempt)
        self._validation = metrics.JsonLines(self._run / metrics.VALIDATION)
        self._measures += [line["measure"] for line in validation]
        self._progress = metrics.ProgressPrinter(
            self._config.training.steps, renews=sys.stdout.isatty()
        )
        return [
            self._metrics,
            lambda record: self._scalars(record.step, curves(record)),
            self._progress,
        ]

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.scalars(step, values)

    def _text(self, step: int, text: str) -> None:
        for tracker in self._trackers:
            tracker.text(step, text)

    def close(self) -> None:
        """End what shows the attempt elsewhere."""
        for tracker in self._trackers:
            tracker.close()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._progress:
            self._progress.leave()
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

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
        self.refuse_superseded()
        ledger.append(self._ledger, kind, attempt=self._start.attempt, **fields)

    def sync(self, step: int) -> None:
        """Wait until everything is on disk that comes before a checkpoint after `step` updates.

        Raises:
            ValueError: the attempt was superseded.
            OSError: names the file that cannot be written.
        """
        for file in (self._metrics, self._validation):
            if file:
                file.sync()
        self.refuse_superseded()
        for tracker in self._trackers:
            tracker.sync(step)

    def refuse_superseded(self) -> None:
        """Refuse to continue if another attempt has begun, or the supervisor has ended this one.

        Raises:
            ValueError: names the other attempt.
        """
        folder.refuse_superseded(ledger.read_ledger(self._ledger), self._start.token)
        control.check_not_superseded(self._run, control.token_of(os.environ))

    def validated(self, step: int, scores: Mapping[str, Any], measure: str) -> None:
        """Write a measurement on the validation split after `step` updates.

        Args:
            step: number of updates.
            measure: `Reading.measure`: losses of equal measures can be compared.
            scores: `total` with loss, perplexity and number of targets; `subsets`, and `terms` and
                `corpora` if there are several, with the same by name.
        """
        parts = dict(scores)
        total = parts.pop("total")
        if not parts["terms"]:
            del parts["terms"]
        line = {"attempt": self._start.attempt, "step": step, **total}
        if self._validation:
            self._validation.write({**line, "measure": measure, **parts})
        self._measures.append(measure)
        # What cannot be compared is another curve.
        other = "" if measure == self._measures[0] else f"@{measure}"
        values = {f"validation/{name}": total[name] for name in ("loss", "perplexity")}
        for name, score in parts.get("terms", {}).items():
            values[f"validation/loss/{name}"] = score["loss"]
        for name, score in {**parts["subsets"], **parts.get("corpora", {})}.items():
            values[f"validation perplexity/{name}"] = score["perplexity"]
        self._scalars(step, {f"{name}{other}": value for name, value in values.items()})
        self.say(metrics.validation_line([line]))

    def suspicion(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - a record's values
        """Record what the spike detector found: the fields of an `Event`."""
        text = describe({"kind": kind, **fields})
        self.say(text)
        self._text(fields["step"], text)
        self.record(kind, **fields)

    def discontinuity(self, step: int, reason: str) -> None:
        """Warn that the losses after the resume do not continue the run."""
        self.record("discontinuity", step=step, reason=reason)
        first = self._start.step
        self.say(f"WARNING: the run does not continue from step {first}: {reason}")

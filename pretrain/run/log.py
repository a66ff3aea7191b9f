"""What rank 0 writes and says while an attempt runs, and the detector that reads along.

The ledger, metrics.jsonl, validation.jsonl, TensorBoard, the console. A full disk does not end an
attempt here: what cannot be written is kept and written later, and no checkpoint is saved while
something waits (`sync`). Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config import preflight as checks
from pretrain.config.run import RunConfig
from pretrain.loop import StepRecord
from pretrain.run import folder as run_folder
from pretrain.run import ledger, metrics
from pretrain.run.folder import Start
from pretrain.run.status import sentence, since_last_attempt
from pretrain.spikes.detector import Event, SpikeDetector
from pretrain.spikes.live import SpikeWatch, declared_changes, history_before
from pretrain.supervision import control as orders

if TYPE_CHECKING:
    from pretrain.inference.evaluate import Scores

_MOST_UNSAID = 1000
"""Lines for the console that are kept while its log is on a full disk."""
STANDARD = "standard"
"""`masks` in validation.jsonl: the objective was `ObjectiveSettings.for_validation`."""


class RunLog:
    """Of one attempt. Rank 0 alone has one that is open."""

    def __init__(self, config: RunConfig, start: Start) -> None:
        """An attempt that the ledger knows of."""
        self._config, self._start = config, start
        self._run = Path(config.folder)
        self._ledger = self._run / ledger.FILE_NAME
        self._unsaid: deque[str] = deque(maxlen=_MOST_UNSAID)
        self._waiting: list[tuple[str, dict[str, object]]] = []
        self._warned: set[str] = set()

    def say(self, text: str) -> None:
        """Print a line at once, or with a later one where its log is on a full disk."""
        self._unsaid.append(text)
        with contextlib.suppress(OSError):
            while self._unsaid:
                sys.stdout.write(self._unsaid[0] + "\n")
                sys.stdout.flush()
                self._unsaid.popleft()

    def warn_once(self, text: str) -> None:
        """Print a line, unless it was printed before."""
        if text not in self._warned:
            self._warned.add(text)
            self.say(text)

    def record(self, kind: str, **fields: object) -> None:
        """Append to the ledger, after what `note` could not append.

        Raises:
            ValueError: the run is not ours any more.
            OSError: names the ledger; nothing was appended.
        """
        self._record_waiting()
        ledger.append(self._ledger, kind, attempt=self._start.attempt, **fields)

    def _record_waiting(self) -> None:
        self.refuse_superseded()
        while self._waiting:
            kind, fields = self._waiting[0]
            ledger.append(self._ledger, kind, attempt=self._start.attempt, **fields)
            self._waiting.pop(0)

    def note(self, kind: str, **fields: object) -> None:
        """Append to the ledger, now or as soon as the disk takes it.

        Raises:
            ValueError: the run is not ours any more.
        """
        try:
            self.record(kind, **fields)
        except OSError:
            self._waiting.append((kind, fields))

    def sync(self, step: int) -> None:
        """Have everything on disk that a checkpoint after `step` updates has to follow.

        Raises:
            ValueError: the run is not ours any more.
            OSError: names the file that cannot be written.
        """
        self._metrics.sync()
        self._validation.sync()
        self._record_waiting()
        self._tensorboard.open(step)

    def refuse_superseded(self) -> None:
        """Refuse to go on when another attempt has begun, or has been ordered.

        Raises:
            ValueError: which.
        """
        run_folder.refuse_superseded(ledger.read(self._ledger), self._start.token)
        orders.refuse_superseded(self._run, orders.token_of(os.environ))

    def open(self) -> list[Callable[[StepRecord], None]]:
        """Bring everything to where the attempt begins; returns who is to be told of each step."""
        start = self._start
        self._tensorboard = metrics.TensorBoard(
            self._run / "tensorboard", start.attempt, start.step, self.say
        )
        for words in since_last_attempt(ledger.read(self._ledger)):
            self._tensorboard.text(start.step, words)
        self._metrics = metrics.MetricsWriter(self._run, start.attempt)
        self._validation = metrics.JsonLines(self._run / metrics.VALIDATION)
        if reason := metrics.left_out(self._run):
            self.say(f"WARNING: {reason}")
        lines = metrics.read(self._run / metrics.METRICS)
        self._watch = SpikeWatch(
            SpikeDetector(self._config.spike, declared_changes(self._config, start.state)),
            *history_before(start.step, lines, self._comparable_validation()),
            self._tell,
        )
        return [
            self._metrics,
            self._tensorboard,
            metrics.ProgressPrinter(self._config.training.steps),
            self._continuity(lines),
        ]

    @property
    def has_validation(self) -> bool:
        """Whether the validation loss was measured after the last step."""
        return self._watch.validation_loss is not None

    def verdict(self, record: StepRecord) -> int:
        """What the detector says of a step: GO_ON, or EXIT_SPIKE."""
        return self._watch(record)

    def validated(self, step: int, scores: Scores) -> None:
        """Note a measurement on the validation split after `step` updates."""
        fields = dataclasses.asdict(scores)
        line = {"attempt": self._start.attempt, "step": step, **fields.pop("total")}
        parts = {name: value for name, value in fields.items() if value or name == "subsets"}
        self._validation.write({**line, "masks": STANDARD, **parts})
        total = scores.total
        self._watch.validation_loss = total.loss
        values = {"validation/loss": total.loss, "validation/perplexity": total.perplexity}
        values |= {f"validation/loss/{n}": score.loss for n, score in scores.terms.items()}
        values |= {
            f"validation perplexity/{n}": score.perplexity for n, score in scores.subsets.items()
        }
        self._tensorboard.scalars(step, values)
        self.say(f"after {step} steps: validation perplexity {total.perplexity:.2f}")

    def _comparable_validation(self) -> list[dict[str, Any]]:
        """The recorded measurements whose masks were the standard ones.

        Before validation.jsonl named them, they were the recipe's.
        """
        lines = metrics.read(self._run / metrics.VALIDATION)
        objective = self._config.objective
        if objective == objective.for_validation():
            return lines
        return [line for line in lines if line.get("masks") == STANDARD]

    def _tell(self, event: Event) -> None:
        fields = dataclasses.asdict(event)
        kind = fields.pop("kind")
        words = sentence({"kind": kind, **fields})
        self.say(words)
        self._tensorboard.text(event.step, words)
        # A spike ends the attempt: the supervisor has to find it in the ledger.
        (self.record if kind == "spike" else self.note)(kind, **fields)

    def _continuity(self, lines: Sequence[dict[str, Any]]) -> Callable[[StepRecord], None]:
        """An observer that says loudly where the first losses do not continue the run."""
        size = self._config.batch.micro_batch_size
        attempts = {
            record["attempt"]
            for record in ledger.read(self._ledger)
            if record["kind"] == "attempt" and record["micro_batch_size"] == size
        }
        step, seed = self._start.step, self._start.seed
        recorded = checks.recorded_losses(lines, step, seed, attempts)
        survived = [line for line in metrics.surviving(lines) if line["step"] < step]
        history = [metrics.loss_of(line) for line in survived]
        losses: list[float] = []
        reason = ""

        def observe(record: StepRecord) -> None:
            nonlocal reason
            if reason or len(losses) == checks.FIRST_LOSSES:
                return
            losses.append(record.loss)
            deviations = self._config.spike.deviations
            reason = checks.discontinuity(losses, recorded, history, deviations)
            if reason:
                self.note("discontinuity", step=record.step, reason=reason)
                self.say(f"WARNING: the run does not continue from step {step}: {reason}")

        return observe

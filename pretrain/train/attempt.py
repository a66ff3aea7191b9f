"""One attempt at a run: train, evaluate, save, stop.

Read `Attempt.run`; `setup.prepare` comes before it. The other parts of this room: `resume` (what
an attempt begins with), `saver` (checkpoints), `log` (what rank 0 writes).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from data_prep.common.exit_codes import EXIT_DONE, EXIT_PREEMPTED
from pretrain.config.run import Segment
from pretrain.data.batches import SegmentedBatches
from pretrain.data.prefetch import prefetched
from pretrain.loop.loop import Hook
from pretrain.loop.loop import run as run_loop
from pretrain.loop.protocols import GO_ON, Batches, StepRecord
from pretrain.records import checkpoints, ledger, pace
from pretrain.records.figures import BETA, MEMORY, SECONDS
from pretrain.records.heartbeat import EVALUATE, INIT, SAVE
from pretrain.train.data_pipeline import DataPipeline
from pretrain.train.log import RunLog
from pretrain.train.saver import Saver
from pretrain.train.setup import Setup

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.engine.engine import Engine


class NotLoaded(ValueError):
    """This rank cannot load the checkpoint; others may."""


class Attempt:
    """One attempt at a run, on one rank."""

    def __init__(self, setup: Setup) -> None:
        """Build the engine, load the checkpoint and open the records.

        Raises:
            NotLoaded: the checkpoint does not fit the engine, or a file of this rank is refused.
            Failure: on every rank, if the records cannot be opened.
        """
        from pretrain.engine.forward_timer import ForwardTimer
        from pretrain.engine.profile import Profiler

        config, start, group = setup.config, setup.start, setup.group
        self.setup, self.config, self.start, self.group = setup, config, start, group
        self.supervisor = supervisor = setup.supervisor
        self.forward_timer = ForwardTimer(setup.model, setup.process.device)
        self.beta: Tensor | None = getattr(setup.model.head, "beta", None)
        self.engine = _engine(setup)
        self.log = RunLog(setup)
        self.saver = Saver(setup, self.log, self.engine.save)
        self.segment = setup.segments.at(max(0, start.step - 1))
        self.left = [part for part in setup.segments.parts if part.end_step > start.step]
        self.pipelines = {
            part.first_step: DataPipeline(setup, part) for part in (self.segment, *self.left)
        }
        self.pipeline = self.pipelines[self.segment.first_step]
        supervisor.report_setup()
        group.on_rank_0(self.log.open)
        window = [] if group.rank else config.profile.steps
        self.profiler = Profiler(window, setup.run_folder, start.attempt, self.log.say)

    def run(self) -> int:
        """Train to the end; returns the exit code.

        Raises:
            Failure: on every rank, if checkpoints cannot be written or another attempt has begun.
        """
        verdict = self._evaluate_if_missed()
        self.profiler.begin_if_due(self.start.step)
        parts = [(each.segment.end_step, each.batches) for each in self.pipelines.values()]
        workers = self.config.training.data_workers
        with prefetched(SegmentedBatches(parts), workers) as batches:
            for segment in self.left:
                if verdict == GO_ON:
                    verdict = self._train(segment, batches)
        self._end_trace()
        self.log.close()
        if verdict == GO_ON:
            self.group.on_rank_0(self._record_done)
            return EXIT_DONE
        if verdict == EXIT_PREEMPTED:
            self._save_and_leave()
        return verdict

    def _train(self, segment: Segment, batches: Batches) -> int:
        """Train to the end of a segment; returns the loop's verdict."""
        if segment is not self.segment:
            enter = self.supervisor.in_stage(
                EVALUATE, lambda step: self._begin_segment(segment), after=INIT
            )
            if (verdict := enter(segment.first_step)) != GO_ON:
                return verdict
        training, first = segment.config.training, max(segment.first_step, self.start.step)
        if len(self.setup.segments.parts) > 1:
            name = segment.name or "the recipe"
            self.group.on_rank_0(
                lambda: self.log.say(f"{name}: steps {first} to {segment.end_step}")
            )
        hooks = [
            Hook(training.evaluation_interval, self.supervisor.in_stage(EVALUATE, self._evaluate)),
            Hook(training.checkpoint_interval, self.supervisor.in_stage(SAVE, self.saver.save)),
        ]
        return run_loop(
            self.engine,
            batches,
            self.pipeline.objective,
            learning_rate=self.setup.learning_rate,
            steps=range(first, segment.end_step),
            observers=[self.log.step, self._trace, self.log.watch, self.supervisor.verdict],
            hooks=hooks,
            measure=self._measure,
        )

    def _begin_segment(self, segment: Segment) -> int:
        """Enter a segment; where it validates on other data, measure what its losses begin at.

        Returns:
            The watch's verdict.
        """
        before = self.pipeline.validation_id
        self.segment, self.pipeline = segment, self.pipelines[segment.first_step]
        same = self.pipeline.validation_id == before
        return GO_ON if same else self._evaluate_once(segment.first_step)

    def _measure(self, data_seconds: float) -> dict[str, float]:
        """What this rank tells of itself before a step."""
        from pretrain.engine import memory, workarounds

        forward_seconds = self.forward_timer.take()  # none before the first step
        found = {
            SECONDS: pace.own_seconds(data_seconds, forward_seconds or math.nan),
            MEMORY: float(memory.most_bytes(self.setup.process.device)),
        }
        if self.beta is not None:
            found[BETA] = workarounds.held_by_rank_0(self.beta).item()
        return found

    def _trace(self, record: StepRecord) -> None:
        """Begin or end a trace after a step."""
        self.profiler.begin_if_due(record.step + 1)
        if self.profiler.ends(record.step + 1):
            self._end_trace()

    def _end_trace(self) -> None:
        """End the trace that goes on, if one does; it may take long to write."""
        if self.profiler.is_on:
            self.supervisor.in_stage(SAVE, self.profiler.end)(self.profiler.steps)

    def _evaluate(self, step: int) -> int:
        """Measure and judge the validation loss after `step` updates; returns the watch's verdict.

        What the detector finds is recorded first: an attempt that ends in between measures again.
        """
        sums = self.engine.evaluate(self.pipeline.validation, self.pipeline.sums)

        def judge() -> int:
            scores, record = self.pipeline.scores(sums)
            verdict = self.log.watch.evaluated(step, scores.total.loss, self.pipeline.validation_id)
            self.log.validated(step, record, self.pipeline.validation_id)
            return verdict

        return self.group.on_rank_0(judge)

    def _evaluate_once(self, step: int) -> int:
        """The same, unless an earlier attempt has done it."""
        validation_id = self.pipeline.validation_id
        if self.group.on_rank_0(lambda: self.log.watch.has_evaluated(step, validation_id)):
            return GO_ON
        return self._evaluate(step)

    def _evaluate_if_missed(self) -> int:
        """Do the evaluation that is due before the attempt's first step; returns the verdict.

        An attempt that is asked to stop saves and leaves out the evaluation that is due after the
        same step. It is done here, before the next step, where the detector expects it. So is that
        of step 0, where the run continues another model.
        """
        step = self.start.step
        if not step and not self.config.model.init_from:
            return GO_ON
        interval = self.segment.config.training.evaluation_interval
        if not Hook(interval, self._evaluate).is_due(step, self.segment.end_step):
            return GO_ON
        return self.supervisor.in_stage(EVALUATE, self._evaluate_once, after=INIT)(step)

    def _save_and_leave(self) -> None:
        """Save where the loop was asked to stop, and record that."""
        step = self.group.on_rank_0(lambda: self.supervisor.stopped_after)
        self.supervisor.in_stage(SAVE, self.saver.save)(step)
        reason = "it was asked to stop"
        self.group.on_rank_0(lambda: self.log.record("preempted", step=step, reason=reason))

    def _record_done(self) -> None:
        """Record that the run has finished, and since when a spike is suspected, if one is.

        What only the last evaluations or steps showed can neither heal nor be confirmed.
        """
        records = ledger.read_ledger(self.setup.run_folder / ledger.FILE_NAME)
        since = ledger.run_state(records).suspected_since
        suspected = {} if since is None else {"suspected_since": since}
        self.log.record("done", step=self.config.training.steps, **suspected)


def _engine(setup: Setup) -> Engine:
    """Build the engine, and load the checkpoint that the attempt begins with."""
    from pretrain.engine.engine import Engine

    training, step = setup.config.training, setup.start.step
    engine = Engine(
        setup.model,
        setup.config.optimizer,
        setup.settings,
        setup.process,
        activation_checkpointing=training.activation_checkpointing,
        compiled=setup.compiled,
    )
    setup.supervisor.report_setup()
    if step:
        try:
            engine.load(checkpoints.folder_of(setup.run_folder, step))
        except ValueError as error:
            reason = f"the checkpoint of step {step} cannot be loaded: {error}"
            raise NotLoaded(f"{setup.run_folder}: {reason}") from error
        setup.supervisor.report_setup()
    return engine

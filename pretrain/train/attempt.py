"""One attempt at a run: train, evaluate, save, stop.

Read `Attempt.run`; `setup.prepare` comes before it. What each rank tells of itself is in
`measurements`, what rank 0 writes in `log`.
"""

import dataclasses
import functools

from data_prep.common.exit_codes import EXIT_DONE, EXIT_PREEMPTED
from pretrain.config.load import public
from pretrain.data.batches import segmented_batches
from pretrain.data.prefetch import prefetched
from pretrain.loop.loop import Hook
from pretrain.loop.loop import run as run_loop
from pretrain.loop.protocols import GO_ON, Batches
from pretrain.records import checkpoints, ledger
from pretrain.records.heartbeat import EVALUATE, SAVE
from pretrain.spikes.policy import checkpoints_to_keep
from pretrain.train.data_pipeline import DataPipeline
from pretrain.train.log import RunLog
from pretrain.train.setup import Setup


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
        from pretrain.engine.engine import Engine
        from pretrain.train.measurements import Measurements
        from pretrain.train.profile import Profiler

        self.setup, self.start, self.group = setup, setup.start, setup.group
        self.supervisor, self.measurements = setup.supervisor, Measurements(setup)
        self.engine = Engine(setup.model, setup.config.optimizer, setup.settings, setup.process)
        self.supervisor.report_setup()
        self._load_checkpoint()
        self.log = RunLog(setup)
        # The first one may be that of the step before, which may have an evaluation to be done.
        parts = [part for part in setup.segments.parts if part.end_step >= self.start.step]
        self.pipelines = [DataPipeline(setup, part) for part in parts]
        self.pipeline = self.pipelines[0]
        self.supervisor.report_setup()
        self.group.on_rank_0(self.log.open)
        self.profiler = Profiler(setup, self.log.say)

    def _load_checkpoint(self) -> None:
        if step := self.start.step:
            run = self.setup.run_folder
            try:
                self.engine.load(checkpoints.folder_of(run, step))
            except ValueError as error:
                reason = f"the checkpoint of step {step} cannot be loaded: {error}"
                raise NotLoaded(f"{run}: {reason}") from error
            self.supervisor.report_setup()

    def run(self) -> int:
        """Train to the end; returns the exit code.

        Raises:
            Failure: on every rank, if checkpoints cannot be written or another attempt has begun.
        """
        verdict = self._evaluate_if_missed()
        self.profiler.advance(self.start.step)
        parts = [(each.segment.end_step, each.batches.micro_batches) for each in self.pipelines]
        workers = self.setup.config.training.data_workers
        with prefetched(functools.partial(segmented_batches, parts), workers) as batches:
            for pipeline in self.pipelines:
                if verdict == GO_ON and pipeline.segment.end_step > self.start.step:
                    verdict = self._train(pipeline, batches)
        # A launcher ends rank 0 a second after another rank has ended with the code of a spike.
        self.group.on_rank_0(self._close)
        if verdict == GO_ON:
            self.group.on_rank_0(self._record_done)
            return EXIT_DONE
        if verdict == EXIT_PREEMPTED:
            step = self.group.on_rank_0(lambda: self.supervisor.stopped_after)
            self._save(step)
            reason = "it was asked to stop"
            self.group.on_rank_0(lambda: self.log.record("preempted", step=step, reason=reason))
        return verdict

    def _close(self) -> None:
        self.profiler.close()
        self.log.close()

    def _train(self, pipeline: DataPipeline, batches: Batches) -> int:
        """Train to the end of a segment; returns the loop's verdict."""
        segment, before, self.pipeline = pipeline.segment, self.pipeline.validation_id, pipeline
        training, first = segment.config.training, max(segment.first_step, self.start.step)
        # Where it validates on other data, this is what its losses begin at.
        if pipeline.validation_id != before and (verdict := self._evaluate(first)):
            return verdict
        if len(self.setup.segments.parts) > 1:
            text = f"{segment.name or 'the recipe'}: steps {first} to {segment.end_step}"
            self.group.on_rank_0(lambda: self.log.say(text))
        return run_loop(
            self.engine,
            batches,
            pipeline.objective,
            learning_rate=self.setup.learning_rate,
            steps=range(first, segment.end_step),
            observers=[
                self.log.step,
                lambda record: self.profiler.advance(record.step + 1),
                lambda record: self.log.watch(record),
                self.supervisor.verdict,
            ],
            hooks=[
                Hook(training.evaluation_interval, self._evaluate),
                Hook(training.checkpoint_interval, self._save),
            ],
            measure=self.measurements.take,
        )

    def _evaluate(self, step: int) -> int:
        """Measure and judge the validation loss after `step` updates; returns the watch's verdict.

        An earlier attempt may have done so. What the detector finds is recorded first: an attempt
        that ends in between measures again.
        """
        pipeline, log = self.pipeline, self.log

        def judge() -> int:
            scores = pipeline.scores(sums)
            verdict = log.watch.evaluated(step, scores["total"]["loss"], pipeline.validation_id)
            log.validated(step, scores, pipeline.validation_id)
            return verdict

        with self.supervisor.stage(EVALUATE, step):
            if self.group.on_rank_0(lambda: log.watch.has_evaluated(step, pipeline.validation_id)):
                return GO_ON
            sums = self.engine.evaluate(pipeline.validation, pipeline.sums)
            return self.group.on_rank_0(judge)

    def _evaluate_if_missed(self) -> int:
        """Do the evaluation that is due before the attempt's first step; returns the verdict.

        An attempt that is asked to stop saves and leaves out the evaluation that is due after the
        same step. It is done here, before the next step, where the detector expects it. So is that
        of step 0, where the run continues another model.
        """
        step, segment = self.start.step, self.pipeline.segment
        hook = Hook(segment.config.training.evaluation_interval, self._evaluate)
        if hook.is_due(step, segment.end_step) and (step or self.setup.config.model.init_from):
            return self._evaluate(step)
        return GO_ON

    def _record_done(self) -> None:
        """Record that the run has finished, and since when a spike is suspected, if one is.

        A suspicion raised by the last steps or evaluations can be neither confirmed nor cleared.
        """
        records = ledger.read_ledger(self.setup.run_folder / ledger.FILE_NAME)
        since = ledger.run_state(records).suspected_since
        suspected = {} if since is None else {"suspected_since": since}
        self.log.record("done", step=self.setup.config.training.steps, **suspected)

    def _save(self, step: int) -> None:
        """Save a checkpoint after `step` updates.

        Raises:
            Failure: on every rank; the save failed.
        """
        run, group = self.setup.run_folder, self.group
        with self.supervisor.stage(SAVE, step):
            group.on_rank_0(lambda: self._prepare_save(step))
            checkpoints.save(
                run,
                step,
                lambda: self._facts(step),
                write=self.engine.save,
                group=group,
                token=self.start.token,
            )
            group.on_rank_0(lambda: self._commit(step))

    def _facts(self, step: int) -> dict[str, object]:
        """What a reader of a checkpoint needs to know without the run's folder.

        Raises:
            ValueError: another attempt has begun.
        """
        self.log.check_not_superseded()
        setup, order = self.setup, self.start.order
        blocks = setup.segments.sizes.first_block(step)
        manifest, *_ = setup.course.manifests.values()
        return {
            "architecture": dataclasses.asdict(setup.architecture),
            "recipe": public(setup.config),
            "deepspeed": setup.settings,
            "ranks": self.group.world_size,
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
            "corpora": self.start.corpora,
            "environment": setup.environment,
        }

    def _prepare_save(self, step: int) -> None:
        self.log.sync(step)
        checkpoints.check_disk_space(self.setup.run_folder, 1, self.start.checkpoint_size)

    def _commit(self, step: int) -> None:
        """Record a checkpoint in the ledger, so that the run can resume from it."""
        digest = checkpoints.manifest_hash(self.setup.run_folder, step)
        self.log.record("commit", step=step, ranks=self.group.world_size, manifest=digest)
        try:
            self._delete_old(step)
        except OSError as error:  # the next commit tries again
            self.log.warn_once(f"WARNING: older checkpoints are not deleted for now: {error}")

    def _delete_old(self, step: int) -> None:
        """Delete the checkpoints that neither the recipe nor a possible rollback needs."""
        run = self.setup.run_folder
        records = ledger.read_ledger(run / ledger.FILE_NAME)
        keep = checkpoints_to_keep(records, step, self.setup.segments.at(step - 1).config)
        for old in ledger.run_state(records).checkpoints:
            if old not in keep:
                self.log.record("delete", step=old)
        checkpoints.remove(run, keep, self.log.warn_once)

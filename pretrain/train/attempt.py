"""One attempt at a run: resume, train, evaluate, save, stop.

Read `Attempt.__init__` for what happens before the first step, then `Attempt.run`. The other
parts of this room: `resume` (what an attempt begins with), `saver` (checkpoints), `log` (records)
and `continuity`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.common.wording import count
from pretrain.checks import devices, needs
from pretrain.checks import recipe as recipe_checks
from pretrain.checks import resume as resume_checks
from pretrain.config.deepspeed import compiles, refuse_other
from pretrain.config.load import public
from pretrain.config.run import Phase, RunConfig
from pretrain.config.schedules import learning_rate
from pretrain.data.batches import validation_note
from pretrain.data.mixture import Mixture
from pretrain.data.prefetch import prefetched
from pretrain.data.sources import Joined
from pretrain.loop.loop import Callbacks, Hook, Rank0Callbacks
from pretrain.loop.loop import run as run_loop
from pretrain.loop.protocols import GO_ON, StepRecord
from pretrain.model.backends import choose_backend
from pretrain.records import checkpoints, control, folder, fork, ledger, metrics, pace, versions
from pretrain.records.collective import Failure, Group
from pretrain.records.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from pretrain.records.figures import BETA, MEMORY, SECONDS, Figures
from pretrain.records.heartbeat import EVALUATE, INIT, SAVE
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.live import (
    SpikeWatch,
    declared_changes,
    history_before,
)
from pretrain.spikes.policy import checkpoints_to_keep, max_checkpoints_kept
from pretrain.train import resume
from pretrain.train.client import SupervisorClient
from pretrain.train.continuity import continuity_check
from pretrain.train.log import RunLog
from pretrain.train.reading import Reading
from pretrain.train.resume import Start
from pretrain.train.saver import Saver

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.engine.profile import Profiler


class NotLoaded(ValueError):
    """A checkpoint that this rank, maybe this one alone, cannot load."""


class Attempt:
    """One attempt at a run, on one rank."""

    def __init__(self, config: RunConfig, world_size: int) -> None:
        """Check the recipe, join the other ranks, build the model, choose where the run resumes.

        Args:
            config: the recipe.
            world_size: number of ranks.

        Raises:
            ValueError: the recipe cannot be trained, or does not fit its run's folder.
            Failure: on every rank, if any refuses.
        """
        import torch

        from pretrain.engine.determinism import make_deterministic
        from pretrain.engine.distributed import gather
        from pretrain.engine.engine import deepspeed_json, start
        from pretrain.models.initial_weights import initial_model

        self.config = config
        self.architecture, self.manifests = recipe_checks.check(config, world_size)
        clipping = config.optimizer.gradient_clipping
        batch = config.phase(0).config.batch  # its sizes change nothing that DeepSpeed computes
        self.settings = deepspeed_json(config.training.deepspeed, batch, clipping, world_size)
        resume_checks.refuse_other_recipe(config, self.manifests)
        self.run_folder = Path(config.folder)
        if config.training.deterministic:
            make_deterministic(self.run_folder, os.environ)
        self.process = start()
        self.group = Group(self.process.rank, self.process.world_size, gather)
        self.versions = versions.refuse_other_code(self.group)
        on_gpu = self.process.device.type == "cuda"
        accelerator = torch.cuda.get_device_name() if on_gpu else "cpu"
        capability = float("{}.{}".format(*torch.cuda.get_device_capability())) if on_gpu else None
        self.group.on_rank_0(
            lambda: recipe_checks.refuse_device(
                config, world_size, self.process.device.type, capability
            )
        )
        wanted = config.training.attention_backend
        self.backend = choose_backend(self.architecture, wanted, on_gpu)
        self.compiled = compiles(config.training.compile, self.settings, on_gpu)
        kind = devices.kind_of(accelerator) if on_gpu else None
        peak = devices.DEVICES[kind].flops if kind else None
        self.peak_flops = world_size * peak if peak else None
        self.environment = {
            **folder.environment(accelerator, self.versions),
            "attention_backend": self.backend,
            "compiled": self.compiled,
        }
        state, self.token = self.group.on_rank_0_slowly(self._enter)
        self.supervisor = SupervisorClient(
            self.run_folder, self.token, self.group.rank, config.training.steps
        )
        self.model = initial_model(
            config, self.architecture, self.backend, read=not state.checkpoints
        )
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.supervisor.report_setup()
        self.done = state.is_done(config.training.steps)
        if not self.done:
            streams = (recipe_checks.open_stream(stream, "train") for stream in config.streams)
            self.blocks = Joined(tuple(streams))
            self.start = self._resume(state)
            self.supervisor.report_setup()

    def _enter(self) -> tuple[ledger.RunState, str]:
        """Lock the run; returns its state and this attempt's token."""
        token = control.token_of(os.environ)
        control.refuse_superseded(self.run_folder, token)
        self.lock = folder.lock(self.run_folder)  # held until this process exits
        fork.take(self.config)
        state = folder.open_run(self.config, self.manifests, self._initial_weights())
        return state, token or secrets.token_hex(8)

    def _initial_weights(self) -> Callable[[], dict[str, object]] | None:
        """What copies the model that the run starts from into its folder; None without one."""
        if not self.config.model.init_from:
            return None
        from pretrain.convert import init_from

        manifest = next(iter(self.manifests.values()))
        return lambda: init_from.copy_initial_model(self.config, self.architecture, manifest)

    def _resume(self, state: ledger.RunState) -> Start:
        """Choose the checkpoint to resume from, and record that the attempt begins."""
        config = self.config
        totals = [len(source) for source in self.blocks.sources]
        order = state.order(Mixture.of_run(config), totals, config.sizes.first_block)
        self.hosts: list[str] = self.group.gather(socket.gethostname())
        self.recent: deque[Mapping[str, float]] = deque(maxlen=pace.STEPS)
        point = checkpoints.find_resume_point(self.run_folder, state.checkpoints, self.group)
        size = checkpoints.BYTES_PER_PARAMETER * self.parameters
        if point.manifest:
            size = checkpoints.size_of(point.manifest)

        def begin() -> Start:
            if point.manifest:
                before = ledger.lineage_record(order, config.sizes.first_block(point.step))
                resume_checks.refuse_other_checkpoint(
                    point.manifest, point.step, self.architecture, before
                )
                saved = point.manifest["deepspeed"]
                refuse_other(config.training.deepspeed, self.settings, saved, point.step)
            launched = control.read(self.run_folder)
            number = state.next_attempt
            if launched and launched.token == self.token:
                number = launched.attempt
            share, corpora = self.blocks.share_of_tokens, self._corpora()
            start = Start(number, self.token, point.step, state, order, share, size, corpora)
            most_kept = max_checkpoints_kept(config)
            resume.begin(
                config, self.settings, start, point, self.hosts, most_kept, self.environment
            )
            return start

        return self.group.on_rank_0(begin)

    def _corpora(self) -> list[dict[str, object]]:
        """Of several corpora, or ways to cut them, what the ledger says of each."""
        if not self.config.data.corpora and len(self.config.streams) == 1:
            return []
        return [
            {
                "name": stream.name,
                "digest": self.manifests[stream.name].digest(),
                "blocks": len(source),
                "share_of_tokens": source.share_of_tokens,
            }
            for stream, source in zip(self.config.streams, self.blocks.sources, strict=True)
        ]

    def run(self) -> int:
        """Train to the end; returns the exit code.

        Raises:
            Failure: on every rank, if checkpoints cannot be written or another attempt has begun.
        """
        if self.done:
            if self.group.rank == 0:
                sys.stdout.write(f"{self.run_folder} is done already; nothing to train\n")
            return EXIT_DONE
        self._build_engine()
        self.log = RunLog(self.config, self.start, self.supervisor.refuse_superseded)
        self.saver = Saver(
            self.config,
            self.start,
            self.group,
            self.log,
            begin_save=self.engine.begin_save,
            facts=self._facts,
            retained=self._retained,
        )
        self._enter_phase(self.config.phase(max(0, self.start.step - 1)))
        self.supervisor.report_setup()
        observers: list[Callable[[StepRecord], None]] = []
        self.group.on_rank_0(lambda: observers.extend(self._open_log()))
        self.profiler = self._profiler()
        verdict = self._evaluate_if_missed()
        self.profiler.begin_if_due(self.start.step)
        for phase in self.config.resolved_phases:
            if verdict == GO_ON and phase.end_step > self.start.step:
                verdict = self._train(phase, observers)
        self._end_trace(self.profiler.steps)
        self.log.close()
        begun = self.saver.begun
        if begun is not None and verdict != EXIT_FAILED:  # a superseded attempt commits nothing
            self.supervisor.in_phase(SAVE, lambda step: self.saver.finish())(begun)
        if verdict == GO_ON:
            steps = self.config.training.steps
            self.group.on_rank_0(lambda: self._record_done(steps))
            return EXIT_DONE
        if verdict == EXIT_PREEMPTED:
            self._save_and_leave()
        return verdict

    def _record_done(self, steps: int) -> None:
        """Record that the run has finished, and since when a spike is suspected, if one is.

        What only the last evaluations or steps showed can neither heal nor be confirmed.
        """
        records = ledger.read(self.run_folder / ledger.FILE_NAME)
        since = ledger.run_state(records, self.config.training.seed).suspected_since
        suspected = {} if since is None else {"suspected_since": since}
        self.log.record("done", step=steps, **suspected, **self.log.guarded)

    def _build_engine(self) -> None:
        """Build the engine and load the checkpoint.

        Raises:
            NotLoaded: the checkpoint does not fit the engine, or a file of this rank is refused.
        """
        from pretrain.engine.engine import Engine
        from pretrain.engine.forward_timer import ForwardTimer

        self.forward_timer = ForwardTimer(self.model, self.process.device)
        beta = getattr(self.model.head, "beta", None)
        self.measured: dict[str, Tensor | float] = {SECONDS: math.nan, MEMORY: math.nan}
        self.measured |= {} if beta is None else {BETA: beta}
        self.engine = Engine(
            self.model,
            self.config.optimizer,
            self.settings,
            self.process,
            activation_checkpointing=self.config.training.activation_checkpointing,
            compiled=self.compiled,
            compared=self.config.training.comparison_interval > 0,
        )
        self.supervisor.report_setup()
        if self.start.step:
            try:
                self.engine.load(checkpoints.folder_of(self.run_folder, self.start.step))
            except ValueError as error:
                reason = f"the checkpoint of step {self.start.step} cannot be loaded: {error}"
                raise NotLoaded(f"{self.run_folder}: {reason}") from error
            self.supervisor.report_setup()

    def _train(self, phase: Phase, observers: Sequence[Callable[[StepRecord], None]]) -> int:
        """Train to the end of a phase; returns the loop's verdict."""
        if phase is not self.phase:
            enter = self.supervisor.in_phase(
                EVALUATE, lambda step: self._begin_phase(phase), after=INIT
            )
            if (verdict := enter(phase.first_step)) != GO_ON:
                return verdict
        training, first = phase.config.training, max(phase.first_step, self.start.step)
        if self.config.phases:
            self.group.on_rank_0(
                lambda: self.log.say(f"{phase}: steps {first} to {phase.end_step}")
            )
        actions = (  # in this order: a comparison comes before a checkpoint
            (training.comparison_interval, EVALUATE, self._compare),
            (training.evaluation_interval, EVALUATE, self._evaluate),
            (training.checkpoint_interval, SAVE, self.saver.save),
        )
        hooks = [
            Hook(interval, self.supervisor.in_phase(name, action))
            for interval, name, action in actions
            if interval
        ]
        with prefetched(self.reading.batches, training.data_workers) as batches:
            self.timed = pace.TimedBatches(batches)
            return run_loop(
                self.engine,
                self.timed,
                self.reading.objective,
                learning_rate=self._learning_rate,
                steps=range(first, phase.end_step),
                callbacks=Callbacks(hooks, self._after_step, self.saver, lambda: self.measured),
                rank_0=Rank0Callbacks(observers, lambda record: self.watch(record), self._verdict),
            )

    def _retained(self, records: Sequence[ledger.Record], step: int) -> set[int]:
        """Steps of the checkpoints to keep after that of `step`."""
        return checkpoints_to_keep(records, step, self.config.phase(step - 1).config)

    def _enter_phase(self, phase: Phase) -> None:
        """Prepare to read a phase's batches."""
        self.phase = phase
        self.reading = Reading(
            self.config,
            phase,
            self.manifests,
            self.architecture,
            self.blocks,
            self.start.order,
            self.group.rank,
            self.group.world_size,
            self.compiled,
        )

    def _begin_phase(self, phase: Phase) -> int:
        """Enter a phase; where it validates on something else, measure what its losses begin at.

        Returns:
            The watch's verdict.
        """
        before = self.reading.measure
        self._enter_phase(phase)
        return GO_ON if self.reading.measure == before else self._evaluate_once(phase.first_step)

    def _open_log(self) -> list[Callable[[StepRecord], None]]:
        """Open the run's records on rank 0, and bring the detector to the attempt's first step."""
        config, start = self.config, self.start
        self._announce()
        observers = self.log.open()
        lines = metrics.read(self.run_folder / metrics.METRICS)
        validation = metrics.read(self.run_folder / metrics.VALIDATION)
        changes = declared_changes(config, start.state)
        self.watch = SpikeWatch(
            SpikeDetector(config.spike, changes),
            history_before(start.step, lines, validation),
            lambda event: self.log.suspicion(**dataclasses.asdict(event)),
        )
        records = ledger.read(self.run_folder / ledger.FILE_NAME)
        continuity = continuity_check(
            config, start, records, lines, changes, self.log.discontinuity
        )
        figures = self._figures()

        def observe(record: StepRecord) -> None:
            record = dataclasses.replace(record, figures=figures(record))
            for observer in (*observers, continuity, self._warn_of_slow_rank):
                observer(record)

        return [observe]

    def _figures(self) -> Figures:
        """What computes the figures that are shown beside each step's loss."""
        config = self.config
        flops = {
            phase.number: needs.flops_per_token(
                self.architecture,
                phase.config.data.sequence_length,
                phase.config.objective.target_share,
            )
            for phase in config.resolved_phases
        }
        return Figures(
            positions=lambda step: (
                config.sizes.size(step) * config.phase(step).config.data.sequence_length
            ),
            deviations=self.watch.deviations,
            blocks=self._blocks,
            flops_per_position=lambda step: flops[config.phase(step).number],
            peak_flops=self.peak_flops,
        )

    def _blocks(self, step: int) -> dict[str, int]:
        """Blocks that a step reads of each of several corpora, by name."""
        places = map(self.config.sizes.first_block, (step, step + 1))
        counts = zip(*map(self.start.order.mixture.counts, places), strict=True)
        names = (str(corpus["name"]) for corpus in self.start.corpora)
        return {name: end - first for name, (first, end) in zip(names, counts, strict=False)}

    def _announce(self) -> None:
        config, table = self.config, self.model.encoder.embeddings.tokens
        now = config.phase(self.start.step).config
        padding = (table.num_embeddings - table.vocab_size) * table.embedding_dim
        chosen = (
            "" if config.training.attention_backend == self.backend else ", chosen automatically"
        )
        self.log.say(
            f"attempt {self.start.attempt}: {config.model.variant} {config.model.size}, "
            f"{self.parameters - padding:,} parameters, {self.start.order.total:,} blocks with "
            f"{self.start.share_of_tokens:.1%} of the corpus's tokens ({now.data.packing}, "
            f"{self.blocks.fill:.1%} full), "
            f"{now.batch.global_batch_size} blocks a step on "
            f"{count(self.group.world_size, 'rank')} ({self.process.device}, "
            f"{config.training.deepspeed}, attention {self.backend}{chosen}"
            f"{', compiled' if self.compiled else ''}), steps "
            f"{self.start.step} to {config.training.steps}, seed {self.start.seed}"
        )
        shares = self.start.order.mixture.shares(config.sizes.first_block(self.start.step))
        for corpus, share in zip(self.start.corpora, shares, strict=False):
            self.log.say(f"{corpus['name']}: {share:.1%} of the blocks, of {corpus['blocks']:,}")
        self.log.say(validation_note(now.objective))

    def _learning_rate(self, step: int) -> float:
        return learning_rate(self.config, step) * self.start.state.learning_rate_factor(step)

    def _profiler(self) -> Profiler:
        from pretrain.engine.profile import Profiler

        return Profiler(
            self.config.profile,
            self.run_folder,
            self.start.attempt,
            self.group.rank,
            lambda: control.profile_requested(self.run_folder, self.token),
            self.log.say,
        )

    def _after_step(self, step: int) -> None:
        self._measure()
        if self.profiler.ends(step):
            self._end_trace(step)
        self.profiler.begin_if_due(step)

    def _end_trace(self, step: int) -> None:
        """End the trace that goes on, if one does, after `step` updates.

        It may take long to write. Rank 0 waits where it next meets a rank that writes one.
        """
        if self.profiler.is_on:
            self.supervisor.in_phase(SAVE, self.profiler.end, after=SAVE)(step)

    def _verdict(self, steps: int) -> int:
        """The supervisor's verdict towards the end of a step; called on rank 0."""
        verdict = self.supervisor.verdict(steps)
        if self.profiler.ended(steps - 1):  # this step waits for ranks that still write a trace
            self.supervisor.in_phase(SAVE, lambda step: None, after=SAVE)(steps)
        return verdict

    def _measure(self) -> None:
        """Measure what this rank did in the last step, for the record of the next one."""
        from pretrain.engine.memory import most_bytes

        self.measured[SECONDS] = pace.own_seconds(self.timed.take(), self.forward_timer.take())
        self.measured[MEMORY] = float(most_bytes(self.process.device))

    def _warn_of_slow_rank(self, record: StepRecord) -> None:
        """Warn on rank 0 of a rank that the others wait for, once in an attempt."""
        self.recent.append(record.figures)
        if record.step % pace.STEPS == 0 and (slow := pace.slow_rank(self.recent, self.hosts)):
            text = "is slow and every step waits for it; `status` says how slow"
            self.log.warn_once(f"WARNING: {slow.who} {text}")

    def _evaluate(self, step: int) -> int:
        """Measure and judge the validation loss after `step` updates; returns the watch's verdict.

        What the detector finds is recorded first: an attempt that ends in between measures again.
        """
        sums = self.engine.evaluate(self.reading.validation, self.reading.sums)

        def judge() -> int:
            scores, record = self.reading.scores(sums)
            verdict = self.watch.evaluated(step, scores.total.loss, self.reading.measure)
            self.log.validated(step, record, self.reading.measure)
            return verdict

        return self.group.on_rank_0(judge)

    def _evaluate_once(self, step: int) -> int:
        """The same, unless an earlier attempt has done it."""
        measure = self.reading.measure
        if self.group.on_rank_0(lambda: self.watch.has_evaluated(step, measure)):
            return GO_ON
        return self._evaluate(step)

    def _compare(self, step: int) -> None:
        """Look for silent corruption after `step` updates.

        Raises:
            Failure: on every rank, if any differs. The ledger says so, and the next attempt resumes
                before the last comparison.
        """
        last, interval = step - 1, self.phase.config.training.comparison_interval
        batches = self.reading.batches
        (micro_batch, *_) = batches.micro_batches(last, 0, self.group.world_size)
        finding = self.engine.find_corruption(
            micro_batch, self.reading.objective, batches.seed(last), last
        )
        if finding is not None:
            found = {**dataclasses.asdict(finding), "since": last // interval * interval}
            self.group.on_rank_0(lambda: self.log.record("corruption", step=step, **found))
            raise Failure(f"silent corruption: {finding.reason}")

    def _evaluate_if_missed(self) -> int:
        """Do the evaluation that is due before the attempt's first step; returns the verdict.

        An attempt that is asked to stop saves and leaves out the evaluation that is due after the
        same step. It is done here, before the next step, where the detector expects it. So is that
        of step 0, where the run continues another model.
        """
        step = self.start.step
        if not step and not self.config.model.init_from:
            return GO_ON
        interval = self.phase.config.training.evaluation_interval
        if not Hook(interval, self._evaluate).is_due(step, self.phase.end_step):
            return GO_ON
        return self.supervisor.in_phase(EVALUATE, self._evaluate_once, after=INIT)(step)

    def _save_and_leave(self) -> None:
        """Save where the loop was asked to stop, and record that."""

        def save(step: int) -> None:
            self.saver.save(step)
            self.saver.finish()

        step = self.group.on_rank_0(lambda: self.supervisor.stopped_after)
        self.supervisor.in_phase(SAVE, save)(step)
        saved, reason = self.saver.failed_saves == 0, "it was asked to stop"
        self.group.on_rank_0(
            lambda: self.log.record("preempted", step=step, saved=saved, reason=reason)
        )

    def _facts(self, step: int) -> dict[str, object]:
        """What a reader of a checkpoint needs to know without the run's folder."""
        blocks, order = self.config.sizes.first_block(step), self.start.order
        (manifest, *_) = self.manifests.values()
        return {
            "architecture": self.architecture.to_dict(),
            "recipe": public(self.config),
            "deepspeed": self.settings,
            "ranks": self.group.world_size,
            "lineage": ledger.lineage_record(order, blocks),
            "position": {
                "blocks": blocks,
                "epoch": order.epoch(blocks),
                "learning_rate": self._learning_rate(step),
            },
            "corpus": {
                "digest": manifest.digest(),
                "tokenizer_digest": manifest.tokenizer_digest,
                "vocab_size": manifest.vocab_size,
            },
            **({"corpora": self.start.corpora} if self.start.corpora else {}),
            "environment": self.environment,
        }

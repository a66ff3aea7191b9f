"""One training attempt: what `deepspeed --module pretrain.train RECIPE [key=value ...]` runs.

Builds the parts that the recipe names and hands them to the loop. A run folder that exists is
resumed from its newest whole checkpoint; `python -m pretrain supervise` starts this again and again
until the run is done. Read `main`, then `Attempt`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from data_prep import console
from data_prep.corpus import Corpus
from data_prep.manifest import CorpusManifest
from pretrain.config import load as recipes
from pretrain.config import preflight as checks
from pretrain.config.run import RunConfig
from pretrain.data.batches import PretrainingBatches, validation_batches, validation_note
from pretrain.data.prefetch import prefetched
from pretrain.data.sources import SOURCES, Source
from pretrain.engine.schedules import learning_rate
from pretrain.loop import GO_ON, Hook, Model, StepRecord
from pretrain.loop import run as run_loop
from pretrain.model.config import ModelConfig
from pretrain.objectives.base import Vocabulary
from pretrain.run import checkpoints, ledger
from pretrain.run import folder as run_folder
from pretrain.run.checkpoints import Failure
from pretrain.run.folder import Start
from pretrain.run.log import RunLog
from pretrain.run.metrics import count
from pretrain.spikes.decisions import retained
from pretrain.supervision import control as orders
from pretrain.supervision import failures
from pretrain.supervision.control import EXIT_PREEMPTED
from pretrain.supervision.decide import PREEMPTED
from pretrain.supervision.heartbeat import EVALUATE, INIT, SAVE
from pretrain.supervision.tether import Tether

if TYPE_CHECKING:
    from torch import Tensor

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
_SECONDS_TO_BE_ENDED = 3.0
"""The deepspeed launcher looks after its ranks once a second."""
T = TypeVar("T")


@console.lasting()
def main(arguments: Sequence[str]) -> int:
    """Train until the run is done or has spiked; returns the exit code."""
    words = [word for word in arguments if not word.startswith("--local_rank")]
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(
            "usage: deepspeed [--hostfile FILE] --module pretrain.train RECIPE [key=value ...]\n\n"
            "One unsupervised attempt at a run; `python -m pretrain supervise` does the same and\n"
            "rolls back from spikes. RECIPE is a YAML file or a name from pretrain/recipes;\n"
            "key=value changes a setting, such as optimizer.learning_rate=1e-4 or folder=runs/a.\n"
        )
        return EXIT_DONE if words else EXIT_USAGE
    from pretrain.engine.distributed import PortInUse, adopt_launcher

    run = Path(words[0]).parent  # where a supervisor leaves its copy of the recipe
    local_rank = 0
    try:
        adopt_launcher(os.environ)
        local_rank = int(os.environ["LOCAL_RANK"])
        config = recipes.load(words[0], words[1:])
        run = Path(config.folder)
        attempt = _prepare(config)
    except (ValueError, Failure) as error:
        # A supervisor chose the port, and will choose another one.
        chosen = isinstance(error, PortInUse) and orders.token_of(os.environ)
        return _failed(run, error, EXIT_FAILED if chosen else EXIT_USAGE, local_rank)
    except Exception as error:
        failures.report(run, EXIT_FAILED, error, unexpected=True)
        raise
    try:
        return attempt.run()
    except Failure as error:
        return _failed(run, error, EXIT_FAILED, local_rank)
    except Exception as error:
        failures.report(run, EXIT_FAILED, error, unexpected=True)
        raise


def _prepare(config: RunConfig) -> Attempt:
    world = int(os.environ["WORLD_SIZE"])
    architecture, manifest = checks.check(config, world)
    settings = _deepspeed_settings(config, world)
    checks.refuse_other_recipe(config, manifest)
    return Attempt(config, architecture, manifest, settings)


def _failed(run: Path, error: Exception, code: int, local_rank: int) -> int:
    failures.report(run, code, error)
    if not local_rank:
        with contextlib.suppress(OSError):  # its log may be on a full disk
            sys.stderr.write(f"pretrain.train: error: {error}\n")
    elif not isinstance(error, Failure):  # which is every rank's
        # Most of what else is wrong is wrong on every rank as well, and one message a machine is
        # enough: the launcher ends the others soon after the first has left. If not, ours differs.
        time.sleep(_SECONDS_TO_BE_ENDED)
        sys.stderr.write(f"pretrain.train: error on rank {os.environ['RANK']}: {error}\n")
    return code


def _deepspeed_settings(config: RunConfig, world_size: int) -> dict[str, Any]:
    from pretrain.engine.engine import deepspeed_json

    return deepspeed_json(
        config.training.deepspeed, config.batch, config.optimizer.gradient_clipping, world_size
    )


class Attempt:
    """The parts of one attempt, and the actions that the loop asks for."""

    def __init__(
        self,
        config: RunConfig,
        architecture: ModelConfig,
        manifest: CorpusManifest,
        settings: dict[str, Any],
    ) -> None:
        """Join the other ranks, build the model, open the run.

        Raises:
            Failure: on every rank, where any refuses.
        """
        import torch

        from pretrain.engine.distributed import gather
        from pretrain.engine.engine import start
        from pretrain.model.language_model import LanguageModel

        self.config, self.architecture = config, architecture
        self.manifest, self.settings = manifest, settings
        self.run_folder = Path(config.folder)
        self.process, self.gather = start(), gather
        torch.manual_seed(config.training.seed)
        backend = config.training.attention_backend
        self._on_rank_0(lambda: checks.refuse_backend(backend, self.process.device.type))
        state, self.token = self._on_rank_0(self._enter)
        self.tether = Tether(self.run_folder, self.token, self.process.rank, config.training.steps)
        self.model = LanguageModel(architecture, config.training.vocabulary_multiple, backend)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.tether.starting()
        self.done = state.done
        if not self.done:
            self.blocks = self._blocks("train")
            self.lineage = state.lineage(len(self.blocks), config.batch.first_block)
            self.start = self._begin(state)
            self.log = RunLog(config, self.start)
            self.tether.starting()

    def _enter(self) -> tuple[ledger.RunState, str]:
        """Where the run stands, and this attempt's token."""
        orders.refuse_superseded(self.run_folder, orders.token_of(os.environ))
        self.lock = run_folder.lock(self.run_folder)  # for as long as this process lives
        token = orders.token_of(os.environ) or secrets.token_hex(8)
        return run_folder.state_of(self.config, self.manifest), token

    def _begin(self, state: ledger.RunState) -> Start:
        """Choose the checkpoint to go on from, and tell the ledger."""
        newest = checkpoints.newest_whole(
            self.run_folder,
            state.checkpoints,
            self.gather,
            self.process.rank,
            self.process.world_size,
        )
        self.checkpoint_size = checkpoints.BYTES_PER_PARAMETER * self.parameters
        if newest.manifest:
            self.checkpoint_size = checkpoints.size_of(newest.manifest)
        self.failed_saves, self.has_checkpoint = 0, newest.step > 0

        def begin() -> Start:
            if newest.manifest:
                before = self._lineage_before(newest.step)
                checks.refuse_other_checkpoint(
                    newest.manifest, newest.step, self.architecture, before
                )
            return run_folder.begin(
                self.config,
                self.settings,
                state,
                newest,
                self.checkpoint_size,
                self.process.world_size,
                self.lineage,
                self.token,
            )

        return self._on_rank_0(begin)

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """What `action` returns on rank 0, on every rank; Failure on every rank where it fails."""
        values = checkpoints.together(
            lambda: action() if self.process.rank == 0 else None, self.gather
        )
        return cast(T, values[0])

    def run(self) -> int:
        """Train to the end; returns the exit code.

        Raises:
            Failure: on every rank, where checkpoints cannot be written or another attempt has taken
                over.
        """
        from pretrain.engine.engine import Engine

        if self.done:
            if self.process.rank == 0:
                sys.stdout.write(f"{self.run_folder} is done already; nothing to train\n")
            return EXIT_DONE
        config, training = self.config, self.config.training
        self.engine = Engine(
            self.model,
            config.optimizer,
            self.settings,
            self.process,
            activation_checkpointing=training.activation_checkpointing,
            compiled=training.compile,
        )
        self.tether.starting()
        if self.start.step:
            self.engine.load(checkpoints.folder_of(self.run_folder, self.start.step))
            self.tether.starting()
        corpus = Path(config.data.corpus)
        vocabulary = Vocabulary(self.manifest.vocab_size, self.architecture.vocab_size, corpus)
        self.objective = config.objective.build(vocabulary, compiled=training.compile)
        self.measure = config.objective.for_validation().build(vocabulary)
        self.validation = validation_batches(
            self._blocks("valid"),
            self.measure,
            training.evaluation_blocks,
            config.batch.micro_batch_size,
            self.process.rank,
            self.process.world_size,
        )
        batches = PretrainingBatches(
            self.blocks,
            self.objective,
            self.lineage,
            config.batch,
            config.fault,
            training.seed,
        )
        self.tether.starting()
        if self.process.rank == 0:
            self._announce()
        observers: list[Callable[[StepRecord], None]] = []
        self._on_rank_0(lambda: observers.extend(self.log.open()))
        evaluation = Hook(
            training.evaluation_interval, self.tether.during(EVALUATE, self._evaluate)
        )
        self._evaluate_what_was_left_out(evaluation)
        with prefetched(batches, training.data_workers) as ahead:
            verdict = run_loop(
                self.engine,
                ahead,
                self.objective,
                learning_rate=self._learning_rate,
                first_step=self.start.step,
                last_step=training.steps,
                hooks=[
                    evaluation,
                    Hook(training.checkpoint_interval, self.tether.during(SAVE, self._save)),
                ],
                observers=observers,
                watch=self._verdict if self.process.rank == 0 else lambda record: GO_ON,
            )
        if verdict == GO_ON:
            self._on_rank_0(lambda: self.log.record("done", step=training.steps))
            return EXIT_DONE
        if verdict == EXIT_PREEMPTED:
            self._leave()
        return verdict

    def _verdict(self, record: StepRecord) -> int:
        """GO_ON, or the exit code with which the attempt ends after this step."""
        verdict = self.log.verdict(record)
        return verdict if verdict != GO_ON else self.tether.verdict(record.step + 1)

    def _evaluate_what_was_left_out(self, hook: Hook) -> None:
        """Measure the validation loss where the attempt before had no time to.

        An attempt that is asked to leave saves and leaves out the evaluation that is due after the
        same step. It comes before the next step here, where the detector expects it.
        """
        step = self.start.step
        if not step or not hook.is_due(step, self.config.training.steps):
            return
        if not self._on_rank_0(lambda: self.log.has_validation):
            self.tether.during(EVALUATE, self._evaluate, after=INIT)(step)

    def _leave(self) -> None:
        """Save where the loop was told to stop, and say so."""
        step = self._on_rank_0(lambda: self.tether.steps)
        self.tether.during(SAVE, self._save)(step)
        saved, reason = self.failed_saves == 0, "it was asked to leave"
        self._on_rank_0(lambda: self.log.record(PREEMPTED, step=step, saved=saved, reason=reason))

    def _learning_rate(self, step: int) -> float:
        return learning_rate(self.config, step) * self.start.state.learning_rate_factor(step)

    def _lineage_before(self, step: int) -> list[list[int | str]]:
        return ledger.lineage_record(self.lineage, self.config.batch.first_block(step))

    def _blocks(self, split: str) -> Source:
        data = self.config.data
        return SOURCES[data.packing](Corpus(Path(data.corpus), split), data.sequence_length)

    def _evaluate(self, step: int) -> None:
        from pretrain.inference.evaluate import Scores

        names = self.manifest.subsets

        def sums(model: Model, batch: dict[str, Tensor]) -> Tensor:
            return self.measure.evaluate(model, batch, len(names))

        found = self.engine.evaluate(self.validation, sums)
        if self.process.rank == 0:
            self.log.validated(step, Scores.of(found, self.measure.terms, names))

    def _save(self, step: int) -> None:
        try:
            self._on_rank_0(lambda: self._before_save(step))
            checkpoints.save(
                self.run_folder,
                step,
                self._facts(step),
                write=self.engine.save,
                gather=self.gather,
                rank=self.process.rank,
                token=self.start.token,
                before_commit=self.log.refuse_superseded,
            )
            self._on_rank_0(lambda: self._commit(step))
        except Failure as failure:
            self._bear(step, failure)
        else:
            self.failed_saves, self.has_checkpoint = 0, True

    def _before_save(self, step: int) -> None:
        self.log.sync(step)  # refuses where the run is not ours any more
        if self.failed_saves:  # one that the ledger could not be told of takes space
            records = ledger.read(self.run_folder / ledger.FILE_NAME)
            kept = ledger.fold(records, self.config.training.seed).checkpoints
            checkpoints.remove(self.run_folder, {*kept}, self.log.warn_once)
        checkpoints.refuse_small_disk(self.run_folder, 1, self.checkpoint_size)

    def _facts(self, step: int) -> dict[str, object]:
        """What a reader of a checkpoint needs to know without the run's folder."""
        blocks = self.config.batch.first_block(step)
        return {
            "architecture": self.architecture.to_dict(),
            "recipe": recipes.to_dict(self.config),
            "deepspeed": self.settings,
            "ranks": self.process.world_size,
            "lineage": self._lineage_before(step),
            "position": {
                "blocks": blocks,
                "epoch": self.lineage.epoch(blocks),
                "learning_rate": self._learning_rate(step),
            },
            "corpus": {
                "digest": self.manifest.digest(),
                "tokenizer_digest": self.manifest.tokenizer_digest,
                "vocab_size": self.manifest.vocab_size,
            },
            "environment": run_folder.environment(),
        }

    def _commit(self, step: int) -> None:
        """Record a checkpoint in the ledger, which makes it one to resume from."""
        digest = checkpoints.manifest_hash(self.run_folder, step)
        self.log.record("commit", step=step, ranks=self.process.world_size, manifest=digest)
        try:
            self._delete_old(step)
        except OSError as error:  # the next commit tries again
            self.log.warn_once(f"WARNING: older checkpoints are not deleted for now: {error}")

    def _delete_old(self, step: int) -> None:
        """Delete what neither the recipe keeps nor a rollback may need."""
        records = ledger.read(self.run_folder / ledger.FILE_NAME)
        keep = retained(records, step, self.config)
        for old in ledger.fold(records, self.config.training.seed).checkpoints:
            if old not in keep:
                self.log.record("delete", step=old)
        checkpoints.remove(self.run_folder, keep, self.log.warn_once)

    def _bear(self, step: int, failure: Failure) -> None:
        """Go on after a failed save, or stop."""
        self.failed_saves += 1

        def tell() -> None:
            self.log.note("save-failed", step=step, reason=str(failure))
            self.log.say(f"WARNING: no checkpoint of step {step}: {failure}")

        self._on_rank_0(tell)
        last = step == self.config.training.steps
        if not checkpoints.may_go_on(self.failed_saves, self.has_checkpoint, last):
            raise failure

    def _announce(self) -> None:
        config, table = self.config, self.model.encoder.embeddings.tokens
        padding = (table.num_embeddings - table.vocab_size) * table.embedding_dim
        self.log.say(
            f"attempt {self.start.attempt}: {config.model.variant} {config.model.size}, "
            f"{self.parameters - padding:,} parameters, {len(self.blocks):,} blocks with "
            f"{self.blocks.share_of_tokens:.1%} of the corpus's tokens ({config.data.packing}, "
            f"{self.blocks.fill:.1%} full), "
            f"{config.batch.global_batch_size} blocks a step on "
            f"{count(self.process.world_size, 'rank')} ({self.process.device}, "
            f"{config.training.deepspeed}, attention {config.training.attention_backend}), steps "
            f"{self.start.step} to {config.training.steps}, seed {self.start.seed}"
        )
        self.log.say(validation_note(config.objective))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

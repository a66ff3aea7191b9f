"""One training attempt: what `deepspeed --module pretrain.train RECIPE [key=value ...]` runs.

Builds the parts that the recipe names and hands them to the loop. A run folder that exists is
resumed from its newest whole checkpoint; `python -m pretrain supervise` starts this again and again
until the run is done. Read `main`, then `Attempt`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from data_prep import tokenizer as tokenizers
from data_prep.corpus import Corpus
from data_prep.manifest import CorpusManifest
from pretrain import checkpoints, checks, ledger, metrics, run_folder
from pretrain import recipe as recipes
from pretrain.batches import Blocks, PretrainingBatches, validation_batches
from pretrain.checkpoints import Failure
from pretrain.config import RunConfig
from pretrain.loop import GO_ON, Hook, Model, StepRecord
from pretrain.loop import run as run_loop
from pretrain.model.config import ModelConfig
from pretrain.objectives.masked import MaskedLM, word_starts_of
from pretrain.prefetch import prefetched
from pretrain.run_folder import Start
from pretrain.schedules import learning_rate
from pretrain.spikes import SpikeDetector

if TYPE_CHECKING:
    from torch import Tensor

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SPIKE = 75
"""The attempt stopped at a confirmed spike: the ledger says which, `supervise` rolls back."""

T = TypeVar("T")


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
    from pretrain.distributed import launcher_variables

    try:
        config = recipes.load(words[0], words[1:])
        # Below srun there are Slurm's names alone.
        os.environ.update(launcher_variables(os.environ))
        world = int(os.environ["WORLD_SIZE"])
        architecture, manifest = checks.check(config, world)
        settings = _deepspeed_settings(config, world)
        checks.refuse_other_recipe(config, manifest)
        attempt = Attempt(config, architecture, manifest, settings)
    except (ValueError, Failure) as error:
        return _failed(error, EXIT_USAGE)
    try:
        return attempt.run()
    except Failure as error:
        return _failed(error, EXIT_FAILED)


def _failed(error: Exception, code: int) -> int:
    # A message a machine: what is wrong may be wrong with one of them.
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        sys.stderr.write(f"pretrain.train: error: {error}\n")
    return code


def _deepspeed_settings(config: RunConfig, ranks: int) -> dict[str, Any]:
    from pretrain.engine import deepspeed_json

    return deepspeed_json(
        config.training.deepspeed, config.batch, config.optimizer.gradient_clipping, ranks
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

        from pretrain.distributed import gather
        from pretrain.engine import start
        from pretrain.model.language_model import LanguageModel

        self.config, self.architecture = config, architecture
        self.manifest, self.settings = manifest, settings
        self.run_folder = Path(config.folder)
        self.ledger = self.run_folder / ledger.FILE_NAME
        self.ranks, self.gather = start(), gather
        torch.manual_seed(config.training.seed)
        self.model = LanguageModel(architecture, config.training.vocabulary_multiple)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        state = self._on_rank_0(self._enter)
        self.done = state.done
        if not self.done:
            self.start = self._begin(state)

    def _enter(self) -> ledger.RunState:
        self.lock = run_folder.lock(self.run_folder)  # for as long as this process lives
        return run_folder.state_of(self.config, self.manifest)

    def _begin(self, state: ledger.RunState) -> Start:
        """Choose the checkpoint to go on from, and tell the ledger."""
        newest = checkpoints.newest_whole(
            self.run_folder, state.checkpoints, self.gather, self.ranks.rank, self.ranks.count
        )
        self.checkpoint_size = checkpoints.BYTES_PER_PARAMETER * self.parameters
        if newest.manifest:
            self.checkpoint_size = checkpoints.size_of(newest.manifest)
        self.failed_saves, self.has_checkpoint = 0, newest.step > 0

        def begin() -> Start:
            if newest.manifest:
                checks.refuse_other_checkpoint(
                    newest.manifest, newest.step, self.architecture, state.segments
                )
            return run_folder.begin(
                self.config, self.settings, state, newest, self.checkpoint_size, self.ranks.count
            )

        return self._on_rank_0(begin)

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """What `action` returns on rank 0, on every rank; Failure on every rank where it fails."""
        values = checkpoints.together(
            lambda: action() if self.ranks.rank == 0 else None, self.gather
        )
        return cast(T, values[0])

    def run(self) -> int:
        """Train to the end; returns the exit code.

        Raises:
            Failure: on every rank, where checkpoints cannot be written or another attempt has taken
                over.
        """
        from pretrain.engine import Engine

        if self.done:
            self._say(f"{self.run_folder} is done already; nothing to train")
            return EXIT_DONE
        config, training = self.config, self.config.training
        self.engine = Engine(
            self.model,
            config.optimizer,
            self.settings,
            self.ranks,
            activation_checkpointing=training.activation_checkpointing,
            compiled=training.compile,
        )
        if self.start.step:
            self.engine.load(checkpoints.folder_of(self.run_folder, self.start.step))
        words = None
        if config.masking.whole_words:
            words = word_starts_of(tokenizers.load(Path(config.data.corpus)))
        self.objective = MaskedLM(
            config.masking, self.manifest.vocab_size - 1, self.architecture.vocab_size, words
        )
        self.blocks = self._blocks("train")
        self.validation = validation_batches(
            self._blocks("valid"),
            self.objective,
            training.evaluation_blocks,
            config.batch.micro_batch_size,
            self.ranks.rank,
            self.ranks.count,
        )
        batches = PretrainingBatches(
            self.blocks,
            self.objective,
            ledger.lineage(self.start.segments, config.batch.global_batch_size),
            config.batch.global_batch_size,
            config.batch.micro_batch_size,
            config.fault,
            training.seed,
        )
        self._announce()
        with prefetched(batches, training.data_workers) as ahead:
            verdict = run_loop(
                self.engine,
                ahead,
                self.objective,
                learning_rate=lambda step: learning_rate(config, step),
                first_step=self.start.step,
                last_step=training.steps,
                hooks=[
                    Hook(training.evaluation_interval, self._evaluate),
                    Hook(training.checkpoint_interval, self._save),
                ],
                observers=self._observers(),
                watch=self._watch if self.ranks.rank == 0 else lambda record: GO_ON,
            )
        if verdict == GO_ON:
            self._on_rank_0(lambda: self._record("done", step=training.steps))
        return verdict

    def _blocks(self, split: str) -> Blocks:
        data = self.config.data
        return Blocks(Corpus(Path(data.corpus), split), data.sequence_length, data.packing)

    def _observers(self) -> list[Callable[[StepRecord], None]]:
        if self.ranks.rank != 0:
            return []
        folder = self.run_folder / "tensorboard" / f"attempt-{self.start.attempt:03d}"
        self.tensorboard = metrics.TensorBoard(folder)
        self.validation_lines = metrics.JsonLines(self.run_folder / metrics.VALIDATION)
        lines = metrics.read(self.run_folder / metrics.METRICS)
        self.detector = SpikeDetector(self.config.spike)
        for line in metrics.surviving(lines):
            if line["step"] < self.start.step:
                self.detector.update(line["step"], line["loss"])
        return [
            metrics.MetricsWriter(self.run_folder, self.start.attempt),
            self.tensorboard,
            metrics.ProgressPrinter(self.config.training.steps),
            self._continuity(lines),
        ]

    def _continuity(self, lines: Sequence[dict[str, Any]]) -> Callable[[StepRecord], None]:
        """An observer that says loudly where the first losses do not continue the run."""
        size = self.config.batch.micro_batch_size
        attempts = {
            record["attempt"]
            for record in ledger.read(self.ledger)
            if record["kind"] == "attempt" and record["micro_batch_size"] == size
        }
        step, seed = self.start.step, self.start.seed
        recorded = checks.recorded_losses(lines, step, seed, attempts)
        history = [line["loss"] for line in metrics.surviving(lines) if line["step"] < step]
        losses: list[float] = []
        reason = ""

        def observe(record: StepRecord) -> None:
            nonlocal reason
            if reason or len(losses) == checks.FIRST_LOSSES:
                return
            losses.append(record.loss)
            reason = checks.discontinuity(losses, recorded, history, self.config.spike.deviations)
            if reason:
                self._record("discontinuity", step=record.step, reason=reason)
                self._say(f"WARNING: the run does not continue from step {step}: {reason}")

        return observe

    def _watch(self, record: StepRecord) -> int:
        event = self.detector.update(record.step, record.loss)
        if event is None:
            return GO_ON
        fields = dataclasses.asdict(event)
        kind = fields.pop("kind")
        self._record(kind, **fields)
        self._say(
            f"{kind} at step {event.step}: loss {event.loss:.3f} over {event.baseline:.3f} "
            f"since step {event.onset}"
        )
        return EXIT_SPIKE if kind == "spike" else GO_ON

    def _record(self, kind: str, **fields: object) -> None:
        """Append to the ledger, on rank 0, if the run is still ours."""
        self._refuse_superseded()
        ledger.append(self.ledger, kind, attempt=self.start.attempt, **fields)

    def _refuse_superseded(self) -> None:
        run_folder.refuse_superseded(ledger.read(self.ledger), self.start.token)

    def _evaluate(self, step: int) -> None:
        from pretrain.evaluate import scores

        names = self.manifest.subsets

        def sums(model: Model, batch: dict[str, Tensor]) -> Tensor:
            return self.objective.sums_by_subset(model, batch, len(names))

        flat = self.engine.evaluate(self.validation, sums)
        if self.ranks.rank != 0:
            return
        total, subsets = scores(list(zip(flat[::2], flat[1::2], strict=True)), names)
        by_subset = {name: dataclasses.asdict(score) for name, score in subsets.items()}
        line = {"attempt": self.start.attempt, "step": step, **dataclasses.asdict(total)}
        self.validation_lines.write({**line, "subsets": by_subset})
        values = {"validation/loss": total.loss, "validation/perplexity": total.perplexity}
        values |= {f"validation perplexity/{n}": score.perplexity for n, score in subsets.items()}
        self.tensorboard.scalars(step, values)
        self._say(f"after {step} steps: validation perplexity {total.perplexity:.2f}")

    def _save(self, step: int) -> None:
        try:
            self._on_rank_0(self._before_save)
            checkpoints.save(
                self.run_folder,
                step,
                self._facts(step),
                write=self.engine.save,
                gather=self.gather,
                rank=self.ranks.rank,
                before_commit=self._refuse_superseded,
            )
            self._on_rank_0(lambda: self._commit(step))
        except Failure as failure:
            self._bear(step, failure)
        else:
            self.failed_saves, self.has_checkpoint = 0, True

    def _before_save(self) -> None:
        self._refuse_superseded()
        checkpoints.refuse_small_disk(self.run_folder, 1, self.checkpoint_size)

    def _facts(self, step: int) -> dict[str, object]:
        """What a reader of a checkpoint needs to know without the run's folder."""
        blocks = step * self.config.batch.global_batch_size
        return {
            "architecture": self.architecture.to_dict(),
            "recipe": dataclasses.asdict(self.config),
            "deepspeed": self.settings,
            "ranks": self.ranks.count,
            "lineage": checks.lineage_before(self.start.segments, step),
            "position": {
                "blocks": blocks,
                "epoch": blocks / len(self.blocks),
                "learning_rate": learning_rate(self.config, step),
            },
            "corpus": {
                "digest": self.manifest.digest(),
                "tokenizer_digest": self.manifest.tokenizer_digest,
                "vocab_size": self.manifest.vocab_size,
            },
            "environment": run_folder.environment(),
        }

    def _commit(self, step: int) -> None:
        """Tell the ledger, and delete what is older than the recipe keeps."""
        self._record("commit", step=step, ranks=self.ranks.count)
        steps = ledger.fold(ledger.read(self.ledger), self.config.training.seed).checkpoints
        count = self.config.training.checkpoints_kept
        for old in steps[:-count]:
            self._record("delete", step=old)
        checkpoints.remove(self.run_folder, keep={*steps[-count:]})

    def _bear(self, step: int, failure: Failure) -> None:
        """Go on after a failed save, or stop."""
        self.failed_saves += 1
        self._on_rank_0(lambda: self._record("save-failed", step=step, reason=str(failure)))
        self._say(f"WARNING: no checkpoint of step {step}: {failure}")
        last = step == self.config.training.steps
        if not checkpoints.may_go_on(self.failed_saves, self.has_checkpoint, last):
            raise failure

    def _announce(self) -> None:
        config, table = self.config, self.model.encoder.embeddings.tokens
        padding = (table.num_embeddings - table.vocab_size) * table.embedding_dim
        self._say(
            f"attempt {self.start.attempt}: {config.model.variant} {config.model.size}, "
            f"{self.parameters - padding:,} parameters, {len(self.blocks):,} blocks with "
            f"{self.blocks.share_of_tokens:.1%} of the corpus's tokens ({config.data.packing}, "
            f"{self.blocks.fill:.1%} full), "
            f"{config.batch.global_batch_size} blocks a step on {self.ranks.count} ranks "
            f"({self.ranks.device}, {config.training.deepspeed}), steps {self.start.step} to "
            f"{config.training.steps}, seed {self.start.seed}"
        )

    def _say(self, text: str) -> None:
        if self.ranks.rank == 0:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

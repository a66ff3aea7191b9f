"""One training attempt: what `deepspeed --module pretrain.train RECIPE [key=value ...]` runs.

Builds the parts that the recipe names and hands them to the loop. A run folder that exists is
resumed from its newest whole checkpoint; `python -m pretrain supervise` starts this again and again
until the run is done. Read `main`, then `open_run` (rank 0 alone) and `Attempt`.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import tokenizer as tokenizers
from data_prep.corpus import Corpus
from data_prep.manifest import CorpusManifest
from pretrain import checkpoints, ledger, metrics
from pretrain import recipe as recipes
from pretrain.batches import Blocks, PretrainingBatches, validation_batches
from pretrain.checks import check, refuse_other_recipe
from pretrain.config import RunConfig
from pretrain.loop import GO_ON, Hook, StepRecord
from pretrain.loop import run as run_loop
from pretrain.model.config import ModelConfig
from pretrain.objectives.masked import MaskedLM
from pretrain.schedules import learning_rate
from pretrain.spikes import SpikeDetector

if TYPE_CHECKING:
    from pretrain.engine import Engine

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_SPIKE = 75
"""The attempt stopped at a confirmed spike: the ledger says which, `supervise` rolls back."""


def main(arguments: Sequence[str]) -> int:
    """Train until the run is done or has spiked; returns the exit code."""
    words = [word for word in arguments if not word.startswith("--local_rank")]
    rank = int(os.environ.get("RANK", "0"))
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(
            "usage: deepspeed [--hostfile FILE] --module pretrain.train RECIPE [key=value ...]\n\n"
            "One unsupervised attempt at a run; `python -m pretrain supervise` does the same and\n"
            "rolls back from spikes. RECIPE is a YAML file or a name from pretrain/recipes;\n"
            "key=value changes a setting, such as optimizer.learning_rate=1e-4 or folder=runs/a.\n"
        )
        return EXIT_DONE if words else EXIT_USAGE
    try:
        config = recipes.load(words[0], words[1:])
        world = int(os.environ.get("WORLD_SIZE", "1"))
        architecture, manifest = check(config, world)
        settings = _deepspeed_settings(config, world)
        refuse_other_recipe(config, manifest, world)
    except ValueError as error:
        if rank == 0:
            sys.stderr.write(f"pretrain.train: error: {error}\n")
        return EXIT_USAGE
    return Attempt(config, architecture, manifest, settings).run()


def _deepspeed_settings(config: RunConfig, ranks: int) -> dict[str, Any]:
    from pretrain.engine import deepspeed_json

    return deepspeed_json(
        config.training.deepspeed, config.batch, config.optimizer.gradient_clipping, ranks
    )


@dataclasses.dataclass(frozen=True)
class Start:
    """What rank 0 tells the others before the first step."""

    attempt: int
    step: int
    segments: tuple[tuple[int, int], ...]
    done: bool


def open_run(
    config: RunConfig, manifest: CorpusManifest, settings: dict[str, Any], ranks: int
) -> Start:
    """Create or reopen the run's folder, on rank 0: from where does this attempt go on?

    A newest checkpoint whose files are not what was written is rejected, recorded as such, and the
    one before it taken.
    """
    run, seed = Path(config.folder), config.training.seed
    run.mkdir(parents=True, exist_ok=True)
    path = run / ledger.FILE_NAME
    if not ledger.read(path):
        ledger.append(path, "created", corpus=manifest.digest(), seed=seed)
    recipes.dump(config, run / "run.yaml")
    checkpoints.write_json(run / "deepspeed.json", settings)
    checkpoints.write_json(run / "environment.json", environment())
    tokenizers.load(Path(config.data.corpus)).save(run / "tokenizer.json")
    state = ledger.fold(ledger.read(path), seed)
    while not state.done and state.checkpoints:
        newest = state.checkpoints[-1]
        try:
            checkpoints.read_manifest(checkpoints.folder_of(run, newest))
            break
        except ValueError as error:
            sys.stdout.write(f"checkpoint rejected: {error}\n")
            ledger.append(path, "reject", step=newest, reason=str(error))
            state = ledger.fold(ledger.read(path), seed)
    if not state.done:
        checkpoints.remove(run, keep=set(state.checkpoints))
        ledger.append(
            path,
            "attempt",
            attempt=state.attempts + 1,
            step=state.resume_step(),
            ranks=ranks,
            seed=state.segments[-1][1],
            host=socket.gethostname(),
            pid=os.getpid(),
        )
    return Start(state.attempts + 1, state.resume_step(), state.segments, state.done)


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
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class Attempt:
    """The parts of one attempt, and the actions that the loop asks for."""

    def __init__(
        self,
        config: RunConfig,
        architecture: ModelConfig,
        manifest: CorpusManifest,
        settings: dict[str, Any],
    ) -> None:
        """Join the other ranks, open the run, build model and engine, load what there is."""
        from pretrain.distributed import broadcast
        from pretrain.engine import start

        self.config, self.architecture = config, architecture
        self.run_folder = Path(config.folder)
        self.ledger = self.run_folder / ledger.FILE_NAME
        self.ranks = start()
        self.start = broadcast(
            open_run(config, manifest, settings, self.ranks.count)
            if self.ranks.rank == 0
            else None,
            self.ranks.device,
        )
        self.objective = MaskedLM(config.masking, manifest.vocab_size - 1, architecture.vocab_size)
        self.settings = settings

    def run(self) -> int:
        """Train to the end; returns the exit code."""
        assert self.start is not None
        if self.start.done:
            self._say(f"{self.run_folder} is done already; nothing to train")
            return EXIT_DONE
        self.engine = self._build_engine()
        config, training = self.config, self.config.training
        if self.start.step:
            self.engine.load(checkpoints.folder_of(self.run_folder, self.start.step))
        size = config.data.sequence_length
        blocks = Blocks(Corpus(Path(config.data.corpus), "train"), size)
        self.validation = validation_batches(
            Blocks(Corpus(Path(config.data.corpus), "valid"), size),
            self.objective,
            training.evaluation_blocks,
            config.batch.micro_batch_size,
            self.ranks.rank,
            self.ranks.count,
        )
        lineage = ledger.lineage(self.start.segments, config.batch.global_batch_size)
        batches = PretrainingBatches(
            blocks,
            self.objective,
            lineage,
            config.batch.global_batch_size,
            config.batch.micro_batch_size,
            config.fault,
            training.seed,
        )
        self._announce(blocks)
        verdict = run_loop(
            self.engine,
            batches,
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
        if verdict == GO_ON and self.ranks.rank == 0:
            ledger.append(self.ledger, "done", step=training.steps)
        return verdict

    def _build_engine(self) -> Engine:
        import torch

        from pretrain.engine import Engine
        from pretrain.model.language_model import LanguageModel

        torch.manual_seed(self.config.training.seed)
        model = LanguageModel(self.architecture)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        return Engine(model, self.config.optimizer, self.settings, self.ranks)

    def _observers(self) -> list[Any]:
        if self.ranks.rank != 0:
            return []
        assert self.start is not None
        folder = self.run_folder / "tensorboard" / f"attempt-{self.start.attempt:03d}"
        self.tensorboard = metrics.TensorBoard(folder)
        self.validation_lines = metrics.JsonLines(self.run_folder / metrics.VALIDATION)
        self.detector = SpikeDetector(self.config.spike)
        for line in metrics.surviving(metrics.read(self.run_folder / metrics.METRICS)):
            if line["step"] < self.start.step:
                self.detector.update(line["step"], line["loss"])
        return [
            metrics.MetricsWriter(self.run_folder, self.start.attempt),
            self.tensorboard,
            metrics.ProgressPrinter(self.config.training.steps),
        ]

    def _watch(self, record: StepRecord) -> int:
        event = self.detector.update(record.step, record.loss)
        if event is None:
            return GO_ON
        assert self.start is not None
        fields = dataclasses.asdict(event)
        kind = fields.pop("kind")
        ledger.append(self.ledger, kind, attempt=self.start.attempt, **fields)
        self._say(
            f"{kind} at step {event.step}: loss {event.loss:.3f} over {event.baseline:.3f} "
            f"since step {event.onset}"
        )
        return EXIT_SPIKE if kind == "spike" else GO_ON

    def _evaluate(self, step: int) -> None:
        from math import exp

        loss, targets = self.engine.evaluate(self.validation, self.objective)
        if self.ranks.rank == 0:
            assert self.start is not None
            values = {"loss": loss / targets, "perplexity": exp(min(loss / targets, 700.0))}
            self.validation_lines.write({"attempt": self.start.attempt, "step": step, **values})
            self.tensorboard.scalars(step, {f"validation/{k}": v for k, v in values.items()})
            self._say(f"after {step} steps: validation perplexity {values['perplexity']:.2f}")

    def _save(self, step: int) -> None:
        from pretrain.distributed import gather

        facts = {
            "architecture": self.architecture.to_dict(),
            "recipe": dataclasses.asdict(self.config),
            "ranks": self.ranks.count,
        }
        checkpoints.save(
            self.run_folder,
            step,
            facts,
            write=self.engine.save,
            gather=gather,
            rank=self.ranks.rank,
        )
        if self.ranks.rank != 0:
            return
        assert self.start is not None
        ledger.append(
            self.ledger, "commit", attempt=self.start.attempt, step=step, ranks=self.ranks.count
        )
        kept = ledger.fold(ledger.read(self.ledger), self.config.training.seed).checkpoints
        for old in kept[: -self.config.training.checkpoints_kept]:
            ledger.append(self.ledger, "delete", step=old)
        checkpoints.remove(
            self.run_folder, keep=set(kept[-self.config.training.checkpoints_kept :])
        )

    def _announce(self, blocks: Blocks) -> None:
        config = self.config
        assert self.start is not None
        self._say(
            f"attempt {self.start.attempt}: {config.model.variant} {config.model.size}, "
            f"{self.parameters:,} parameters, {len(blocks):,} blocks with "
            f"{blocks.share_of_tokens:.1%} of the corpus's tokens, "
            f"{config.batch.global_batch_size} blocks a step on {self.ranks.count} ranks "
            f"({self.ranks.device}, {config.training.deepspeed}), steps {self.start.step} to "
            f"{config.training.steps}, seed {self.start.segments[-1][1]}"
        )

    def _say(self, text: str) -> None:
        if self.ranks.rank == 0:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

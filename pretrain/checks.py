"""What can be checked of a recipe before anything is started. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data_prep.manifest import CorpusManifest, load_manifest
from pretrain import deepspeed_settings, ledger
from pretrain import recipe as recipes
from pretrain.config import RunConfig
from pretrain.model import presets
from pretrain.model.config import ModelConfig


def check(config: RunConfig, ranks: int) -> tuple[ModelConfig, CorpusManifest]:
    """Everything about a recipe that can be checked before anything is started.

    Args:
        config: the recipe.
        ranks: processes that will share a batch.

    Returns:
        The model that the recipe means with its corpus's vocabulary, and the corpus's manifest.

    Raises:
        ValueError: something is missing or does not fit; both values are named.
    """
    if not config.folder:
        raise ValueError("folder: is not set; name the run's folder, such as folder=runs/first")
    if not config.data.corpus:
        raise ValueError("data.corpus: is not set; name a folder that `data_prep prepare` made")
    manifest = load_manifest(Path(config.data.corpus))
    wanted = config.data.vocab_size
    if wanted and wanted != manifest.vocab_size:
        raise ValueError(
            f"data.vocab_size is {wanted}, but {config.data.corpus} was made with a vocabulary of "
            f"{manifest.vocab_size} ids"
        )
    for split in ("train", "valid"):
        if not manifest.totals[split].documents:
            raise ValueError(f"{config.data.corpus}: its {split} split has no documents")
    recipe = config.model
    model = presets.build(recipe.size, recipe.variant, manifest.vocab_size, recipe.overrides)
    if model.position == "learned" and config.data.sequence_length > model.max_positions:
        raise ValueError(
            f"data.sequence_length {config.data.sequence_length} is above the model's "
            f"max_positions {model.max_positions}, where its learned positions end"
        )
    clipping = config.optimizer.gradient_clipping
    deepspeed_settings.read(config.training.deepspeed, config.batch, clipping, ranks)
    return model, manifest


def refuse_other_recipe(config: RunConfig, manifest: CorpusManifest, ranks: int) -> None:
    """Refuse to resume a run with a recipe or a corpus that is not the one it began with.

    Raises:
        ValueError: each difference, with both values; or other ranks than its checkpoint is for.
    """
    run = Path(config.folder)
    if not (run / "run.yaml").is_file():
        return
    changed = recipes.differences(recipes.load(str(run / "run.yaml")), config)
    records = ledger.read(run / ledger.FILE_NAME)
    began = next((r for r in records if r["kind"] == "created"), None)
    if began is not None and began["corpus"] != manifest.digest():
        changed.append(f"data.corpus digest: {began['corpus'][:12]}, now {manifest.digest()[:12]}")
    if changed:
        raise ValueError(
            f"{run} is a run with another recipe; name a new folder, or resume it as it was: "
            + "; ".join(changed)
        )
    _refuse_other_ranks(run, records, config.training.seed, ranks)


def _refuse_other_ranks(run: Path, records: Sequence[ledger.Record], seed: int, ranks: int) -> None:
    """ZeRO cuts the optimiser's state into a part a rank, which no other number of ranks reads."""
    state = ledger.fold(records, seed)
    if state.done or not state.checkpoints:
        return
    settings = json.loads((run / "deepspeed.json").read_text(encoding="utf-8"))
    step = state.resume_step()
    written_by = [r["ranks"] for r in records if r["kind"] == "commit" and r["step"] == step][-1]
    if settings["zero_optimization"]["stage"] > 0 and written_by != ranks:
        raise ValueError(
            f"training.ranks: the checkpoint of step {step} in {run} was written by {written_by} "
            f"ranks, now there are {ranks}; ZeRO resumes on as many as before"
        )

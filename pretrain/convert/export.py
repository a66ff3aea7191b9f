"""Export checkpoints of a run as model folders."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from data_prep import tokenizer as tokenizers
from data_prep.common.files import named_errors
from data_prep.common.records import decode
from data_prep.manifest import load_manifest
from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.convert.contents import ModelContents
from pretrain.convert.initial_weights import initial_model
from pretrain.convert.names import TOKENS
from pretrain.convert.writing import save_model
from pretrain.engine.consolidated import consolidated_weights
from pretrain.model.config import ModelConfig
from pretrain.records import checkpoints, ledger, segments
from pretrain.records.history import suspicion
from pretrain.records.ledger import RunState
from pretrain.records.status import RunView, view


def export_checkpoint(run: Path, output: Path, step: int | None = None) -> tuple[int, list[str]]:
    """Export a checkpoint of a run as a model folder.

    Args:
        run: the run's folder.
        output: the new model folder.
        step: step of the checkpoint; None: the newest one before any suspected spike; 0: the
            weights that the run began with.

    Returns:
        The step of the exported checkpoint; and notes for the user: of how many steps, and why it
        is not the newest, where it is not the last; and how to load the model.

    Raises:
        ValueError: no run, no such checkpoint, none before a suspected spike, or a damaged one.
    """
    seen = view(run)
    config, state = seen.config, seen.state
    step, reason = _chosen(run, state, step)
    if step:
        architecture, weights, recipe = _checkpoint(run, config, state, step)
    else:
        architecture, weights, recipe = _initial(run, config, ledger.created(seen.records))
    # In training the table is padded with further rows.
    weights[TOKENS] = weights[TOKENS][: architecture.vocab_size].clone()
    provenance = {
        "run": run.resolve().name,
        "step": step,
        "recipe": recipe,
        "training": summary(seen, step),
    }
    contents = ModelContents(architecture, weights, tokenizers.load(run), provenance)
    call = save_model(output, contents)
    last = config.training.steps
    unfinished = f"step {step} of the run's {last}" if step < last else ""
    return step, [note for note in (unfinished, reason, call) if note]


def _chosen(run: Path, state: RunState, step: int | None) -> tuple[int, str]:
    """Return the step to export, and a sentence on why it is not the newest, or "".

    Raises:
        ValueError: there is no such checkpoint, or none before a suspected spike.
    """
    sound = [step for step in state.checkpoints if step not in state.tainted]
    if step is None and state.checkpoints:
        newest = state.checkpoints[-1]
        if not sound:
            raise ValueError(
                f"{run}: all its checkpoints follow a suspected spike; --step {newest} exports the "
                "newest"
            )
        if sound[-1] == newest:
            return newest, ""
        return sound[-1], (
            f"not of step {newest}, the newest: the run is"
            f"{suspicion(state.suspected_since).removeprefix(',')}; --step {newest} exports it"
        )
    if step is None or step not in (0, *state.checkpoints):
        which = "checkpoint yet" if step is None else f"checkpoint of step {step}"
        steps = ", ".join(map(str, (*state.checkpoints, 0)))
        raise ValueError(
            f"{run}: has no {which}; --step may be {steps}, where 0 is the initial weights"
        )
    return step, ""


_Read = tuple[ModelConfig, dict[str, Tensor], dict[str, Any]]
"""Architecture, weights and recipe of a step of a run."""


def _initial(run: Path, config: RunConfig, created: ledger.Record | None) -> _Read:
    if created is None:
        raise ValueError(f"{run}: has not begun, so there are no initial weights yet")
    architecture = config.architecture(created["vocab_size"])
    # The folder may have been moved since.
    model = initial_model(dataclasses.replace(config, folder=str(run)), architecture)
    return architecture, dict(model.state_dict()), recipes.public(config)


def _checkpoint(run: Path, config: RunConfig, state: RunState, step: int) -> _Read:
    folder = checkpoints.folder_of(run, step)
    try:
        manifest = checkpoints.read_manifest(folder, state.manifests[step])
    except ValueError as error:
        if not state.is_done(config.training.steps) or step != state.checkpoints[-1]:
            raise
        raise ValueError(
            f"{error}; `zeroclap supervise` with the same recipe trains the last steps again"
        ) from None
    with named_errors(f"{folder / checkpoints.MANIFEST}: architecture"):
        architecture = decode(ModelConfig, manifest["architecture"])
    return architecture, dict(consolidated_weights(folder)), manifest["recipe"]


def summary(seen: RunView, step: int) -> dict[str, Any]:
    """Sum up the steps of a run before a checkpoint, on the surviving lineage.

    Args:
        seen: the run.
        step: of the checkpoint; 0 for the initial weights.

    Returns:
        `tokens` read, without padding; `attempts`, `loss_spikes` and `rollbacks` until then;
        `corpora`; `validation`, the newest measurement until then, if there is one; `init_from`, if
        the run continues another model (`ledger.origin`).
    """
    records = seen.records
    done = [line for line in seen.lines if line["step"] < step]
    newest = max((line["attempt"] for line in done), default=0)
    attempts = [r for r in records if r["kind"] == "attempt" and r["attempt"] <= newest]
    # A spike from before the newest of them led to it, even if its onset was at a later step.
    began = attempts[-1]["number"] if attempts else 0
    spikes = [r for r in records if r["kind"] == "spike"]
    found: dict[str, Any] = {
        "tokens": sum(line["tokens"] for line in done),
        "attempts": len(attempts),
        "loss_spikes": sum(r["number"] < began or r["onset"] < step for r in spikes),
        "rollbacks": sum(r["number"] < began for r in ledger.segments(records, ledger.SPIKE)),
        "corpora": _corpora(seen.config, records),
    }
    if before := [line for line in seen.validation if line["step"] <= step]:
        found["validation"] = {
            name: before[-1][name] for name in ("step", "loss", "perplexity", "subsets")
        }
    if origin := ledger.origin(records):
        found["init_from"] = {**origin, "path": Path(origin["path"]).name}
    return found


def _corpora(config: RunConfig, records: Sequence[ledger.Record]) -> list[dict[str, Any]]:
    """Describe the corpora; their sizes only where they are still there."""
    found = []
    paths = {source.name: Path(source.path) for source in config.segments.sources}
    for corpus in segments.corpora_of(records):
        name, digest = corpus["name"], corpus["digest"]
        path = paths.get(name, Path(name))
        facts: dict[str, Any] = {"name": name or path.name, "digest": digest}
        with contextlib.suppress(OSError, ValueError):  # it may be on another machine
            manifest = load_manifest(path)
            if manifest.digest() == digest:
                train = manifest.totals["train"]
                facts |= {"documents": train.documents, "tokens": train.tokens}
        found.append(facts)
    return found

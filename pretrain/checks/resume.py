"""Compare a run that is resumed, or forked, with its past."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import files
from pretrain.checks.recipe import Manifests
from pretrain.config.load import (
    MAY_CHANGE,
    RUN_FILE,
    SCHEDULE,
    differences,
    from_dict,
    load,
    public,
)
from pretrain.config.run import RunConfig
from pretrain.config.schedules import learning_rate
from pretrain.data import sources
from pretrain.data.mixture import Mixture
from pretrain.model.config import ModelConfig
from pretrain.records import control, ledger, metrics
from pretrain.records import folder as run_folder
from pretrain.records import fork as forks

_MARKS = frozenset({run_folder.LOCK, run_folder.SUPERVISOR_LOCK, ledger.FILE_NAME, control.FOLDER})
"""First files of a run's folder; a folder without any of them is not a run's."""


def refuse_other_recipe(config: RunConfig, manifests: Manifests) -> None:
    """Refuse to resume a run with another recipe or corpus than it began with.

    The number of steps and the schedule may change if the learning rate of every step done, as far
    as the newest checkpoint holds it, stays the same; so may the weights of corpora, if every step
    done or skipped reads the same.

    Raises:
        ValueError: lists each difference with both values; or the folder is not a run's.
    """
    run = Path(config.folder)
    _refuse_other_folder(run)
    for name in (metrics.METRICS, metrics.VALIDATION):
        files.check_not_link(run / name)
    fork = forks.find(config)
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    run_folder.refuse_lost_ledger(run, records, fork.copied if fork else ())
    records = fork.records if fork else records
    old = fork.recipe if fork else None
    if not fork and (run / RUN_FILE).is_file():
        old = load(str(run / RUN_FILE))
    state = ledger.run_state(records, config.training.seed)
    done = state.resume_step()
    # What a rollback skipped is named by the steps that had read it.
    read = max([done, *(r["skip"][1] for r in state.rollbacks if r.get("skip"))])
    changed = _other_corpora(records, config, manifests, read)
    if old:
        # A checkpoint, which a fork begins from, says no more of a recipe than what is public.
        new = from_dict(public(config), "recipe") if fork else config
        changed += [*_other_recipe(old, new, done, read), *_other_weights(old, new, read)]
    known = (
        f"{run} is a run with another recipe; name a new folder, or resume it unchanged, with the "
        f"recipe {run / RUN_FILE}: "
    )
    if changed:
        raise ValueError(
            (
                f"fork_from: {fork.run} had another recipe up to step {fork.step}: "
                if fork
                else known
            )
            + "; ".join(changed)
        )


def _other_recipe(old: RunConfig, new: RunConfig, done: int, read: int) -> list[str]:
    """List how the recipe differs from the one that a run of `done` steps had so far.

    The steps below `read` read or skipped blocks.
    """
    changed = _differences(old, new, done, read, MAY_CHANGE)
    others = _differences(old, new, done, read, (*MAY_CHANGE, *SCHEDULE))
    if changed == others:
        return changed
    steps = new.training.steps
    if steps < done:
        return [*changed, f"training.steps {steps} is below the {done} steps that are done"]
    rates = ((step, learning_rate(old, step), learning_rate(new, step)) for step in range(done))
    differing = next((rate for rate in rates if rate[1] != rate[2]), None)
    if differing is None:
        if steps > done and learning_rate(new, steps - 1) == 0:
            others.append(
                f"training.steps {steps}: the learning rate of the last steps would be 0, the "
                "schedule's minimum; start a new run"
            )
        return others
    reason = "step {}, which is done, had the learning rate {}, now {}".format(*differing)
    if steps != old.training.steps:
        decay_steps = old.schedule.decay_steps or old.training.steps
        reason += (
            f"; to change the number of steps, add schedule.decay_steps={decay_steps}, which keeps "
            "the schedule of the steps done"
        )
    return [*changed, reason]


def _differences(
    old: RunConfig, new: RunConfig, done: int, read: int, may_change: Sequence[str]
) -> list[str]:
    """List how the settings of the steps done differ, and those of the first step.

    Of the steps that a rollback skipped, those from `done` to `read`, only the sizes of batches are
    compared: they say which blocks are skipped.
    """
    found: dict[str, None] = {}
    for before, now in itertools.product(old.resolved_phases, new.resolved_phases):
        first, end = max(before.first_step, now.first_step), min(before.end_step, now.end_step)
        if first < min(end, max(done, 1)):
            where = f"from step {first} on, " if first else ""
            for text in differences(before.config, now.config, may_change):
                found[where + text] = None
    if not (old.phases or new.phases):
        return list(found)
    places = [[c.sizes.first_block(step) for step in range(read + 1)] for c in (old, new)]
    if not found and places[0] != places[1]:
        step = next(step for step in range(read + 1) if places[0][step] != places[1][step])
        which = "completed" if step <= done else "completed or skipped"
        found[f"batch sizes of {which} steps changed (first: step {step - 1})"] = None
    return list(found)


def _other_weights(old: RunConfig, new: RunConfig, read: int) -> list[str]:
    """Say which of the steps that read or skipped blocks, those below `read`, has other weights."""
    place = new.sizes.first_block(read)
    if old.sizes.first_block(read) != place:
        return []  # another batch is named as such
    if Mixture.of_run(old).until(place) == Mixture.of_run(new).until(place):
        return []

    def weights(config: RunConfig) -> list[tuple[int, list[float]]]:
        return [(step, each) for step, each in config.weights() if step < read]

    return [
        f"data.corpora: the weights by step were {weights(old)}, now {weights(new)}, but the steps "
        f"before {read} are done; change the weights from step {read} on"
    ]


def _refuse_other_folder(run: Path) -> None:
    if run.exists() and not run.is_dir():
        raise ValueError(f"folder: {run} is a file; name a run's folder, or a new one")
    names = {path.name for path in run.iterdir()} if run.is_dir() else set()
    if names and not names & _MARKS:
        raise ValueError(
            f"folder: {run} holds {sorted(names)[0]} but no {ledger.FILE_NAME}, so it is not a "
            "run's folder; name a run's folder, an empty one, or a new one"
        )


def _other_corpora(
    records: Sequence[ledger.Record], config: RunConfig, manifests: Manifests, read: int
) -> list[str]:
    """List how the corpora differ from those in the ledger. Others may follow them.

    Those of phases that begin after step `read` are not compared.
    """
    began = next((record for record in records if record["kind"] == "created"), None)
    if began is None:
        return []
    manifest = next(iter(manifests.values()))
    if began["tokenizer"] != manifest.tokenizer_digest:
        return [
            f"data.corpus: made with a vocabulary of {began['vocab_size']} ids "
            f"({began['tokenizer'][:12]}), now with one of {manifest.vocab_size} "
            f"({manifest.tokenizer_digest[:12]})"
        ]
    cut: list[str] = next((record["cut"] for record in reversed(records) if "cut" in record), [])
    now_cut = sources.algorithms(config.streams)
    for before, after in zip(cut, now_cut, strict=False):
        if before != after and before.rpartition("-")[0] == after.rpartition("-")[0]:
            return [
                f"data.packing: the blocks were cut by {before}, and this version cuts them by "
                f"{after}; resume with the version of zeroclap that the run began with"
            ]
    then = ledger.corpora_digests(records)
    now = [(name, manifest.digest()) for name, manifest in manifests.items()]
    if config.phases or any("batches" in record for record in records):
        phases = zip(config.resolved_phases, config.stream_names, strict=True)
        begun = {n for phase, names in phases for n in names if phase.first_step < max(1, read)}
        now, then = now[: len(begun)], then[: len(begun)]
    if len(now) < len(then):
        missing = ", ".join(name for name, _ in then[len(now) :])
        return [f"data.corpora: {missing} is missing; keep it, with the weight 0"]
    return [
        f"data.corpora.{name} digest: {old[:12]}, now {new[:12]}"
        if name
        else f"data.corpus digest: {old[:12]}, now {new[:12]}"
        for (_, old), (name, new) in zip(then, now, strict=False)
        if old != new
    ]


def refuse_other_checkpoint(
    manifest: Mapping[str, Any],
    step: int,
    architecture: ModelConfig,
    lineage: Sequence[Sequence[object]],
) -> None:
    """Refuse a checkpoint of another model or another history than the run's.

    Args:
        manifest: the checkpoint's. Its recipe is compared elsewhere; but the architecture that a
            recipe's names stand for may have changed since.
        step: step of the checkpoint according to the ledger.
        architecture: the run's.
        lineage: the run's before that step, as `ledger.lineage_record` writes it.

    Raises:
        ValueError: lists each difference with both values; or the architecture has an unknown
            field.
    """
    source = f"the architecture in the checkpoint of step {step}"
    saved = ModelConfig.from_dict(manifest["architecture"], source).to_dict()
    now = {"step": step, "lineage": lineage, **architecture.to_dict()}
    then = {"step": manifest["step"], "lineage": manifest["lineage"], **saved}
    changed = [
        f"{name}: {then.get(name)!r}, now {now.get(name)!r}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    if changed:
        raise ValueError(
            f"the checkpoint of step {step} is of another model or run: " + "; ".join(changed)
        )

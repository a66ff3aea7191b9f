"""Compare a run that goes on with its past, and decide how it goes on."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import files
from data_prep.common.records import decode
from data_prep.common.wording import changes
from data_prep.manifest import CorpusManifest, load_manifest
from pretrain.config import deepspeed
from pretrain.config.load import RUN_FILE, differences
from pretrain.config.run import RunConfig, Segments
from pretrain.data.sources import algorithms
from pretrain.model.config import ModelConfig
from pretrain.records import checkpoints, control, ledger, metrics
from pretrain.records import folder as run_folder
from pretrain.records import segments as run_segments
from pretrain.records.ledger import FORK, START, USER, Record
from pretrain.records.segments import Course, Source

_MARKS = frozenset({run_folder.LOCK, run_folder.SUPERVISOR_LOCK, ledger.FILE_NAME, control.FOLDER})
"""First files of a run's folder; a folder without any of them is not a run's."""


def check_run(config: RunConfig, source: Source | None = None) -> Course:
    """Check that a recipe fits the run in its folder, and say how the run goes on.

    A run goes on with the recipe that it had; what decides nothing of its weights may differ.
    Another recipe holds from the step of `source` on. Once this is recorded, `source` changes
    nothing any more, so that the same command continues the run.

    Raises:
        ValueError: lists each difference with both values; or the folder is not a run's, or the
            run cannot go on from `source`.
    """
    run = Path(config.folder)
    _check_folder(run)
    for name in (metrics.METRICS, metrics.VALIDATION):
        files.check_not_link(run / name)
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    if ledger.created(records):
        why, origin = "", run
        run_folder.check_ledger_is_there(run, records)
        if source and source.run:
            _check_fork(run, records, source)
            source = None
    elif source and source.run:
        why, origin = FORK, source.run
        copied = (checkpoints.folder_of(run, source.step), run / metrics.METRICS)
        run_folder.check_ledger_is_there(run, records, copied)
        records = run_segments.fork_records(source.run, source.step)
    else:
        run_folder.check_ledger_is_there(run, records)
        if source:
            raise ValueError(f"--from {source.step}: {run} has not begun; leave it out")
        return _checked(Course(config, config.segments, {}, START), records)
    recipes = run_segments.recipes_of(origin, records)
    old = recipes.pop()
    may, may_not = differences(old[1], config)
    unchanged = Course(config, Segments.of([*recipes, (old[0], config)]), {})
    _check_vocabulary(config, records)
    others = [] if may else _other_corpora(unchanged, records)
    if may_not or ((may or others) and not source):
        named, _ = differences(old[1], config, named=True)
        raise ValueError(_refusal(origin, [*named, *others], may_not))
    if why or may or others:
        assert source
        _check_step(source.step, config, old[1], records)
        recipes = [(first, recipe) for first, recipe in [*recipes, old] if first < source.step]
        course = Course(config, Segments.of([*recipes, (source.step, config)]), {}, why or USER)
        return _checked(dataclasses.replace(course, source=source), records)
    return _checked(unchanged, records)


def check_deepspeed(config: RunConfig, ranks: int) -> None:
    """Compare the DeepSpeed file, which may have been edited, with that of the last checkpoint.

    Raises:
        ValueError: its arithmetic or its stage differs.
    """
    run = Path(config.folder)
    kept = ledger.run_state(ledger.read_ledger(run / ledger.FILE_NAME)).checkpoints
    try:
        saved = files.read_json(checkpoints.folder_of(run, kept[-1]) / checkpoints.MANIFEST)
        before = saved["deepspeed"]
    except (OSError, ValueError, LookupError):  # none is kept, or the ranks look for a whole one
        return
    settings = deepspeed.read_settings(*config.deepspeed_arguments(ranks))
    deepspeed.check_same_state(config.training.deepspeed, settings, before, kept[-1])


def _check_vocabulary(config: RunConfig, records: Sequence[Record]) -> None:
    """Check that a recipe's corpora have the run's vocabulary, which no step can change."""
    began = ledger.created(records)
    assert began
    for source in config.segments.sources:
        manifest = load_manifest(Path(source.path))
        if began["tokenizer"] != manifest.tokenizer_digest:
            raise ValueError(
                f"data.corpus: {source.path}: made with a vocabulary of {began['vocab_size']} ids "
                f"({began['tokenizer'][:12]}), now with one of {manifest.vocab_size} "
                f"({manifest.tokenizer_digest[:12]})"
            )


def _other_corpora(course: Course, records: Sequence[Record]) -> list[str]:
    """List the corpora that are not those that the run has read, of a recipe that is the same."""
    pairs = zip(course.segments.sources, run_segments.corpora_of(records), strict=False)
    found = [(s.path, load_manifest(Path(s.path)).digest(), c["digest"]) for s, c in pairs]
    return [f"{p}: digest {was[:12]}, now {now[:12]}" for p, now, was in found if now != was]


def _refusal(run: Path, may: Sequence[str], may_not: Sequence[str]) -> str:
    text = f"{run} is a run with another recipe"
    if may_not:
        return (
            f"{text}, and this cannot change within a run: {'; '.join(may_not)}; name a new folder"
        )
    return (
        f"{text}: {'; '.join(may)}; resume it unchanged, with the recipe {run / RUN_FILE}, add "
        "`--from STEP` to apply this recipe from that step on, or name a new folder"
    )


def _check_fork(run: Path, records: Sequence[Record], source: Source) -> None:
    """Check that a run that has begun is the fork that is asked for."""
    began = next(iter(ledger.segments(reversed(records), FORK)), None)
    if began is None or (began["run"], began["step"]) != (str(source.run), source.step):
        how = f"as a fork of {began['run']}@{began['step']}" if began else "from initial weights"
        raise ValueError(f"--from: {run} is a run that began {how}; name a new folder")


def _check_step(step: int, config: RunConfig, old: RunConfig, records: Sequence[Record]) -> None:
    """Check that a recipe may follow another one from a step on."""
    kept = ledger.run_state(records).checkpoints
    first, last = (kept or (0,))[-1], old.training.steps
    if not (step in kept or first <= step <= last) or step == 0:
        steps = [*map(str, kept), f"{first + 1} to {last}" if first < last else ""]
        raise ValueError(
            f"--from {step}: accepted: the step of a checkpoint that the run keeps, or one that is "
            f"not done yet: {', '.join(filter(None, steps))}"
        )
    if config.training.steps <= step:
        raise ValueError(f"training.steps {config.training.steps} is not above --from {step}")


def _checked(course: Course, records: Sequence[Record]) -> Course:
    """Return a course with its manifests, after comparing the corpora with the run's so far."""
    sources, found = course.segments.sources, dict[str, CorpusManifest]()
    named: dict[tuple[object, ...], str] = {}
    for source in sources:
        manifest = found[source.path] = load_manifest(Path(source.path))
        alike = manifest.digest(), source.sequence_length, source.packing
        other = named.setdefault(alike, source.path)
        if other != source.path:
            raise ValueError(f"{source.path} is the same corpus as {other}; name it by that path")
    then, now = run_segments.corpora_of(records), zip(sources, algorithms(sources), strict=True)
    if course.why in (USER, FORK):
        order, sizes = run_segments.order_of(records)
        then = then[: order.drawn_from(sizes.first_block(course.source.step))]
    for old, (source, cut) in zip(then, now, strict=False):
        digest = found[source.path].digest()
        if old["digest"] != digest:
            raise ValueError(
                f"{source.path}: is not the corpus that the run has read: digest "
                f"{old['digest'][:12]}, now {digest[:12]}"
            )
        if old["cut"] != cut:
            raise ValueError(
                f"data.packing: the blocks were cut by {old['cut']}, and this version cuts them by "
                f"{cut}; resume with the version of zeroclap that the run began with"
            )
    return dataclasses.replace(course, manifests=found)


def _check_folder(run: Path) -> None:
    if run.exists() and not run.is_dir():
        raise ValueError(f"folder: {run} is a file; name a run's folder, or a new one")
    names = {path.name for path in run.iterdir()} if run.is_dir() else set()
    if names and not names & _MARKS:
        shown = min(names, key=lambda name: (name.startswith("."), name))
        raise ValueError(
            f"folder: {run} holds {shown} but no {ledger.FILE_NAME}, so it is not a "
            "run's folder; name a run's folder, an empty one, or a new one"
        )


def check_checkpoint(
    manifest: Mapping[str, Any],
    step: int,
    architecture: ModelConfig,
    lineage: Sequence[Sequence[object]],
) -> None:
    """Check that a checkpoint is of the run's model and history.

    Args:
        manifest: the checkpoint's. Its recipe is compared elsewhere; but the architecture that a
            recipe's names stand for may have changed since.
        step: step of the checkpoint according to the ledger.
        architecture: the run's.
        lineage: the run's before that step, as `Order.identity` gives it.

    Raises:
        ValueError: lists each difference with both values; or the architecture has an unknown
            field.
    """
    with files.named_errors(f"the architecture in the checkpoint of step {step}"):
        saved = dataclasses.asdict(decode(ModelConfig, manifest["architecture"]))
    now = {"step": step, "lineage": lineage, **dataclasses.asdict(architecture)}
    then = {"step": manifest["step"], "lineage": manifest["lineage"], **saved}
    changed = sorted(f"{name}: {was!r}, now {is_now!r}" for name, was, is_now in changes(then, now))
    if changed:
        raise ValueError(
            f"the checkpoint of step {step} is of another model or run: " + "; ".join(changed)
        )

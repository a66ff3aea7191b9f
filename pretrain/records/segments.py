"""The segments of a run: what its ledger says of them, and how another one begins.

A segment is what holds from a step on. The first one begins with the run. A rollback from a spike
adds one, with another seed. The user adds one with another recipe, which holds from a step on that
is not done yet, or from a checkpoint to which the run then goes back; in a new folder it may go on
from a checkpoint of another run (a fork). What begins with a recipe names it by its digest; the
recipe itself is in the run's folder. Every setting of a step follows from these records and the
step.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import files
from data_prep.common.markup import text_table
from data_prep.manifest import CorpusManifest
from pretrain.config.load import RUN_FILE, differences, digest, dump, load
from pretrain.config.run import RunConfig, Segments, Sizes
from pretrain.data.mixture import Mixture
from pretrain.data.order import Order
from pretrain.data.sources import algorithms, open_source
from pretrain.records import checkpoints, folder, history, ledger, metrics
from pretrain.records.ledger import FORK, SPIKE, START, USER, Record, RunState

RECIPES = "recipes"
"""Folder with the recipes that a run has had, by digest."""
Recipes = list[tuple[int, RunConfig]]
"""(first step, recipe), ascending."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The step from which a new recipe applies: the value of `--from`."""

    step: int
    run: Path | None = None
    """Folder of another run, of which the step is a checkpoint."""

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Read `STEP` or `RUN@STEP`.

        Raises:
            ValueError: it is neither.
        """
        run, _, step = text.rpartition("@")
        if not step.isascii() or not step.isdigit():
            raise ValueError(
                f"--from {text!r}: write a step, or a run's folder and step: runs/a@400"
            )
        return cls(int(step), Path(run).resolve() if run else None)


@dataclasses.dataclass(frozen=True)
class Course:
    """How a run goes on."""

    config: RunConfig
    """The newest recipe."""
    segments: Segments
    manifests: Mapping[str, CorpusManifest]
    """Of the corpora of `segments.sources`, by path."""
    why: str = ""
    """Of a segment that has to be recorded first; empty if there is none."""
    source: Source = Source(0)
    """Where that segment goes on from."""

    @property
    def goes_on(self) -> bool:
        """Whether that segment follows steps that were trained already."""
        return self.why in (USER, FORK)


def order_of(records: Sequence[Record]) -> tuple[Order, Sizes]:
    """The order of blocks, and the sizes of batches, that the segments of a ledger lead to.

    At least one has begun.
    """
    return [*orders_of(records)][-1][1]


def orders_of(records: Sequence[Record]) -> Iterator[tuple[int, tuple[Order, Sizes]]]:
    """Yield the number of each segment's record, and what `order_of` is from it on."""
    order: Order | None = None
    batches: list[Any] = []
    weights: list[Any] = []
    corpora: list[Any] = []
    for record in ledger.segments(records):
        step = record["step"]
        if record["why"] != SPIKE:
            batches = _followed(batches, step, record["batches"])
            weights = _followed(weights, step, record["weights"])
            before, corpora = corpora, record["corpora"]
            totals = [corpus["blocks"] for corpus in corpora]
            # Of corpora that it leaves out nothing was to be read before the step.
            rows = [(s, [*row, *[0.0] * len(totals)][: len(totals)]) for s, row in weights]
            sizes = Sizes(tuple(map(tuple, batches)))
            mixture = Mixture.by_step(rows, sizes.first_block)
            if order is None:
                order = Order.begin(mixture, totals, record["seed"])
            else:
                kept = itertools.takewhile(_is_same, zip(before, corpora, strict=False))
                order = order.continued(mixture, totals, len([*kept]), sizes.first_block(step))
        else:
            assert order is not None, "a rollback is of a run that has begun"
            skip = record["skip"]
            places = (sizes.first_block(skip[0]), sizes.first_block(skip[1])) if skip else None
            order = order.rolled_back(sizes.first_block(step), record["seed"], places)
        yield record["number"], (order, sizes)


def _is_same(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
    """Whether two corpora, as `corpora_of` gives them, have the same blocks."""
    return all(pair[0][key] == pair[1][key] for key in ("digest", "cut", "blocks"))


def _followed(parts: Sequence[Any], step: int, new: Sequence[Any]) -> list[Any]:
    """What holds by step, [(first step, ...)], where from a step on something else does."""
    return [*(part for part in parts if part[0] < step), *new]


def corpora_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The corpora of a run, each in each way it was cut; [] before the run has begun.

    Returns:
        Of each: `name` (of a single one ""), `digest` of its manifest, `cut` (packing and version
        of the algorithm), number of `blocks`, and `share_of_tokens` that these hold.
    """
    found = [record["corpora"] for record in ledger.segments(records) if "corpora" in record]
    return list(found[-1]) if found else []


def recipes_of(run: Path, records: Sequence[Record]) -> Recipes:
    """The recipes of a run, as its folder keeps them; [] before the run has begun.

    Raises:
        ValueError: the file of a recipe is missing, or is not the one that was recorded.
    """
    found = []
    for record in ledger.run_state(records).segments:
        if "recipe" in record:
            path = run / RECIPES / f"{record['recipe']}.yaml"
            config = load(str(path)) if path.is_file() else None
            # The digest leaves out the paths of corpora, and so their lines.
            if not (config and config.segments.sources) or (
                _name_of(config, record["corpora"]) != record["recipe"]
            ):
                what = "was changed" if config else "is missing"
                raise ValueError(f"{path}: {what}; restore it from a backup of this folder")
            found.append((record["step"], config))
    return found


def segments_of(run: Path, records: Sequence[Record], config: RunConfig) -> Segments:
    """The segments of a run; those that its recipe, `config`, describes before it has begun."""
    recipes = recipes_of(run, records)
    return Segments.of(recipes) if recipes else config.segments


def _name_of(config: RunConfig, corpora: Sequence[Mapping[str, Any]]) -> str:
    """The digest of a recipe in a run that has read, or is to read, these corpora."""
    return digest(config, [corpus["digest"] for corpus in corpora])


def begin(course: Course, take_weights: Callable[[], Mapping[str, object]] | None = None) -> None:
    """Record the segment that a course begins with, if there is one.

    Of a fork, this copies what the other run had when it committed the checkpoint: its records up
    to then, its measurements, and the checkpoint. So the fork has the other run's optimizer state,
    order of blocks, seeds and steps, its detector knows the losses before, and `audit` checks all
    of its steps. The other run is only read.

    Args:
        course: of the run. No attempt may train it meanwhile.
        take_weights: called before a run begins, if it starts from another model: copies it into
            the run's folder, and returns what `ledger.origin` will.

    Raises:
        ValueError: a run's checkpoint changed while it was copied.
    """
    if not course.why:
        return
    config, segments, step = course.config, course.segments, course.source.step
    run = Path(config.folder)
    path = run / ledger.FILE_NAME
    (run / RECIPES).mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {"step": step}
    if course.why == START:
        manifest = next(iter(course.manifests.values()))
        fields |= {"seed": config.training.seed, "tokenizer": manifest.tokenizer_digest}
        fields |= {"vocab_size": manifest.vocab_size}
        fields |= {"init_from": take_weights()} if take_weights else {}
    elif course.why == FORK:
        fields |= {"run": str(course.source.run)}
        path = _copy(course, run)
    sources = zip(segments.sources, algorithms(segments.sources), strict=True)
    fields["corpora"] = [
        {
            "name": source.name,
            "digest": course.manifests[source.path].digest(),
            "cut": cut,
            "blocks": len(blocks := open_source(source, "train")),
            "share_of_tokens": blocks.share_of_tokens,
        }
        for source, cut in sources
    ]
    fields["recipe"] = _name_of(config, fields["corpora"])
    fields["batches"] = [part for part in segments.sizes.parts if part[0] >= step]
    fields["weights"] = [part for part in segments.weights() if part[0] >= step]
    dump(config, run / RECIPES / f"{fields['recipe']}.yaml")
    ledger.append(path, "segment", why=course.why, **fields)
    dump(config, run / RUN_FILE)  # only now that the ledger has it
    if course.why == FORK:
        os.replace(path, run / ledger.FILE_NAME)
        files.fsync(run)


def _copy(course: Course, run: Path) -> Path:
    """Copy what a fork goes on from; returns the copy of the ledger, which takes its place last."""
    other, step = course.source.run, course.source.step
    assert other is not None
    records = fork_records(other, step)
    checkpoint = checkpoints.folder_of(run, step)
    shutil.rmtree(checkpoint.parent, ignore_errors=True)  # of a copy that was interrupted
    shutil.copytree(checkpoints.folder_of(other, step), checkpoint)
    with files.named_errors(f"--from {other}"):
        checkpoints.read_manifest(checkpoint, records[-1]["manifest"])
    for name in (RECIPES, folder.INITIAL):
        if (other / name).is_dir():
            shutil.copytree(other / name, run / name, dirs_exist_ok=True)
    for name, last in ((metrics.METRICS, step - 1), (metrics.VALIDATION, step)):
        until = (records[-1]["attempt"], last)
        _copy_lines(other / name, run / name, lambda x: (x["attempt"], x["step"]) <= until)  # noqa: B023
    copied = run / f"{ledger.FILE_NAME}.fork"
    _copy_lines(other / ledger.FILE_NAME, copied, lambda r: r["number"] < len(records))
    return copied


def fork_records(run: Path, step: int) -> list[Record]:
    """The records of a run's ledger up to the commit of a checkpoint that it keeps.

    Raises:
        ValueError: it is no run, or has no such checkpoint; the steps that it has are named.
    """
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    if ledger.created(records) is None:
        raise ValueError(f"--from: {run} is not the folder of a run that has begun")
    kept = ledger.run_state(records).checkpoints
    if step not in kept:
        steps = ", ".join(map(str, kept)) or "none"
        raise ValueError(f"--from: {run} has no checkpoint of step {step}; it kept {steps}")
    commits = [r["number"] for r in records if r["kind"] == "commit" and r["step"] == step]
    return records[: commits[-1] + 1]


def _copy_lines(source: Path, target: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Copy the JSON lines that are wanted, byte by byte."""
    kept = []
    for line in files.read_bytes(source).split(b"\n"):
        with contextlib.suppress(*files.MALFORMED):  # a torn or damaged line
            if wanted(json.loads(line)):
                kept.append(line + b"\n")
    files.write_atomically(target, b"".join(kept))


COLUMNS = ("steps", "why", "recipe", "seed", "changes")
"""Of `table`."""


def table(segments: Segments, state: RunState) -> list[tuple[str, ...]]:
    """What holds by step in a run, [rows, COLUMNS]; no rows before the run has begun."""
    if not state.segments:
        return []
    begins = {part.first_step for part in segments.parts} | {r["step"] for r in state.segments}
    starts = sorted(begins)
    rows: list[tuple[str, ...]] = []
    before = segments.parts[0]
    for first, end in zip(starts, [*starts[1:], segments.parts[-1].end_step], strict=True):
        part = segments.at(first)
        begun = [record for record in state.segments if record["step"] == first]
        why = [record["why"] for record in begun]
        why += [part.name] if part.first_step == first and part.name else []
        changes, _ = differences(before.config, part.config, named=True)
        changes += [text for record in begun for text in _changes(record)]
        recipe = [r["recipe"] for r in state.segments if "recipe" in r and r["step"] <= first][-1]
        seed = [seed for step, seed in state.seeds_by_step if step <= first][-1]
        steps = f"{first:,} to {end:,}"
        rows.append((steps, ", ".join(why), recipe, str(seed), "; ".join(changes)))
        before = part
    return rows


def lines(segments: Segments, state: RunState) -> list[str]:
    """The lines of `table` below their names, aligned; [] before the run has begun."""
    rows = table(segments, state)
    return text_table(COLUMNS, rows) if rows else []


def _changes(record: Record) -> Iterator[str]:
    """What a segment changes beside settings."""
    yield from history.rollback_changes(record)
    if origin := record.get("init_from"):
        yield f"weights {ledger.describe_origin(origin)}"
    if record["why"] == FORK:
        yield f"from {record['run']}"

"""Inputs -> a corpus: plan the shards, have an engine make them, write the manifest.

`prepare` does all of it, or what is missing. `prepare_part` makes some of the shards, so that many
machines can share the work without knowing of one another; `prepare` then finds them made.
"""

import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from data_prep import manifest as records
from data_prep.documents import reader_of
from data_prep.duplicates import HASHES_SUFFIX, MARKS_SUFFIX, hash_input, mark_duplicates
from data_prep.engines import ENGINES, Work
from data_prep.files import PARTIAL_SUFFIX
from data_prep.inputs import Input, input_state
from data_prep.manifest import SPLITS, CorpusManifest, Settings, ShardManifest
from data_prep.merge import merge
from data_prep.parts import LOCK, Part, hold
from data_prep.progress import Done, ProgressReport, duration
from data_prep.report import FILE_NAME as REPORT_FILE
from data_prep.report import draw, import_matplotlib
from data_prep.shard import ShardTask, prepare_shard, standing_manifest
from data_prep.tokenizer import FILE_NAME as TOKENIZER_FILE
from data_prep.tokenizer import Tokenizer, load

T = TypeVar("T")

_FOLDERS = ("", "shards/", *(f"{split}/" for split in SPLITS))
_HASHES = tuple(f"shards/shard-*{suffix}" for suffix in (HASHES_SUFFIX, MARKS_SUFFIX))
# The manifest goes first: a folder without it is no corpus, whatever else is left.
_MADE_BY_US = (
    records.FILE_NAME,
    REPORT_FILE,
    "shards/shard-*.json",
    *_HASHES,
    *(f"{split}/shard-*" for split in SPLITS),
    TOKENIZER_FILE,
)
# Bytes on the disk that a worker reads in a second, measured on text like the Pile's; for the
# reader's orientation only.
_BYTES_A_SECOND = {".zst": 15e6, ".gz": 15e6, ".parquet": 25e6}
_PLAIN_BYTES_A_SECOND = 50e6


def prepare(
    inputs: Sequence[Input],
    output: Path,
    tokenizer_path: str | Path,
    settings: Settings,
    *,
    valid_inputs: Sequence[Input] = (),
    workers: int = 1,
    engine: str = "local",
    overwrite: bool = False,
) -> CorpusManifest:
    """Make a corpus folder, or what is missing of it.

    Args:
        inputs: One shard each, in this order.
        output: The corpus folder.
        tokenizer_path: What `tokenizer.load` takes.
        settings: What to keep and how to split.
        valid_inputs: Further inputs; where there are any, the validation split is these and the
            training split is the others.
        workers: Shards made at once.
        engine: One of `ENGINES`.
        overwrite: Remove what an earlier prepare left in `output` first.

    Raises:
        ValueError: Bad inputs, a standing corpus of other settings, another prepare at work, or no
            document kept.
        WorkerDied: A worker process was killed.
    """
    _check_workers(workers)
    tokenizer = load(tokenizer_path)
    tasks = plan(inputs, valid_inputs, output, settings, tokenizer.digest())
    output.mkdir(parents=True, exist_ok=True)
    with hold(output):
        _remove(output, f"{LOCK}-*", *_partials())
        if overwrite:
            _remove(output, *_MADE_BY_US)
        shards = _standing_shards(tasks, tasks)
        if len(shards) == len(tasks) and (output / records.FILE_NAME).is_file():
            return records.load_manifest(output)
        _remove(output, records.FILE_NAME)
        tokenizer.save(output / TOKENIZER_FILE)
        missing = [task for task in tasks if task.index not in shards]
        if missing and settings.duplicates == "drop":
            _work_on(hash_input, tasks, engine, workers, "find duplicates")
            mark_duplicates(tasks)
        _say(idle_workers(missing, workers))
        threading.Thread(target=import_matplotlib).start()
        shards |= _work_on(prepare_shard, missing, engine, workers, "prepare")
        corpus = merge([shards[task.index] for task in tasks], tokenizer, output)
        draw(corpus, output / REPORT_FILE)
        records.write_record(output / records.FILE_NAME, corpus)
        _remove(output, *_HASHES)
        return corpus


def prepare_part(
    part: Part,
    inputs: Sequence[Input],
    output: Path,
    tokenizer_path: str | Path,
    settings: Settings,
    *,
    valid_inputs: Sequence[Input] = (),
    workers: int = 1,
    engine: str = "local",
) -> int:
    """Make a part of a corpus's shards; `prepare` makes a corpus of them when all are there.

    Several parts may be at work in one folder, on one machine or many. Locks keep two from the same
    part where the file system has locks; where it has none, work that is done twice gives the same
    files, each of which appears whole.

    Where duplicates are dropped every input has to be read once before the first shard can be made:
    a part reads its own, and goes on to its shards only if all others have been read too.

    Returns:
        The number of inputs that other parts have yet to read for duplicates; 0 where all shards
        of this part are made.

    Raises:
        ValueError: As `prepare`.
        WorkerDied: As `prepare`.
    """
    _check_workers(workers)
    tokenizer = load(tokenizer_path)
    tasks = plan(inputs, valid_inputs, output, settings, tokenizer.digest())
    mine = tasks[part.index :: part.count]
    output.mkdir(parents=True, exist_ok=True)
    with hold(output, part):
        standing = _standing_shards(mine, tasks)
        missing = [task for task in mine if task.index not in standing]
        if not missing:
            return 0
        _remove(output, records.FILE_NAME, *_partials(missing))
        _place_tokenizer(tokenizer, output)
        if settings.duplicates == "drop":
            _work_on(hash_input, mine, engine, workers, "find duplicates")
            files = (task.manifest_file.with_suffix(HASHES_SUFFIX) for task in tasks)
            if unread := sum(not file.is_file() for file in files):
                return unread
            mark_duplicates(tasks)
        _say(idle_workers(tasks, workers * part.count))
        _work_on(prepare_shard, missing, engine, workers, "prepare")
        return 0


def plan(
    inputs: Sequence[Input],
    valid_inputs: Sequence[Input],
    output: Path,
    settings: Settings,
    tokenizer_digest: str,
) -> list[ShardTask]:
    """A task for each input, `valid_inputs` last.

    Raises:
        ValueError: An input is missing, of an unknown kind, or named for both splits; or the
            validation split would come from two places.
    """
    if valid_inputs and settings.valid_fraction:
        raise ValueError(
            f"--valid-fraction {settings.valid_fraction} with --valid-input: accepted: one of them"
        )
    if both := {*map(_place, inputs)} & {*map(_place, valid_inputs)}:
        raise ValueError(
            f"--valid-input {min(both)}: is an --input as well; accepted: inputs of one split each"
        )
    roles = ["train" if valid_inputs else "both"] * len(inputs) + ["valid"] * len(valid_inputs)
    sources = [*inputs, *valid_inputs]
    for source in sources:
        reader_of(source)
    return [
        ShardTask(index, source, output, settings, tokenizer_digest, role)
        for index, (source, role) in enumerate(zip(sources, roles, strict=True))
    ]


def idle_workers(tasks: Sequence[ShardTask], workers: int) -> str | None:
    """What to tell a user whose workers outnumber the inputs; None where they do not."""
    if workers <= len(tasks) or not tasks:
        return None
    size_bytes, largest = max((input_state(task.input)[0], str(task.input)) for task in tasks)
    rate = _BYTES_A_SECOND.get(Path(largest).suffix, _PLAIN_BYTES_A_SECOND)
    return (
        f"{workers} workers for {len(tasks)} inputs: an input becomes one shard, as a compressed "
        f"stream cannot be split, and at most {len(tasks)} work at once. The largest, "
        f"{largest} ({size_bytes / 1e6:,.0f} MB), takes one worker about "
        f"{duration(size_bytes / rate)}; more and smaller inputs would be done sooner"
    )


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ValueError(f"--workers {workers}: accepted: 1 or more")


def _place(source: Input) -> Input:
    return source.resolve() if isinstance(source, Path) else source


def _standing_shards(
    tasks: Sequence[ShardTask], all_tasks: Sequence[ShardTask]
) -> dict[int, ShardManifest]:
    """Those of `tasks` that an earlier run made; refuses what a run of `all_tasks` never makes."""
    expected = {task.manifest_file.name for task in all_tasks}
    folder = all_tasks[0].corpus / "shards"
    if extra := sorted(
        file.name for file in folder.glob("shard-*.json") if file.name not in expected
    ):
        raise ValueError(
            f"{folder / extra[0]}: left by a prepare of more inputs than the {len(expected)} named "
            "now. Name another --output, or --overwrite to make the corpus anew"
        )
    found = {task.index: standing_manifest(task) for task in tasks}
    return {index: shard for index, shard in found.items() if shard is not None}


def _work_on(
    work: Work[T], tasks: Sequence[ShardTask], engine: str, workers: int, label: str
) -> dict[int, T]:
    """What the work gave for each task; all that can be done is, before what cannot is raised."""
    made: dict[int, T] = {}
    failures: dict[int, str] = {}
    if not tasks:
        return made
    input_bytes = sum(input_state(task.input)[0] for task in tasks)
    with ProgressReport(len(tasks), label, input_bytes) as report:
        done = Done()

        def tick(now: Done) -> None:
            nonlocal done
            done = now
            report.update(len(made), done)

        with closing(ENGINES[engine](work, tasks, workers, tick)) as outcomes:
            for task, outcome in outcomes:
                if isinstance(outcome, ValueError | OSError):
                    failures[task.index] = str(outcome)
                    report.say(f"{task.name} failed: {outcome}")
                else:
                    made[task.index] = outcome
                    report.update(len(made), done)
    if failures:
        kept = f" ({len(made)} other shards are done and kept)" if made else ""
        raise ValueError("; ".join(failures[index] for index in sorted(failures)) + kept)
    return made


def _place_tokenizer(tokenizer: Tokenizer, output: Path) -> None:
    """Write the vocabulary where there is none; other parts may be reading it."""
    file = output / TOKENIZER_FILE
    if not file.is_file():
        tokenizer.save(file)
    elif load(file).digest() != tokenizer.digest():
        raise ValueError(
            f"{file}: not the vocabulary that --tokenizer names; accepted: the same one for all "
            "parts, or another --output"
        )


def _say(message: str | None) -> None:
    if message:
        print(f"prepare: {message}", file=sys.stderr, flush=True)


def _partials(tasks: Sequence[ShardTask] | None = None) -> list[str]:
    """Patterns of what killed runs were writing; of these tasks, or at all."""
    names = [""] if tasks is None else [f"{task.name}." for task in tasks]
    return [f"{folder}.{name}*{PARTIAL_SUFFIX}" for folder in _FOLDERS for name in names]


def _remove(output: Path, *patterns: str) -> None:
    for pattern in patterns:
        for file in output.glob(pattern):
            file.unlink(missing_ok=True)

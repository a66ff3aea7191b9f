"""Make a corpus: plan the shards, have an engine make them, write the manifest.

Shards that an earlier, killed run has finished are kept.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np

from data_prep import manifest as records
from data_prep.common.files import NO_LOCKS, PARTIAL_SUFFIX, check_new, lock, read_json
from data_prep.common.wording import few
from data_prep.documents import reader_of
from data_prep.engines import ENGINES, WorkerDied
from data_prep.filters import OTHER_SUBSET, own_filter
from data_prep.indexed import dtype_for
from data_prep.inputs import Input, input_state, place_of
from data_prep.manifest import SPLITS, CorpusManifest, Count, Settings, ShardManifest, ShardTask
from data_prep.progress import ProgressReport
from data_prep.shard import MAX_SUBSETS, existing_manifest, prepare_shard
from data_prep.statistics import count_ids, length_histogram, unigram_perplexity
from data_prep.tokenizer import FILE_NAME as TOKENIZER_FILE
from data_prep.tokenizer import Tokenizer, load

_LOCK = ".lock"
"""In a corpus folder, from the beginning of its first prepare on."""
_HOLDER = "process "
"""Begins what `lock` writes into it."""
_SHARDS = "shards/shard-*.json"
_FOLDERS = ("", "shards/", *(f"{split}/" for split in SPLITS))
_LEFT_BY_KILLED = tuple(f"{folder}.*{PARTIAL_SUFFIX}" for folder in _FOLDERS)
# The manifest is removed first: a folder without it is not a corpus, whatever else is left.
_OUTPUTS = (records.FILE_NAME, _SHARDS, *(f"{split}/shard-*" for split in SPLITS), TOKENIZER_FILE)


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
    """Make a corpus folder, or the missing parts of it.

    Args:
        inputs: Inputs in this order; each becomes one shard.
        output: The corpus folder.
        tokenizer_path: A path or name for `tokenizer.load`.
        settings: Which documents to keep and how to split them.
        valid_inputs: Inputs of the validation split; if given, all of `inputs` are the training
            split.
        workers: Number of shards written in parallel.
        engine: One of `ENGINES`.
        overwrite: First remove what an earlier prepare left in `output`.

    Raises:
        ValueError: The inputs are invalid, `output` holds something else, the corpus was made with
            other settings, another prepare is running, or no document was kept.
        WorkerDied: The worker process of the first input that failed was killed.
    """
    for name in settings.filters:
        own_filter(name)  # refuses before anything is written
    _check_output(output, overwrite)
    tokenizer = load(tokenizer_path)
    tasks = plan(inputs, valid_inputs, output, settings, tokenizer.digest())
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        _remove(output, *_LEFT_BY_KILLED)
        if overwrite:
            _remove(output, *_OUTPUTS)
            shutil.rmtree(output / "blocks", ignore_errors=True)  # cut from what is removed
        shards = _existing_shards(tasks)
        if len(shards) == len(tasks) and (output / records.FILE_NAME).is_file():
            return records.load_manifest(output)
        _remove(output, records.FILE_NAME)
        tokenizer.save(output / TOKENIZER_FILE)
        missing = [task for task in tasks if task.index not in shards]
        try:
            shards |= _make(missing, engine, workers)
        finally:
            _remove(output, *_LEFT_BY_KILLED)
            if not any(output.glob(_SHARDS)):  # it failed, and left nothing to go on from
                _remove(output, *_OUTPUTS, _LOCK)
                for folder in reversed(_FOLDERS):
                    with suppress(OSError):  # it is missing, or holds something else
                        (output / folder).rmdir()
        corpus = merge([shards[task.index] for task in tasks], tokenizer, output)
        records.write_record(output / records.FILE_NAME, corpus)
        return corpus


def plan(
    inputs: Sequence[Input],
    valid_inputs: Sequence[Input],
    output: Path,
    settings: Settings,
    tokenizer_digest: str,
) -> list[ShardTask]:
    """Return one task per input, with `valid_inputs` last.

    Raises:
        ValueError: An input is missing, of an unknown kind, or named for both splits; or both
            `valid_inputs` and a validation fraction are given.
    """
    if valid_inputs and settings.valid_fraction:
        raise ValueError(
            f"--valid-fraction {settings.valid_fraction} with --valid-input: give one of them"
        )
    places = set(map(place_of, inputs))
    if both := [source for source in valid_inputs if place_of(source) in places]:
        raise ValueError(f"--valid-input {both[0]}: is an --input as well; name it once")
    roles = ["train" if valid_inputs else "both"] * len(inputs) + ["valid"] * len(valid_inputs)
    sources = [*inputs, *valid_inputs]
    for source in sources:
        reader_of(source)
    return [
        ShardTask(index, source, output, settings, tokenizer_digest, role)
        for index, (source, role) in enumerate(zip(sources, roles, strict=True))
    ]


def _check_output(output: Path, overwrite: bool) -> None:
    """Refuse a folder that is not of a corpus, and one that would be made anew unasked."""
    locked, shards = output / _LOCK, [*output.glob(_SHARDS)]
    written = [*output.glob(records.FILE_NAME), *shards]
    # Others may have a file of that name too; a prepare that was killed at once left it empty.
    begun = locked.is_file() and locked.read_bytes().startswith(_HOLDER.encode())
    begun = begun or [*output.glob("*")] == [locked]
    if overwrite or not begun:
        for file in written:
            if "tokenizer_digest" not in read_json(file):
                raise ValueError(f"{file}: is not of a corpus; name another --output")
    # Without its shards' manifests a finished corpus would be made anew in its place.
    is_bare = len(written) == 1 and not shards
    if not (begun or written) or (is_bare and not overwrite):
        check_new(output)


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keep two runs from working in one corpus folder.

    Where the file system does not support locks, a warning is printed to stderr.

    Raises:
        ValueError: Another run holds the lock.
    """
    try:
        held = lock(output / _LOCK, "another prepare is at work")
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        _say(f"{output}: this file system has no locks; let no other prepare write here")
        (output / _LOCK).write_text(_HOLDER)
        yield
    else:
        with held:
            yield


def _existing_shards(tasks: Sequence[ShardTask]) -> dict[int, ShardManifest]:
    """Return the manifests of the tasks that an earlier run finished.

    Raises:
        ValueError: The folder has shards that none of the tasks would make, or is a finished corpus
            of fewer inputs, which runs may be reading.
    """
    expected = {task.manifest_file.name for task in tasks}
    folder = tasks[0].corpus / "shards"
    if extra := {file.name for file in folder.glob("shard-*.json")} - expected:
        raise ValueError(
            f"{folder / min(extra)}: left by a prepare of more inputs than the {len(expected)} "
            "named now. Name another --output, or use --overwrite to make the corpus again"
        )
    finished, count = tasks[0].corpus / records.FILE_NAME, len(tasks)
    made = len(records.load_manifest(finished.parent).inputs) if finished.is_file() else count
    if made < count:
        raise ValueError(
            f"{finished.parent}: is a corpus of {made} inputs, and {count} are named now. Name "
            "another --output, or use --overwrite to make the corpus again"
        )
    return {task.index: shard for task in tasks if (shard := existing_manifest(task))}


def _make(tasks: Sequence[ShardTask], engine: str, workers: int) -> dict[int, ShardManifest]:
    """Make shards; returns their manifests. Failures are raised after all other tasks are done."""
    results, failures = dict[int, ShardManifest](), dict[int, Exception]()
    if not tasks:
        return results
    if workers > len(tasks):
        shards = "an input becomes one shard; more and smaller inputs would be faster"
        _say(f"{workers} workers for {len(tasks)} inputs: {shards}")
    input_bytes = sum(input_state(task.input)[0] for task in tasks)
    with (
        closing(ProgressReport("prepare", len(tasks), input_bytes)) as report,
        closing(ENGINES[engine](prepare_shard, tasks, workers, report.update)) as outcomes,
    ):
        for task, outcome in outcomes:
            if isinstance(outcome, Exception):
                failures[task.index] = outcome
                if len(tasks) > 1:  # the others may take hours
                    report.say(f"{task.name} failed: {outcome}")
            else:
                results[task.index] = outcome
                report.finish_part()
    if failures:
        kept = f" ({len(results)} other shards are done and kept)" if results else ""
        first = failures[min(failures)]
        kind = WorkerDied if isinstance(first, WorkerDied) else ValueError
        more = f" ({len(failures)} inputs failed, see above)" if len(failures) > 1 else ""
        raise kind(f"{first}{more}{kept}")
    return results


def merge(shards: Sequence[ShardManifest], tokenizer: Tokenizer, output: Path) -> CorpusManifest:
    """Return the manifest of a corpus.

    Args:
        shards: At least one, in the order of the inputs.
        tokenizer: The vocabulary of the corpus.
        output: The corpus folder with the `.counts` files of the shards.

    Raises:
        ValueError: No document was kept, or there are more subsets than a uint8 can number.
    """
    tally = records.Tally({}, {}, 0, 0)
    for shard in shards:
        tally.add(shard)
    if not tally.kept:
        reasons = tally.rejects_summary() or "the inputs have no lines"
        if others := tally.rejects.get(OTHER_SUBSET):
            reasons += f"; subsets found: {few(sorted(others.by_subset), 30)}"
        raise ValueError(f"{output}: no document kept: {reasons}")
    subsets = sorted({subset for counts in tally.kept.values() for subset in counts})
    if len(subsets) > MAX_SUBSETS:
        raise ValueError(
            f"{len(subsets)} different values of {shards[0].settings.subset_key}; accepted: "
            f"{MAX_SUBSETS}"
        )
    totals = {split: sum(tally.kept.get(split, {}).values(), Count()) for split in SPLITS}
    files = {split: [s.files[split] for s in shards if split in s.files] for split in SPLITS}
    ids = [count_ids([output / f.stem for f in files[s]], tokenizer.vocab_size) for s in SPLITS]
    return CorpusManifest(
        format_version=records.FORMAT_VERSION,
        tokenizer_digest=shards[0].tokenizer_digest,
        vocab_size=tokenizer.vocab_size,
        special_ids={
            name: getattr(tokenizer, f"{name}_id") for name in ("bos", "pad", "eos", "unk", "mask")
        },
        dtype=str(dtype_for(tokenizer.vocab_size)),
        encoders=sorted({shard.encoder for shard in shards}),
        settings=shards[0].settings,
        damages=[shard.damage for shard in shards if shard.damage],
        inputs=[shard.input for shard in shards],
        shards=files,
        subsets=subsets,
        totals=totals,
        **vars(tally),
        length_histogram=length_histogram(np.sum([s.length_counts for s in shards], axis=0)),
        unigram_perplexity=unigram_perplexity(*ids),
    )


def _say(message: str) -> None:
    print(f"prepare: {message}", file=sys.stderr, flush=True)


def _remove(output: Path, *patterns: str) -> None:
    for pattern in patterns:
        for file in output.glob(pattern):
            file.unlink(missing_ok=True)

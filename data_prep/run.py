"""Inputs -> a corpus: plan the shards, have an engine make them, write the manifest."""

import fcntl
import glob
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from data_prep import manifest as records
from data_prep.documents import reader_of
from data_prep.engines import ENGINES
from data_prep.files import PARTIAL_SUFFIX
from data_prep.filters import Tally
from data_prep.indexed import dtype_for
from data_prep.manifest import SPLITS, CorpusManifest, Count, Settings, ShardManifest
from data_prep.progress import ProgressReport
from data_prep.shard import MAX_SUBSETS, ShardTask, standing_manifest
from data_prep.statistics import count_ids, length_histogram, plot_lengths, unigram_perplexity
from data_prep.tokenizer import FILE_NAME as TOKENIZER_FILE
from data_prep.tokenizer import Tokenizer, load

HISTOGRAM_FILE = "lengths.png"
_MADE_BY_US = (
    records.FILE_NAME,
    HISTOGRAM_FILE,
    "shards/shard-*.json",
    *(f"{split}/shard-*.{kind}" for split in SPLITS for kind in ("bin", "idx", "subsets")),
    TOKENIZER_FILE,
)


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files that the glob patterns name, in the order of their names, each once.

    Raises:
        ValueError: A pattern matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns:
        matches = glob.glob(pattern, recursive=True)
        if not matches:
            raise ValueError(f"--input {pattern}: no such file; accepted: files or glob patterns")
        found.update(matches)
    return [Path(name) for name in sorted(found)]


def prepare(
    inputs: Sequence[Path],
    output: Path,
    tokenizer_path: str | Path,
    settings: Settings,
    *,
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
        workers: Processes.
        engine: One of `ENGINES`.
        overwrite: Remove what an earlier prepare left in `output` first.

    Raises:
        ValueError: Bad inputs, a standing corpus of other settings, another prepare at work, or no
            document kept.
        WorkerDied: A worker process was killed.
    """
    if workers < 1:
        raise ValueError(f"--workers {workers}: accepted: 1 or more")
    for path in inputs:
        reader_of(path)
    tokenizer = load(tokenizer_path)
    output.mkdir(parents=True, exist_ok=True)
    with _lock(output):
        _remove_leftovers(output)
        if overwrite:
            _remove_corpus(output)
        digest = tokenizer.digest()
        tasks = [
            ShardTask(index, path, output, settings, digest) for index, path in enumerate(inputs)
        ]
        standing = _standing_shards(tasks)
        if len(standing) == len(tasks) and (output / records.FILE_NAME).is_file():
            return records.load_manifest(output)
        (output / records.FILE_NAME).unlink(missing_ok=True)
        tokenizer.save(output / TOKENIZER_FILE)
        made = _make_shards([t for t in tasks if t.index not in standing], engine, workers)
        shards = standing | made
        corpus = _merge([shards[task.index] for task in tasks], tokenizer, output)
        plot_lengths(corpus.length_histogram, output / HISTOGRAM_FILE)
        records.write_record(output / records.FILE_NAME, corpus)
        return corpus


def _standing_shards(tasks: Sequence[ShardTask]) -> dict[int, ShardManifest]:
    """Shards of an earlier run; refuses those that this run would not make."""
    expected = {task.manifest_file.name for task in tasks}
    folder = tasks[0].corpus / "shards"
    if extra := sorted(
        file.name for file in folder.glob("shard-*.json") if file.name not in expected
    ):
        raise ValueError(
            f"{folder / extra[0]}: left by a prepare of more inputs than the {len(expected)} named "
            "now. Name another --output, or --overwrite to make the corpus anew"
        )
    found = {task.index: standing_manifest(task) for task in tasks}
    return {index: shard for index, shard in found.items() if shard is not None}


def _make_shards(tasks: Sequence[ShardTask], engine: str, workers: int) -> dict[int, ShardManifest]:
    """Make all shards that can be made, then raise for those that cannot."""
    made: dict[int, ShardManifest] = {}
    failures: dict[int, str] = {}
    if not tasks:
        return made
    with ProgressReport(len(tasks), "prepare") as report:
        done = (0, 0)

        def tick(documents: int, text_bytes: int) -> None:
            nonlocal done
            done = documents, text_bytes
            report.update(len(made), *done)

        with closing(ENGINES[engine](tasks, workers, tick)) as outcomes:
            for task, outcome in outcomes:
                if isinstance(outcome, ShardManifest):
                    made[task.index] = outcome
                    report.update(len(made), *done)
                else:
                    failures[task.index] = str(outcome)
                    report.say(f"{task.name} failed: {outcome}")
    if failures:
        kept = f" ({len(made)} other shards are done and kept)" if made else ""
        raise ValueError("; ".join(failures[index] for index in sorted(failures)) + kept)
    return made


def _merge(shards: Sequence[ShardManifest], tokenizer: Tokenizer, output: Path) -> CorpusManifest:
    tally = Tally()
    for shard in shards:
        tally.add(Tally(shard.kept, shard.rejects, shard.cut))
    if not tally.kept:
        reasons = tally.rejects_in_words() or "the inputs hold no line"
        raise ValueError(f"{output}: no document kept: {reasons}")
    totals = {split: Count() for split in SPLITS}
    for split, subsets in tally.kept.items():
        for count in subsets.values():
            totals[split].add(count)
    files = {split: [s.files[split] for s in shards if split in s.files] for split in SPLITS}
    counts = {
        split: count_ids([output / f.stem for f in files[split]], tokenizer.vocab_size)
        for split in SPLITS
    }
    return CorpusManifest(
        format_version=records.FORMAT_VERSION,
        tokenizer_digest=tokenizer.digest(),
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
        subsets=_subset_table(tally),
        totals=totals,
        kept=tally.kept,
        cut=tally.cut,
        rejects=tally.rejects,
        length_histogram=length_histogram(np.sum([s.length_counts for s in shards], axis=0)),
        unigram_perplexity=unigram_perplexity(counts["train"], counts["valid"]),
    )


def _subset_table(tally: Tally) -> list[str]:
    names = sorted({subset for subsets in tally.kept.values() for subset in subsets})
    if len(names) > MAX_SUBSETS:
        raise ValueError(
            f"{len(names)} different values of meta.pile_set_name; accepted: {MAX_SUBSETS}"
        )
    return names


@contextmanager
def _lock(output: Path) -> Iterator[None]:
    """Hold the folder; the system lets go when this process ends, however it ends."""
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{output}: another prepare is at work in this folder; "
                "wait for it or name another --output"
            ) from error
        yield


def _remove_leftovers(output: Path) -> None:
    """Remove what killed runs were writing."""
    for folder in (output, output / "shards", *(output / split for split in SPLITS)):
        for file in folder.glob(f".*{PARTIAL_SUFFIX}"):
            file.unlink()


def _remove_corpus(output: Path) -> None:
    # The manifest goes first: a folder without it is no corpus, whatever else is left.
    for pattern in _MADE_BY_US:
        for file in output.glob(pattern):
            file.unlink()

"""The command `verify`: check a corpus folder against its manifest."""

import argparse
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from data_prep import cache, contents
from data_prep.common.arguments import at_least
from data_prep.common.exit_codes import EXIT_FAILED
from data_prep.corpus import open_shard, subset_numbers, unsigned
from data_prep.indexed import IndexedReader, import_megatron
from data_prep.manifest import (
    CorpusManifest,
    Count,
    ShardFiles,
    ShardManifest,
    Tally,
    load_manifest,
    read_record,
)
from data_prep.progress import Done, ProgressReport
from data_prep.tokenizer import FILE_NAME as TOKENIZER_FILE
from data_prep.tokenizer import load

_CHUNK_SEQUENCES = 1 << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folder", type=Path, metavar="DIR")
    workers = "shards checked at once (default: %(default)s)"
    parser.add_argument("--workers", type=at_least(1), default=1, help=workers)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    found = verify(options.folder, options.workers)
    problems = contents.noted(options.folder, load_manifest(options.folder), found)
    for problem in problems:
        print(f"{options.parser.prog}: {problem}", file=sys.stderr)
    if problems:
        return EXIT_FAILED
    print(f"{options.folder}: no problems found")
    return 0


def verify(folder: Path, workers: int = 1) -> Iterator[str]:
    """Yield a line for each problem found, which names the file.

    Checks the digest of the vocabulary, every checksum, every index against its data and the
    manifest, every id against the vocabulary size, that every document ends with `</s>`, that
    megatron-core reads the same sequences as training does, the counts and totals, and the hashes
    of the kept tables of blocks. It finds damage, not forgery: who can write a file can write its
    hash. Shards are checked in threads, because hashing and numpy release the interpreter lock.

    Args:
        folder: The corpus.
        workers: Number of shards checked at once.

    Raises:
        ValueError: There is no manifest.
    """
    manifest = load_manifest(folder)
    for check in (_check_tokenizer, _check_totals, _check_tally):
        try:
            yield from check(folder, manifest)
        except ValueError as error:
            yield str(error)
    for tables in cache.kept(folder, manifest.digest()):
        yield from cache.differences(tables)
    import_megatron()  # before the threads: it changes the filters of warnings meanwhile
    shards = [files for split in manifest.shards.values() for files in split]
    report, done = ProgressReport("verify", len(shards), sum(s.size_bytes for s in shards)), Done()
    with closing(report), ThreadPoolExecutor(workers) as pool:
        problems = pool.map(partial(_problem, folder, manifest), shards)
        for files, problem in zip(shards, problems, strict=True):
            more = files.documents, files.size_bytes, files.tokens, files.size_bytes
            done = Done(*map(sum, zip(done, more, strict=True)))
            report.finish_part(done)
            if problem:
                yield problem


def _check_tokenizer(folder: Path, manifest: CorpusManifest) -> Iterator[str]:
    tokenizer = load(folder)
    expected = (manifest.tokenizer_digest, manifest.vocab_size)
    if (tokenizer.digest(), tokenizer.vocab_size) != expected:
        yield f"{folder / TOKENIZER_FILE}: is not the vocabulary that the corpus was made with"


def _check_totals(folder: Path, manifest: CorpusManifest) -> Iterator[str]:
    for split, total in manifest.totals.items():
        by_subset = sum(manifest.kept.get(split, {}).values(), Count())
        shards = manifest.shards[split]
        by_shard = (sum(s.documents for s in shards), sum(s.tokens for s in shards))
        if by_subset != total or by_shard != (total.documents, total.tokens):
            yield f"{folder}: the totals of the {split} split are not the sums of its shards"
    every = itertools.chain(*manifest.shards.values())
    if manifest.subsets != sorted({name for files in every for name in files.subsets}):
        yield f"{folder}: 'subsets' of its manifest are not those of its shards"


def _check_tally(folder: Path, manifest: CorpusManifest) -> Iterator[str]:
    """Compare the counts with those of the shards' manifests, where these are still there."""
    tally, files = Tally({}, {}, 0, 0), sorted(folder.glob("shards/shard-*.json"))
    for file in files:
        tally.add(read_record(ShardManifest, file))
    for name, value in vars(tally).items():
        if files and value != getattr(manifest, name):
            yield f"{folder}: {name!r} of its manifest is not the sum of its shards' manifests"


def _problem(folder: Path, manifest: CorpusManifest, files: ShardFiles) -> str | None:
    for name, digest in files.hashes.items():
        if problem := contents.problem_of(folder / name, digest):
            return problem
    try:
        reader = open_shard(folder, files, manifest.dtype)
        subset_numbers(folder, files)
    except ValueError as error:
        return str(error)
    data, ids = f"{folder / files.stem}.bin", reader.ids
    ends = np.append(reader.offsets // ids.itemsize, len(ids))[reader.bounds]
    if (np.diff(ends) < 1).any() or (ids[ends[1:] - 1] != manifest.special_ids["eos"]).any():
        return f"{data}: a document does not end with </s>"
    return _problem_of_ids(folder / files.stem, reader, manifest.vocab_size)


def _problem_of_ids(prefix: Path, reader: IndexedReader, vocab_size: int) -> str | None:
    """Compare every sequence with what megatron-core reads, and every id with the vocabulary."""
    dataset = import_megatron().IndexedDataset(str(prefix), mmap=reader.ids.size > 0)
    if not np.array_equal(dataset.document_indices, reader.bounds):
        return f"{prefix}.idx: megatron-core reads other documents than training does"
    for first in range(0, len(reader.lengths), _CHUNK_SEQUENCES):
        theirs = dataset[first : first + _CHUNK_SEQUENCES]
        end = first + len(theirs)
        sizes = np.fromiter(map(len, theirs), np.int64)
        ids = reader.ids[reader.span(first, end)]
        if not np.array_equal(sizes, reader.lengths[first:end]) or not np.array_equal(
            np.concatenate(theirs), ids
        ):
            return f"{prefix}.bin: megatron-core reads other ids than training does"
        if (top := unsigned(ids).max(initial=0)) >= vocab_size:
            return f"{prefix}.bin: id {top} is outside the vocabulary of {vocab_size} ids"
    return None

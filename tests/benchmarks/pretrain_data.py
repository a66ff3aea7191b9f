"""Measure order and blocks at the Pile's scale, and how long a GPU waits for its data.

    python -m tests.benchmarks.pretrain_data

Prints a table and exits with status 1 if a target is missed. Takes 6 minutes, 4 GB of memory and
200 MB of disk space. Each row is measured in a fresh process.
"""

import argparse
import dataclasses
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from data_prep.common.files import strict_json
from data_prep.corpus import Corpus
from data_prep.indexed import IndexedWriter, dtype_for
from data_prep.manifest import (
    FILE_NAME,
    FORMAT_VERSION,
    CorpusManifest,
    Count,
    LengthHistogram,
    Settings,
    ShardFiles,
    write_record,
)
from pretrain.config.sections import BatchConfig
from pretrain.data.lineage import Lineage
from pretrain.data.prefetch import prefetched
from pretrain.data.sources import SOURCES, BestFitBlocks
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from tests.pretrain.builders import batches_of

BLOCK_TOKENS = 2048
BATCH = 512  # blocks
WORLD_SIZE = 8
MICRO_BATCH = 4
VOCABULARY = 50258
TOKENS_PER_SECOND = 600_000  # of one H200
STEPS = 40
WARM_UP = 5

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table, with or without a target."""

    name: str
    value: float
    unit: str
    at_most: float = math.inf
    at_least: float = 0.0

    @property
    def is_met(self) -> bool:
        return self.at_least <= self.value <= self.at_most

    def __str__(self) -> str:
        line = f"{self.name:76} {self.value:9.2f} {self.unit:12}"
        if self.at_most < math.inf:
            line += f" at most {self.at_most:g}"
        if self.at_least > 0.0:
            line += f" at least {self.at_least:g}"
        return line if self.is_met else f"{line}: MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--documents", type=int, default=200_000_000, help="documents to cut into blocks"
    )
    parser.add_argument("--json", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    rows: list[Row] = []
    for part in (
        lambda folder: in_fresh_process(order, options.documents, 0),
        lambda folder: in_fresh_process(order, options.documents, 100_000),
        lambda folder: in_fresh_process(blocks, "complete", options.documents),
        lambda folder: in_fresh_process(blocks, "best-fit", options.documents),
        lambda folder: in_fresh_process(blocks, "chunked", options.documents),
        lambda folder: in_fresh_process(data_wait, folder),
    ):
        with tempfile.TemporaryDirectory() as folder:
            found = part(Path(folder))
        rows += found
        print(*found, sep="\n", flush=True)
    if options.json:
        options.json.write_text(strict_json([dataclasses.asdict(row) for row in rows], indent=1))
    return 0 if all(row.is_met for row in rows) else 1


def in_fresh_process(part: Callable[..., list[Row]], *arguments: object) -> list[Row]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(part, *arguments).result()


def order(count: int, skipped: int) -> list[Row]:
    """Look up a million blocks in steps of a batch, after three rollbacks with skips."""
    lineage = Lineage.begin(count, 1)
    for seed, share in enumerate((0.2, 0.35, 0.6), start=2):
        place = int(share * count)
        lineage = lineage.rolled_back(place, seed, (place, place + skipped))

    def look_up() -> None:
        for place in range(0, 1_000_000, BATCH):
            lineage.blocks(int(0.75 * count) + place, BATCH)

    _, seconds, megabytes = measured(look_up)
    name = f"order of {count:,} blocks, 3 rollbacks, {3 * skipped:,} skips, 1,000,000 lookups"
    return [
        Row(name, seconds, "s", at_most=20),
        Row(f"{name}: memory", megabytes, "MB", at_most=50),
    ]


def blocks(packing: str, documents: int) -> list[Row]:
    """Cut documents into blocks, given their lengths."""
    lengths = np.concatenate(
        [
            pile_like(min(10_000_000, documents - first), first)
            for first in range(0, documents, 10_000_000)
        ]
    )
    corpus = SimpleNamespace(
        lengths=lengths,
        split="train",
        folder=Path(os.devnull),  # the tables cannot be kept there
        manifest=SimpleNamespace(digest=str),
    )
    source = SOURCES[packing](cast(Corpus, corpus), BLOCK_TOKENS)
    _, seconds, megabytes = measured(lambda: len(source))
    name = f"{packing} blocks of {documents:,} documents"
    return [
        Row(name, seconds, "s", at_most=120),
        Row(f"{name}: memory", megabytes / 1000, "GB"),
        Row(f"{name}: fill", 100 * source.fill, "%", at_least=0 if packing == "complete" else 99),
        Row(f"{name}: share of tokens", 100 * source.share_of_tokens, "%"),
    ]


def data_wait(folder: Path) -> list[Row]:
    """Measure how long a rank waits for data if a step takes as long as on an H200."""
    write_corpus(folder, 200_000)
    blocks = BestFitBlocks(Corpus(folder, "train"), BLOCK_TOKENS)
    objective = MaskedLM(MaskedLMConfig(), VOCABULARY - 1, VOCABULARY - 1)
    batches = batches_of(blocks, objective, BatchConfig(BATCH, MICRO_BATCH))
    step_tokens = BATCH * BLOCK_TOKENS // WORLD_SIZE
    step_seconds = step_tokens / TOKENS_PER_SECOND
    rows = []
    for workers in (0, 1, 2):
        waits = []
        with prefetched(batches, workers) as source:
            for step in range(STEPS):
                started = time.perf_counter()
                source.micro_batches(step, 0, WORLD_SIZE)
                waits.append(time.perf_counter() - started)
                time.sleep(step_seconds)
        # The mean, so that rare stalls count as well.
        wait = statistics.mean(waits[WARM_UP:])
        share = 100 * wait / (wait + step_seconds)
        if not workers:
            speed = step_tokens / statistics.median(waits[WARM_UP:])
            rows.append(Row("batches made by one process", speed / 1e6, "M tokens/s"))
        name = f"waiting for data at {TOKENS_PER_SECOND:,} tokens/s per rank, {workers} workers"
        rows.append(Row(name, share, "% of a step", at_most=2 if workers else math.inf))
    return rows


def pile_like(count: int, seed: int) -> npt.NDArray[np.int32]:
    """Draw document lengths in tokens with a long tail."""
    drawn = np.random.default_rng(seed).lognormal(math.log(353), 1.25, count)
    return np.clip(drawn, 2, 30_000).astype(np.int32)


def write_corpus(folder: Path, documents: int) -> None:
    """Write a corpus folder with random ids."""
    lengths = pile_like(documents, 0)
    lengths = lengths[lengths < BLOCK_TOKENS]
    draw = np.random.default_rng(1)
    (folder / "train").mkdir()
    dtype = dtype_for(VOCABULARY)
    writer = IndexedWriter(folder / "train/shard-00000", VOCABULARY)
    for first in range(0, len(lengths), 10_000):
        part = lengths[first : first + 10_000]
        ids = draw.integers(4, VOCABULARY - 1, int(part.sum()))
        writer.extend(ids, part.tolist(), [1] * len(part))
    writer.close()
    count = Count(len(lengths), int(lengths.sum()), 0)
    files = ShardFiles(
        stem="train/shard-00000",
        documents=count.documents,
        sequences=count.documents,
        tokens=count.tokens,
        size_bytes=count.tokens * dtype.itemsize,
        bin_sha256="",
        idx_sha256="",
        subsets_sha256="",
        counts_sha256="",
        subsets=["random"],
    )
    manifest = CorpusManifest(
        format_version=FORMAT_VERSION,
        tokenizer_digest="",
        vocab_size=VOCABULARY,
        special_ids={},
        dtype=dtype.name,
        encoders=[],
        settings=Settings(),
        damages=[],
        inputs=[],
        shards={"train": [files], "valid": []},
        subsets=["random"],
        totals={"train": count, "valid": Count()},
        kept={"train": {"random": count}, "valid": {}},
        cut=0,
        rejects={},
        length_histogram=LengthHistogram([], [], 0.0, 0.0),
        unigram_perplexity=None,
    )
    write_record(folder / FILE_NAME, manifest)


def measured(work: Callable[[], T]) -> tuple[T, float, float]:
    """Return the result of `work`, its seconds, and its additional peak memory in MB."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = peak_megabytes()
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started, peak_megabytes() - before


def peak_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) / 1000


if __name__ == "__main__":
    sys.exit(main())

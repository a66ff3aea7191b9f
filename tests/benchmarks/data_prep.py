"""Measure the speed ratios that data preparation must reach; see README.md."""

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from data_prep.common.files import strict_json
from tests.benchmarks.figures import Figure

ROOT = Path(__file__).parents[2]
COPIES = 12  # of each input for the comparison of workers, so that start-up is a small part
MAX_TOKENS = 2048  # the published filter
_BATCH = 256


def main() -> int:
    """Measure, print the table, and return 0 if every target is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    shared = Path(os.environ.get("ZEROCLAP_SHARED", "../shared")) / "data"
    parser.add_argument("--inputs", type=Path, default=shared / "pile-like")
    parser.add_argument("--tokenizer", type=Path, default=shared / "gpt2")
    parser.add_argument("--repeats", type=int, default=3, help="number of runs for the medians")
    parser.add_argument("--record", type=Path, help="write the table as JSON")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    inputs = sorted(options.inputs.glob("*.jsonl.zst"))
    if not inputs:
        parser.error(f"--inputs {options.inputs}: no *.jsonl.zst there")
    if options.part:
        print(strict_json(PARTS[options.part](options.tokenizer, inputs)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(inputs, options.tokenizer, options.repeats, Path(folder))
    print(*rows, sep="\n")
    if options.record:
        options.record.write_text(strict_json([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.is_met for row in rows) else 1


def measure(inputs: list[Path], tokenizer: Path, repeats: int, folder: Path) -> list[Figure]:
    """Run every part in turn, `repeats` times, each in a separate process."""
    from data_prep.tokenizer import load

    vocabulary, first = folder / "vocabulary", inputs[0].parent
    load(tokenizer).save(vocabulary / "tokenizer.json")
    tiny, copies = _tiny_input(inputs[0], folder), _copies(inputs, folder)
    parts = {"loop": first, "encode": first, "shards": first, "start": tiny}
    runs = {"prepare": (first, 1), "one worker": (copies, 1), "two workers": (copies, 2)}
    seconds: dict[str, list[float]] = {name: [] for name in (*parts, *runs)}
    peaks: list[float] = []
    for _ in range(repeats):
        for part, where in parts.items():
            words = ["tests.benchmarks.data_prep", "--part", part]
            taken, printed = _run(*words, "--inputs", where, "--tokenizer", vocabulary)
            figures = json.loads(printed)
            seconds[part].append(taken - figures.get("seconds_excluded", 0.0))
            if part == "shards":
                peaks.append(figures["peak_bytes"] / 1e6)
            if part == "encode":
                megabytes = figures["text_bytes"] / 1e6
        for name, (where, workers) in runs.items():
            shutil.rmtree(folder / "corpus", ignore_errors=True)
            words = ["finetune.zeroclap", "prepare", "--input", f"{where}/*.jsonl.zst"]
            words += ["--max-tokens", MAX_TOKENS, "--workers", workers]
            taken, _ = _run(*words, "--tokenizer", vocabulary, "--output", folder / "corpus")
            seconds[name].append(taken)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    share, speed = median["encode"] / median["shards"], COPIES * megabytes / median["one worker"]
    gain = median["one worker"] / median["two workers"]
    return [
        Figure("one worker / a loop of tokenizers", median["loop"] / median["prepare"], "x", 15),
        Figure("two workers / one", gain, "x", 1.85),
        Figure("the pipeline / the encoder alone, texts in memory", 100 * share, "%", 85),
        Figure("peak memory of a worker", statistics.median(peaks), "MB", at_most=400),
        Figure("a worker's start to its first shard", median["start"], "s", at_most=1),
        Figure(f"one worker, the inputs {COPIES} times", speed, "MB/s"),
        *(
            Figure(name, megabytes / median[name], "MB/s")
            for name in ("loop", "prepare", "shards", "encode")
        ),
    ]


def _run(*words: object) -> tuple[float, str]:
    """Return the seconds and the output of a module's process."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *map(str, words)]
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return time.perf_counter() - start, done.stdout


def _tiny_input(source: Path, folder: Path) -> Path:
    """Write a folder with one input of ten documents."""
    import zstandard

    from data_prep.compressed import open_stream

    with open_stream(source) as stream:
        lines = b"".join(line for line, _ in zip(stream, range(10), strict=False))
    (folder / "tiny").mkdir()
    (folder / "tiny" / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    return folder / "tiny"


def _copies(inputs: list[Path], folder: Path) -> Path:
    (folder / "copies").mkdir()
    for number in range(COPIES):
        for path in inputs:
            (folder / "copies" / f"{number}-{path.name}").symlink_to(path.resolve())
    return folder / "copies"


def _texts(inputs: list[Path]) -> Iterator[str]:
    from data_prep.documents import Document, read_documents

    for path in inputs:
        for record in read_documents(path):
            if isinstance(record, Document):
                yield record.text


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    return iter(lambda: [*itertools.islice(texts, _BATCH)], [])


def loop(tokenizer: Path, inputs: list[Path]) -> dict[str, float]:
    """Encode with a plain loop over the tokenizers library."""
    import numpy as np
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    backend.encode_special_tokens = True
    for batch in _batches(_texts(inputs)):
        for encoding in backend.encode_batch_fast(batch, add_special_tokens=False):
            np.array(encoding.ids, dtype=np.uint16)
    return {}


def encode(tokenizer: Path, inputs: list[Path]) -> dict[str, float]:
    """Encode texts in memory, including imports and loading the vocabulary.

    The time to read and measure the texts is excluded.
    """
    start = time.perf_counter()
    batches = list(_batches(_texts(inputs)))
    text_bytes = sum(len(text.encode()) for batch in batches for text in batch)
    seconds_excluded = time.perf_counter() - start

    import numpy as np

    from data_prep.encoders import Encoder
    from data_prep.tokenizer import load

    encoder = Encoder(load(tokenizer))
    for batch in batches:
        np.concatenate(encoder.encode(batch)).astype(np.uint16)
    return {"seconds_excluded": seconds_excluded, "text_bytes": text_bytes}


def shards(tokenizer: Path, inputs: list[Path]) -> dict[str, float]:
    """Do the complete work of a worker, from reading to writing the shard's manifest."""
    from data_prep.manifest import Settings, ShardTask
    from data_prep.shard import prepare_shard

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(tokenizer / "tokenizer.json", folder)
        for index, path in enumerate(inputs):
            prepare_shard(ShardTask(index, path, Path(folder), Settings(MAX_TOKENS), "measured"))
        start = time.perf_counter()
    return {
        "seconds_excluded": time.perf_counter() - start,  # to remove the files
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


PARTS: dict[str, Callable[[Path, list[Path]], dict[str, float]]] = {
    "loop": loop,
    "encode": encode,
    "shards": shards,
    "start": shards,
}

if __name__ == "__main__":
    sys.exit(main())

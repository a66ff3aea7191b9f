"""The studies medium-rate and published-medium in short visits to a GPU.

    python -m tests.benchmarks.medium work --text texts --glue GLUE --tokenizer gpt2 --minutes 9

`texts` has simple-wikipedia, gutenberg and valid, each as NAME.jsonl.zst or in pieces
NAME.jsonl.zst.00, .01, ..., which `split -d -b 30M` makes. The command prepares the corpus, chooses
the learning rate, and trains, evaluates and fine-tunes one arm after the other until the minutes
are over. Called again with the same folder, it goes on. At its end work/travels.tar.gz has what a
next visit, which finds an empty machine, needs: the records, metrics and scores of the arms that
are finished, and the report, but no weights. `--carried travels.tar.gz` goes on from it there, with
the same words for the folder and for GLUE, which belong to the settings of an arm. An arm that is
not finished at the end of a visit begins again in the next one.

`--toy` rehearses everything at the size `tiny` on a CPU, in a quarter of an hour.
"""

import argparse
import csv
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep.common import children
from finetune.studies import job

TEXTS, VALID = ("simple-wikipedia", "gutenberg"), "valid"
RATES, STUDY = "medium-rate", "published-medium"
PACK = "travels.tar.gz"
TRAVELS = (
    *("job.json", "*.done", "evaluation*.json", "scores/*/*/result.json", "scores/*/*/run.json"),
    *("run/*.jsonl", "run/*.yaml", "run/recipes/*.yaml", "run/environment.json"),
)
"""What travels of a finished run."""


def join(texts: Path) -> None:
    """Make each text whole that lies there in pieces."""
    for first in sorted(texts.glob("*.zst.00")):
        whole = first.with_suffix("")
        if not whole.exists():
            with whole.with_suffix(".part").open("wb") as joined:
                for piece in sorted(texts.glob(f"{whole.name}.[0-9]*")):
                    joined.write(piece.read_bytes())
            whole.with_suffix(".part").rename(whole)


def prepare(work: Path, texts: Path, tokenizer: str, workers: int) -> None:
    """Make the corpus, if it is not complete; an interrupted preparation goes on."""
    join(texts)
    words = ["prepare", "--input", *(str(texts / f"{name}.jsonl.zst") for name in TEXTS)]
    words += ["--valid-input", str(texts / f"{VALID}.jsonl.zst"), "--tokenizer", tokenizer]
    words += ["--output", str(work / "corpus"), "--workers", str(workers)]
    subprocess.run([sys.executable, "-m", "finetune.zeroclap", *words], check=True)


def study(name: str, work: Path, words: Sequence[str], end: float) -> bool:
    """Go on with a study until it ends or the time is over; return whether it is finished."""
    command = ["finetune.zeroclap", "study", name, "--output", str(work / name)]
    process = children.start([*command, *words, f"data.corpus={work / 'corpus'}"])
    try:
        return process.wait(max(0.0, end - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # runs save and end, and the report is written
        process.wait()
        return False


def best_rate(work: Path) -> float:
    """Return the learning rate whose arm the report of the rates has kept."""
    with (work / RATES / "report.csv").open(encoding="utf-8") as file:
        (arm,) = {row["arm"] for row in csv.DictReader(file) if row["part"] == "pretraining"}
    return float(arm)


def travelling(work: Path) -> Iterator[Path]:
    """Yield the files that travel: of both studies, and of their finished runs."""
    for name in (RATES, STUDY):
        yield from (work / name).glob("study.json")
        yield from (work / name).glob("report.*")
        yield from (work / name).glob("*.png")
        for described in sorted((work / name).glob(f"*/{job.JOB}")):
            run = described.parent
            if not job.stages_left(run):
                for pattern in TRAVELS:
                    yield from run.glob(pattern)


def pack(work: Path) -> Path:
    """Pack what travels, under its names in the folder."""
    part = work / f"{PACK}.part"
    with tarfile.open(part, "w:gz") as packed:
        for path in travelling(work):
            packed.add(path, path.relative_to(work))
    return part.rename(work / PACK)


def unpack(carried: Path, work: Path) -> None:
    """Put what an earlier visit has packed in its place."""
    with tarfile.open(carried) as packed:
        # Python before 3.11.4 has no filters and ignores this.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(work)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="the folder of corpus and studies")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--glue", required=True)
    parser.add_argument("--tokenizer", required=True, help="as for prepare")
    parser.add_argument("--minutes", type=float, required=True, help="after which runs are stopped")
    parser.add_argument("--workers", type=int, default=8, help="of the preparation")
    parser.add_argument("--carried", type=Path, help="what an earlier visit has packed")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--glue-jobs", default="1", help="fine-tunings at once, as for study")
    options = parser.parse_args(arguments)
    work, end = options.work, time.monotonic() + 60 * options.minutes
    # A shell that starts this in the background has it ignored, and so would the studies.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    work.mkdir(parents=True, exist_ok=True)
    if options.carried and not (work / RATES).exists():
        unpack(options.carried, work)
    prepare(work, options.text, options.tokenizer, options.workers)
    toy = ["--toy"] * options.toy
    try:
        if not study(RATES, work, toy, end):
            return 1
        rate = best_rate(work)
        print(f"learning rate: {rate:g}", flush=True)
        words = [*toy, "--data", options.glue, "--glue-jobs", options.glue_jobs]
        words += [f"optimizer.learning_rate={rate}", f"schedule.minimum_learning_rate={rate / 10}"]
        return 0 if study(STUDY, work, words, end) else 1
    finally:
        packed = pack(work)
        runs = [path.parent for path in (work / STUDY).glob(f"*/{job.JOB}")]
        done = sum(not job.stages_left(run) for run in runs)
        print(f"{packed}: {packed.stat().st_size / 1e6:.1f} MB, {done} of {len(runs)} arms")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

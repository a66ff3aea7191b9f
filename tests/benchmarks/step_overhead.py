"""Benchmark of a training step beside its arithmetic: what the host does, and what it waits for.

    python -m tests.benchmarks.step_overhead

Trains a model that is so small that little but overhead is left, through `pretrain.train`, on one
rank and on two with gloo, and reports for each a median step, the part of it outside of forward,
backward and optimizer, and the blocking collectives outside of DeepSpeed's. A second, larger model
shows how long training stands still at a checkpoint: the time between the updates on both sides
of it, less that between other updates. Takes two minutes.
"""

import argparse
import contextlib
import io
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks import ranks as processes

RECIPE = """
folder: "{folder}"
data: {{corpus: "{corpus}", sequence_length: 64}}
model: {{variant: baseline, size: tiny, overrides: {overrides}}}
batch: {{global_batch_size: 4, micro_batch_size: 2}}
schedule: {{warmup_steps: 10}}
training: {{steps: {steps}, deepspeed: zero1_fp32, data_workers: 0, evaluation_blocks: 2,
  evaluation_interval: 1000000, checkpoint_interval: {interval}, checkpoints_kept: 21}}
"""
TINY = "{hidden_size: 16, num_layers: 1, num_heads: 1, intermediate_size: 16}"
LARGER = "{hidden_size: 512, num_layers: 4, num_heads: 8, intermediate_size: 2048}"
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_object", "barrier", "all_gather", "reduce")
INTERVAL = 8
"""Updates of the larger model between checkpoints."""
WARM_UP = 20
"""Updates that do not count."""


class Update(NamedTuple):
    """One update of rank 0."""

    end: float
    """On the clock, when the optimizer was done."""
    arithmetic: float
    """Seconds of forward, backward and optimizer, with DeepSpeed's own collectives."""
    host: float
    """Seconds of the main thread's CPU time outside of these, since the update before."""
    collectives: int
    """Since the update before, outside of these."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="updates of the tiny model")
    parser.add_argument("--checkpoints", type=int, default=4, help="of the larger model")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe")
    options = parser.parse_args()
    processes.prepare()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = prepared(folder)
        for ranks in options.ranks:
            model = TINY, options.steps, 10**6
            print(f"{ranks} ranks: {overhead(trained(folder, corpus, ranks, *model, options.set))}")
        for ranks in options.ranks if options.checkpoints else ():
            model = LARGER, (options.checkpoints + 1) * INTERVAL, INTERVAL
            print(f"{ranks} ranks: {pauses(trained(folder, corpus, ranks, *model, options.set))}")


def gaps(updates: list[Update]) -> list[float]:
    """Seconds from each update to the next one."""
    return [after.end - before.end for before, after in itertools.pairwise(updates)]


def overhead(updates: list[Update]) -> str:
    """What a step costs beside its arithmetic."""
    counted = updates[WARM_UP:]
    seconds = gaps(counted)
    others = [gap - after.arithmetic for gap, after in zip(seconds, counted[1:], strict=True)]
    return (
        f"{1e3 * statistics.median(seconds):.2f} ms a step, {1e3 * statistics.median(others):.2f} "
        "ms of it outside of the arithmetic, with "
        f"{1e3 * statistics.median(u.host for u in counted):.2f} ms of CPU time; collectives in a "
        f"step: {dict(Counter(u.collectives for u in counted).most_common(3))}"
    )


def pauses(updates: list[Update]) -> str:
    """Seconds by which the update after each checkpoint is later than other updates."""
    seconds = gaps(updates)
    usual = statistics.median(seconds)
    found = [seconds[step - 1] - usual for step in range(INTERVAL, len(updates), INTERVAL)]
    return (
        f"training stands still for {statistics.median(found):.2f} s at a checkpoint "
        f"({', '.join(f'{each:.2f}' for each in found)}; {usual:.2f} s between other updates); "
        f"{updates[-1].end - updates[0].end:.1f} s from the first update to the last"
    )


def prepared(folder: Path) -> Path:
    """Prepare a small corpus of Python's help topics."""
    from pydoc_data.topics import topics

    from data_prep.__main__ import main as data_prep

    raw, vocabulary, corpus = folder / "raw.jsonl", folder / "vocabulary", folder / "corpus"
    text = " ".join(" ".join(topics.values()).split())
    lines = [text[place : place + 60] for place in range(0, 200_000, 60)]
    raw.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    train = ["train-tokenizer", "--input", str(raw), "--characters", "--output", str(vocabulary)]
    words = ["prepare", "--input", str(raw), "--tokenizer", str(vocabulary)]
    words += ["--output", str(corpus), "--max-tokens", "64", "--valid-fraction", "0.1"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert data_prep(train) == 0
        assert data_prep(words) == 0
    return corpus


def trained(
    folder: Path,
    corpus: Path,
    ranks: int,
    overrides: str,
    steps: int,
    interval: int,
    settings: list[str],
) -> list[Update]:
    """Train on so many ranks; returns the updates of rank 0."""
    run = Path(tempfile.mkdtemp(dir=folder))
    recipe = run.with_suffix(".yaml")
    recipe.write_text(
        RECIPE.format(
            folder=run, corpus=corpus, overrides=overrides, steps=steps, interval=interval
        )
    )
    updates: list[Update] = processes.run(ranks, train, [str(recipe), *settings])
    return updates


def train(words: list[str]) -> list[Update]:
    """Train on this rank; returns its updates."""
    import torch.distributed
    from deepspeed import DeepSpeedEngine

    from pretrain.train import __main__ as entry

    updates: list[Update] = []
    seconds, collectives, depth = 0.0, 0, 0
    resumed, host = time.thread_time(), 0.0

    def timed(name: str) -> None:
        original = getattr(DeepSpeedEngine, name)

        def call(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            nonlocal seconds, collectives, depth, resumed, host
            depth += 1
            host += time.thread_time() - resumed
            started = time.perf_counter()
            try:
                return original(*arguments, **keywords)
            finally:
                depth -= 1
                seconds += time.perf_counter() - started
                if name == "step":
                    updates.append(Update(time.perf_counter(), seconds, host, collectives))
                    seconds, host, collectives = 0.0, 0.0, 0
                resumed = time.thread_time()

        setattr(DeepSpeedEngine, name, call)

    def counted(name: str) -> None:
        original = getattr(torch.distributed, name)

        def call(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            nonlocal collectives, depth
            collectives += not depth
            depth += 1  # all_gather_object makes calls of its own
            try:
                return original(*arguments, **keywords)
            finally:
                depth -= 1

        setattr(torch.distributed, name, call)

    for name in ("forward", "backward", "step"):
        timed(name)
    for name in COLLECTIVES:
        counted(name)
    assert entry.main(words) == 0
    return updates


if __name__ == "__main__":
    main()

"""Optimizers and the modern variant: the masked loss after equal tokens, and tokens to equal loss.

    python -m tests.benchmarks.optimizers --input wikitext:wiki.train.tokens \
        --output runs/optimizers [--seeds 1,2,3] [--steps 300] [KEY=VALUE ...]

Prepares a corpus with a vocabulary of its own, and trains a small model (`SETTINGS`) from the
recipe `small` with each optimizer, as a baseline and as `modern`, on one core. The learning rate of
each arm is searched with the first seed by factors of two, up and down from 4e-3 as long as the
loss falls; the other seeds take the best. Prints a table: losses as mean and standard deviation
over the seeds, and the share of the tokens after which the loss is that of the baseline with AdamW
at its end. The learning rate has not come down at that point, so that this share is too high,
if anything. Trainings that are finished are not repeated.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

from pretrain.run import metrics

SETTINGS = (
    "model.overrides={hidden_size: 64, num_heads: 2, num_layers: 2, intermediate_size: 256, "
    "max_positions: 64, dropout: 0.0, attention_dropout: 0.0}",
    *("data.sequence_length=64", "batch.global_batch_size=16", "batch.micro_batch_size=16"),
    *("schedule.warmup_steps=40", "schedule.name=linear", "schedule.minimum_learning_rate=0.0"),
    *("training.evaluation_interval=30", "training.evaluation_blocks=128"),
    *("training.checkpoint_interval=100", "optimizer.weight_decay_on=matrices"),
)
"""What differs from the recipe in all arms. Two layers of width 64, 1,024 tokens a step."""
MODERN = (
    "model.variant=modern",
    "model.overrides.local_window=32",
    "model.overrides.global_every=2",
    "model.overrides.intermediate_size=170",
)
"""As many parameters as the baseline: GEGLU has three matrices."""
VARIANTS = {"baseline": ("model.variant=baseline",), "modern": MODERN}
OPTIMIZERS = {
    "adamw": ("optimizer.name=adamw",),
    "stable-adamw": ("optimizer.name=stable-adamw", "optimizer.gradient_clipping=0"),
    "muon": ("optimizer.name=muon",),
}
Arm = tuple[str, str]
ARMS: tuple[Arm, ...] = (
    *(("baseline", "adamw"), ("baseline", "stable-adamw"), ("baseline", "muon")),
    *(("modern", "adamw"), ("modern", "muon")),
)
FIRST_RATE = 4e-3
Curve = list[tuple[int, float]]
"""(step, validation loss), ascending."""


def prepare(text: str, folder: Path, vocab_size: int) -> Path:
    """Train a vocabulary and prepare the text; returns the corpus."""
    result = folder / "corpus"
    if not (result / "manifest.json").is_file():
        vocabulary = str(folder / "vocabulary")
        size = ("--vocab-size", str(vocab_size))
        run("data_prep", "train-tokenizer", "--input", text, *size, "--output", vocabulary)
        words = ("--tokenizer", vocabulary, "--valid-fraction", "0.03", "--output", str(result))
        run("data_prep", "prepare", "--input", text, *words)
    return result


def run(*words: str) -> None:
    """Run a command of this project; exits with its message if it fails."""
    if subprocess.run([sys.executable, "-m", *words], check=False).returncode:
        sys.exit(f"{' '.join(words)} failed")


def train(arm: Arm, rate: float, seed: int, options: argparse.Namespace, corpus: Path) -> Curve:
    """Train one model in a fork, which has torch and DeepSpeed imported; returns its losses.

    A run that spikes, after which a supervisor would go back, has no losses.
    """
    variant, optimizer = arm
    folder = options.output / f"{variant}-{optimizer}-{rate:g}-{seed}"
    if not (folder / "finished").is_file():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = (*SETTINGS, *VARIANTS[variant], *OPTIMIZERS[optimizer], *options.overrides)
        words += (f"optimizer.learning_rate={rate}", f"training.seed={seed}")
        words += (f"training.steps={options.steps}", f"data.corpus={corpus}", f"folder={folder}")
        pid = os.fork()
        if pid == 0:
            _be_rank(("small", *words), port, folder.parent / f"{folder.name}.log")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(f"{folder.name}: exit code {code}", flush=True)
        (folder / "finished").write_text(str(code))
    if (folder / "finished").read_text() != "0":
        return []
    lines = metrics.surviving(metrics.read(folder / metrics.VALIDATION))
    return [(line["step"], line["loss"]) for line in lines]


def _be_rank(words: tuple[str, ...], port: int, log: Path) -> None:
    code = 1
    try:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            from pretrain.train import main as train_main

            code = train_main(words)
    finally:
        os._exit(code)


def search(arm: Arm, seed: int, options: argparse.Namespace, corpus: Path) -> dict[float, Curve]:
    """Train with rates by factors of two, as long as the last loss falls; returns all of them."""
    found: dict[float, Curve] = {}

    def loss(rate: float) -> float:
        if rate not in found:
            found[rate] = train(arm, rate, seed, options, corpus)
        return found[rate][-1][1] if found[rate] else float("inf")

    best = FIRST_RATE
    for factor in (2.0, 0.5):
        while loss(best * factor) < loss(best):
            best *= factor
    return found


def share_to(curve: Curve, target: float) -> float:
    """Share of the run after which the loss is the target, by interpolation; inf if never."""
    last = curve[-1][0]
    before = curve[0]
    for point in curve:
        if point[1] <= target:
            (x, y), (to_x, to_y) = before, point
            between = x + (to_x - x) * (y - target) / (y - to_y) if y > to_y else to_x
            return between / last
        before = point
    return float("inf")


def mean_and_deviation(values: list[float], digits: int) -> str:
    """Mean and standard deviation; of one value, the value."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def main() -> None:
    """Train every arm and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True, help="as for data_prep prepare")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--seeds", default="1,2,3", help="such as 1,2,3")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    options = parser.parse_intermixed_args()
    first, *others = map(int, options.seeds.split(","))
    corpus = prepare(options.input, options.output, options.vocab_size)
    import deepspeed.ops.adam  # noqa: F401 - once, before the forks
    import torch

    torch.set_num_threads(1)
    curves: dict[Arm, list[Curve]] = {}
    rates: dict[Arm, float] = {}
    for arm in ARMS:
        found = {
            rate: curve for rate, curve in search(arm, first, options, corpus).items() if curve
        }
        rates[arm] = min(found, key=lambda rate: found[rate][-1][1])
        curves[arm] = [found[rates[arm]]]
        tried = ", ".join(f"{rate:g}: {curve[-1][1]:.3f}" for rate, curve in sorted(found.items()))
        print(f"{' '.join(arm)}: {tried}", flush=True)
    for seed in others:
        for arm in ARMS:
            curves[arm].append(train(arm, rates[arm], seed, options, corpus))
    print(table(curves, rates))


def table(curves: dict[Arm, list[Curve]], rates: dict[Arm, float]) -> str:
    """Markdown: a row for each arm."""
    lines = ["| variant | optimizer | rate | masked loss | tokens to AdamW's loss (%) |"]
    lines.append("|---" * 5 + "|")
    targets = [curve[-1][1] for curve in curves["baseline", "adamw"]]
    for arm, found in curves.items():
        losses = [curve[-1][1] for curve in found]
        pairs = zip(found, targets, strict=True)
        shares = [100 * share_to(curve, target) for curve, target in pairs]
        cells = (*arm, f"{rates[arm]:g}", mean_and_deviation(losses, 3))
        reached = (
            mean_and_deviation(shares, 0) if max(shares) < float("inf") else "not with every seed"
        )
        lines.append(f"| {' | '.join(cells)} | {reached} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

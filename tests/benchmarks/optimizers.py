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
import sys
from pathlib import Path

from data_prep.common.exit_codes import EXIT_DONE, EXIT_SPIKE
from pretrain.records import metrics
from tests.benchmarks import ranks
from tests.benchmarks.trainings import arguments, mean_and_deviation, run

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


def train(arm: Arm, rate: float, seed: int, options: argparse.Namespace, corpus: Path) -> Curve:
    """Train one model on one rank; returns its losses.

    A run that spikes, after which a supervisor would go back, has no losses.
    """
    variant, optimizer = arm
    folder = options.output / f"{variant}-{optimizer}-{rate:g}-{seed}"
    if not (folder / "finished").is_file():
        words = (*SETTINGS, *VARIANTS[variant], *OPTIMIZERS[optimizer], *options.overrides)
        words += (f"optimizer.learning_rate={rate}", f"training.seed={seed}")
        words += (f"training.steps={options.steps}", f"data.corpus={corpus}", f"folder={folder}")
        code = ranks.run(1, _train, ("small", *words))
        print(f"{folder.name}: exit code {code}", flush=True)
        if code not in (EXIT_DONE, EXIT_SPIKE):
            sys.exit(code)
        (folder / "finished").write_text(str(code))
    if (folder / "finished").read_text() != "0":
        return []
    lines = metrics.surviving(metrics.read_metrics(folder / metrics.VALIDATION))
    return [(line["step"], line["loss"]) for line in lines]


def _train(words: tuple[str, ...]) -> int:
    from pretrain.train.__main__ import main as train_main

    return train_main(words)


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


def main() -> None:
    """Train every arm and print the table."""
    parser = arguments(__doc__.splitlines()[0], steps=300, vocab_size=512)
    parser.add_argument("--input", required=True, help="as for data_prep prepare")
    options = parser.parse_intermixed_args()
    first, *others = map(int, options.seeds.split(","))
    corpus = prepare(options.input, options.output, options.vocab_size)
    ranks.prepare()
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

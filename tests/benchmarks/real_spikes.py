"""Real spikes: the rollback ladder and the guards, compared with neither and with a manual restart.

    python -m tests.benchmarks.real_spikes --output DIR [--recipes poisoned,...] [--arms ...]
        [--seeds 1,2,3]

Small models that diverge (`pretrain/recipes/unstable-*.yaml`, `poisoned.yaml`), each trained
through the supervisor and the deepspeed launcher

- with the ladder, as in the recipe;
- with the detector disabled (let it run);
- by hand, as in the published study: its baseline-large spiked between 24,000 and 24,500 updates
  and was started again from 20,000 with seed 2, without supervision afterwards. Here: stop at the
  spike, go back from its onset by a sixth of the steps before it, use another seed, and disable the
  detector;
- with each guard (`optimizer.guard`), the detector disabled;
- with each guard and the ladder;

and for comparison an uneventful run: the same model, data and seed with a lower learning rate.
Prints the final validation losses and draws `real_spikes.png`. One run takes a minute on two idle
cores; runs that are finished are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.common.files import strict_json
from data_prep.common.pictures import GREY, legend_below, picture
from pretrain.records import ledger, metrics
from pretrain.records.curves import smoothed

RECIPES = ("unstable-learning-rate", "unstable-beta2", "poisoned")
SILENT = [
    "spike.deviations=1e9",
    "spike.gross_nats=1e9",
    "spike.validation_nats=1e9",
]
NO_ROLLBACK = ["spike.max_rollbacks=0"]
UNEVENTFUL = ["optimizer.learning_rate=5e-3"]
GUARDS = ("skip-step", "zclip")
ARMS: dict[str, list[str]] = {
    "ladder": [],
    "let it run": SILENT,
    "by hand": [],
    **{guard: [*SILENT, f"optimizer.guard={guard}"] for guard in GUARDS},
    **{f"{guard} and ladder": [f"optimizer.guard={guard}"] for guard in GUARDS},
}
"""What each way of training changes in a recipe."""
UNEVENTFUL_RUN = "uneventful"


class Run(NamedTuple):
    """One run of the comparison; `recipe` is empty for an uneventful one."""

    recipe: str
    arm: str
    seed: int

    def folder(self, output: Path) -> Path:
        """Its folder."""
        name = " ".join([self.recipe or UNEVENTFUL_RUN, self.arm, str(self.seed)])
        return output / "-".join(name.split())


def run(*arguments: str) -> int:
    """Run a command of this project; returns its exit code."""
    print("$ python -m", *arguments, flush=True)
    return subprocess.run([sys.executable, "-m", *arguments], check=False).returncode


def corpus(output: Path) -> Path:
    """Prepare the text and vocabulary of the demo; returns the folder."""
    folder = output / "corpus"
    if (folder / "manifest.json").is_file():
        return folder
    texts = f"{output}/text/*.jsonl.zst"
    vocabulary = f"{output}/vocabulary"
    commands = (
        ["data_prep", "sample", "--output", f"{output}/text"],
        ["data_prep", "train-tokenizer", "--input", texts, "--vocab-size", "4096"]
        + ["--output", vocabulary],
        ["data_prep", "prepare", "--input", texts, "--output", str(folder)]
        + ["--tokenizer", vocabulary, "--max-tokens", "128", "--long", "split"]
        + ["--valid-fraction", "0.05", "--workers", "2"],
    )
    for command in commands:
        if run(*command):
            sys.exit(f"{' '.join(command)} failed")
    return folder


def is_finished(folder: Path) -> bool:
    """Whether a run has reached its last step."""
    return any(r["kind"] == "done" for r in ledger.read_ledger(folder / ledger.FILE_NAME))


def supervise(recipe: str, folder: Path, *overrides: str) -> int:
    """Train a run to its end, unless it is finished."""
    if is_finished(folder):
        return 0
    return run("pretrain", "supervise", recipe, f"folder={folder}", *overrides)


def train(chosen: Run, folder: Path, *overrides: str) -> None:
    """Train one run of the comparison to its end."""
    settings = [*overrides, f"training.seed={chosen.seed}"]
    if not chosen.recipe:
        supervise("unstable-learning-rate", folder, *settings, *UNEVENTFUL)
    elif chosen.arm == "by hand":
        by_hand(chosen, folder, *settings)
    else:
        supervise(chosen.recipe, folder, *settings, *ARMS[chosen.arm])


def by_hand(chosen: Run, folder: Path, *settings: str) -> None:
    """Stop at the first spike, and continue from well before its onset with another seed."""
    path = folder / ledger.FILE_NAME
    if not any(record["kind"] == "rollback" for record in ledger.read_ledger(path)):
        supervise(chosen.recipe, folder, *settings, *NO_ROLLBACK, "training.checkpoints_kept=50")
        if is_finished(folder):
            return
        state = ledger.run_state(ledger.read_ledger(path), 1)
        onset = state.spikes[-1]["onset"]
        target = max(step for step in (0, *state.checkpoints) if step <= onset * 5 / 6)
        ledger.append(
            path,
            "rollback",
            step=target,
            seed=chosen.seed + 1,
            skip=None,
            rung=1,
            onset=onset,
            learning_rate_factor=1.0,
            learning_rate_steps=0,
        )
    supervise(chosen.recipe, folder, *settings, *SILENT)


def outcome(folder: Path) -> dict[str, Any]:
    """The outcome of a run."""
    state = ledger.run_state(ledger.read_ledger(folder / ledger.FILE_NAME), 1)
    lines = metrics.read_metrics(folder / metrics.METRICS)
    validation = metrics.surviving(metrics.read_metrics(folder / metrics.VALIDATION))
    return {
        "finished": is_finished(folder),
        "spikes": [(spike["channel"], spike["onset"], spike["step"]) for spike in state.spikes],
        "rollbacks": [(r["step"], r["seed"], r["rung"]) for r in state.rollbacks],
        "steps_done": len(lines),
        "best_validation_loss": min(line["loss"] for line in validation),
        "final_validation_loss": validation[-1]["loss"] if is_finished(folder) else None,
        **metrics.guarded(map(metrics.guard_factor, lines)),
    }


def table(outcomes: dict[Run, dict[str, Any]]) -> str:
    """The figures as Markdown: of each way of training, the mean over its seeds, and each seed."""
    rows = [
        "| recipe | with | validation loss, mean (each seed) | above uneventful | steps done | "
        "rollbacks | updates left out; clipped |",
        "|---|---|---|---|---|---|---|",
    ]
    stable = {chosen.seed: found for chosen, found in outcomes.items() if not chosen.recipe}
    for (recipe, arm), group in itertools.groupby(outcomes, key=lambda chosen: chosen[:2]):
        runs = list(group)
        found = [outcomes[chosen] for chosen in runs]
        losses = [f["final_validation_loss"] for f in found]
        done = [loss for loss in losses if loss is not None]
        above = [
            loss - stable[chosen.seed]["final_validation_loss"]
            for chosen, loss in zip(runs, losses, strict=True)
            if loss is not None and chosen.seed in stable
        ]
        each = ", ".join("gave up" if loss is None else f"{loss:.3f}" for loss in losses)
        rows.append(
            f"| {recipe or UNEVENTFUL_RUN} | {arm} | {_mean(done, '.3f')} ({each}) | "
            f"{_mean(above, '+.3f')} | {_mean([f['steps_done'] for f in found], '.0f')} | "
            f"{', '.join(str(len(f['rollbacks'])) for f in found)} | "
            f"{_mean([f['updates_left_out'] for f in found], '.0f')}; "
            f"{_mean([f['updates_clipped'] for f in found], '.0f')} |"
        )
    return "\n".join(rows)


def _mean(values: Sequence[float], form: str) -> str:
    return format(statistics.fmean(values), form) if values else "-"


def draw(output: Path, folders: dict[Run, Path]) -> Path:
    """Draw the surviving losses of the first seed's runs; returns the path of the figure."""
    recipes = sorted({chosen.recipe for chosen in folders if chosen.recipe})
    first_seed = min(chosen.seed for chosen in folders)
    path = output / "real_spikes.png"
    with picture(path, 9, 3 * len(recipes)) as figure:
        grid = figure.subplots(len(recipes), sharex=True, squeeze=False)[:, 0]
        for recipe, axes in zip(recipes, grid, strict=True):
            for chosen, folder in folders.items():
                if chosen.recipe not in (recipe, "") or chosen.seed != first_seed:
                    continue
                kept = metrics.surviving(metrics.read_metrics(folder / metrics.METRICS))
                name, color = chosen.arm or UNEVENTFUL_RUN, None if chosen.recipe else GREY
                losses = smoothed([metrics.loss_of(line) for line in kept], 11)
                axes.plot([line["step"] for line in kept], losses, color=color, label=name)
            axes.set(title=recipe, ylabel="nats per masked token")
        grid[-1].set_xlabel("step (surviving steps; mean of eleven)")
        legend_below(figure)
    return path


def main() -> None:
    """Run every arm and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    data = corpus(options.output)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    ways = [("", ""), *itertools.product(options.recipes.split(","), options.arms.split(","))]
    folders = {
        chosen: chosen.folder(options.output)
        for chosen in (Run(recipe, arm, seed) for recipe, arm in ways for seed in seeds)
    }
    for chosen, folder in folders.items():
        processes = f"supervision.processes_per_node={options.processes}"
        train(chosen, folder, f"data.corpus={data}", processes)
    outcomes = {chosen: outcome(folder) for chosen, folder in folders.items()}
    named = [chosen._asdict() | found for chosen, found in outcomes.items()]
    (options.output / "real_spikes.json").write_text(strict_json(named, indent=1) + "\n")
    print(table(outcomes))
    print(draw(options.output, folders))


if __name__ == "__main__":
    main()

"""Real spikes: the rollback ladder, compared with no rollback and with a rollback by hand.

    python -m tests.benchmarks.real_spikes --output DIR [--recipes poisoned,...]

Small models that diverge (`pretrain/recipes/unstable-*.yaml`, `poisoned.yaml`), each trained
through the supervisor and the deepspeed launcher

- with the ladder, as in the recipe;
- with the detector disabled (let it run);
- by hand, as in the published study: its baseline-large spiked between 24,000 and 24,500 updates
  and was started again from 20,000 with seed 2, without supervision afterwards. Here: stop at the
  spike, go back from its onset by a sixth of the steps before it, use another seed, and disable the
  detector;

and for comparison an uneventful run: the same model, data and seed with a lower learning rate.
Prints the final validation losses and draws `real_spikes.png`. Takes about fifteen minutes on two
idle cores; runs that are finished are not repeated.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from data_prep.files import strict_json
from pretrain.run import ledger, metrics

RECIPES = ("unstable-learning-rate", "unstable-beta2", "poisoned")
SILENT = [
    "spike.deviations=1e9",
    "spike.slow_deviations=1e9",
    "spike.gross_nats=1e9",
    "spike.validation_nats=1e9",
]
NO_ROLLBACK = ["spike.max_rollbacks=0"]
UNEVENTFUL = ["optimizer.learning_rate=5e-3"]
ARMS = ("ladder", "let it run", "by hand")


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


def supervise(recipe: str, folder: Path, data: Path, *overrides: str) -> int:
    """Train a run to its end."""
    return run(
        *("pretrain", "supervise", recipe, f"folder={folder}", f"data.corpus={data}"),
        *("supervision.processes_per_node=2", *overrides),
    )


def by_hand(recipe: str, folder: Path, data: Path) -> None:
    """Stop at the first spike, and continue from well before its onset with another seed."""
    path = folder / ledger.FILE_NAME
    if not any(record["kind"] == "rollback" for record in ledger.read(path)):
        supervise(recipe, folder, data, *NO_ROLLBACK, "training.checkpoints_kept=50")
        state = ledger.run_state(ledger.read(path), 1)
        if state.done:
            return
        onset = state.spikes[-1]["onset"]
        target = max(step for step in (0, *state.checkpoints) if step <= onset * 5 / 6)
        ledger.append(
            path,
            "rollback",
            step=target,
            seed=2,
            skip=None,
            rung=1,
            onset=onset,
            learning_rate_factor=1.0,
            learning_rate_steps=0,
        )
    supervise(recipe, folder, data, *SILENT)


def outcome(folder: Path) -> dict[str, Any]:
    """The outcome of a run."""
    state = ledger.run_state(ledger.read(folder / ledger.FILE_NAME), 1)
    lines = metrics.read(folder / metrics.METRICS)
    validation = metrics.surviving(metrics.read(folder / metrics.VALIDATION))
    return {
        "finished": state.done,
        "spikes": [(spike["channel"], spike["onset"], spike["step"]) for spike in state.spikes],
        "rollbacks": [(r["step"], r["seed"], r["rung"]) for r in state.rollbacks],
        "steps_done": len(lines),
        "best_validation_loss": min(line["loss"] for line in validation),
        "final_validation_loss": validation[-1]["loss"] if state.done else None,
    }


def table(outcomes: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown."""
    rows = [
        "| run | final validation loss | steps done | spikes (onset) | rollbacks (to, rung) |",
        "|---|---|---|---|---|",
    ]
    for name, found in outcomes.items():
        loss = found["final_validation_loss"]
        spikes = ", ".join(f"{channel} {onset}" for channel, onset, _ in found["spikes"])
        rollbacks = ", ".join(f"{step}, {rung}" for step, _, rung in found["rollbacks"])
        value = "gave up" if loss is None else f"{loss:.3f}"
        rows.append(f"| {name} | {value} | {found['steps_done']} | {spikes} | {rollbacks} |")
    return "\n".join(rows)


def draw(output: Path, folders: dict[str, Path]) -> Path:
    """Draw the surviving losses of every run; returns the path of the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(RECIPES), 1, figsize=(9, 3 * len(RECIPES)), sharex=True, layout="constrained"
    )
    shades = ("grey", "tab:blue", "tab:red", "tab:orange")
    colours = dict(zip(("uneventful", *ARMS), shades, strict=True))
    for recipe, axis in zip(RECIPES, axes, strict=True):
        for name, folder in folders.items():
            of, _, arm = name.partition(": ")
            if of not in (recipe, "uneventful"):
                continue
            kept = metrics.surviving(metrics.read(folder / metrics.METRICS))
            smooth = [
                sum(line["loss"] for line in kept[max(0, n - 9) : n + 1]) / min(10, n + 1)
                for n in range(len(kept))
            ]
            axis.plot(
                [line["step"] for line in kept],
                smooth,
                color=colours[arm or of],
                lw=1.2,
                label=arm or of,
            )
        axis.set(title=recipe, ylabel="nats per masked token")
        axis.legend(frameon=False, fontsize=8)
    axes[-1].set_xlabel("step (surviving steps; mean of ten)")
    path = output / "real_spikes.png"
    figure.savefig(path, dpi=120)
    return path


def main() -> None:
    """Run every arm and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    options = parser.parse_args()
    data = corpus(options.output)
    folders = {"uneventful": options.output / "uneventful"}
    supervise("unstable-learning-rate", folders["uneventful"], data, *UNEVENTFUL)
    for recipe in options.recipes.split(","):
        for arm in ARMS:
            folder = options.output / f"{recipe}-{arm.replace(' ', '-')}"
            folders[f"{recipe}: {arm}"] = folder
            if arm == "by hand":
                by_hand(recipe, folder, data)
            else:
                supervise(recipe, folder, data, *(SILENT if arm == "let it run" else ()))
    outcomes = {name: outcome(folder) for name, folder in folders.items()}
    (options.output / "real_spikes.json").write_text(strict_json(outcomes, indent=1) + "\n")
    print(table(outcomes))
    print(draw(options.output, folders))


if __name__ == "__main__":
    main()

"""`make demo`: the main job end to end, in minutes, on text that comes with Python.

Runs the project's own command lines one after the other, each as a user would type it, and ends
with a table of what they measured. Nothing is done here that a command line does not do.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MARK = ".made-by-zeroclap-demo"
"""A folder that holds this file may be deleted by the next demo."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command line, and what it is for."""

    title: str
    command: str
    """Words after `python -m`, quoted as for a shell."""


def stages(output: Path, ranks: int) -> list[Stage]:
    """The demo's command lines, in order."""
    out = shlex.quote(str(output))
    texts = f"'{output}/text/*.jsonl.zst'"
    return [
        Stage(
            "real text, from the Python installation",
            f"data_prep sample --output {out}/text --held-out-fraction 0.25",
        ),
        Stage(
            "a vocabulary for it",
            f"data_prep train-tokenizer --input {texts} --vocab-size 4096 "
            f"--output {out}/vocabulary",
        ),
        Stage(
            "text to indexed binaries, by several processes",
            f"data_prep prepare --input {texts} --output {out}/corpus --tokenizer {out}/vocabulary "
            "--max-tokens 128 --long split --valid-fraction 0.05 --workers 2",
        ),
        Stage("every checksum and every index", f"data_prep verify {out}/corpus"),
        Stage(
            "pretraining through the deepspeed launcher, supervised; a loss spike will come",
            f"pretrain supervise demo folder={out}/run data.corpus={out}/corpus "
            f"supervision.processes_per_node={ranks}",
        ),
        Stage("a model folder", f"pretrain export {out}/run --output {out}/model"),
        Stage(
            "validation perplexity, at the training length and beyond it",
            f"pretrain evaluate {out}/model --data {out}/corpus --lengths 128,256 "
            f"--json {out}/evaluation.json",
        ),
        Stage(
            "what the model expects",
            f"pretrain fill-mask {out}/model 'Return the <mask> of the given object.' --top-k 3",
        ),
        Stage(
            "a task in CoLA's layout, of text that was held out",
            f"finetune acceptability --input '{output}/text/held-out/*.jsonl.zst' "
            f"--exclude {texts} --output {out}/glue --train 700 --dev 300 --seed 2",
        ),
        Stage(
            "fine-tuning, three seeds, from the pretrained and from random weights",
            f"finetune glue {out}/model --data {out}/glue --tasks CoLA --seeds 1,2,3 "
            f"--weights both --output {out}/scores "
            "epochs=3 learning_rate=3e-4 warmup_fraction=0.2 pooling=mean dropout=0 "
            "attention_dropout=0 length_window=1",
        ),
    ]


def run_demo(output: Path) -> int:
    """Run every stage and print the table; returns the exit code.

    Raises:
        ValueError: the folder holds something that no demo made.
    """
    from pretrain.supervision.gpus import visible_gpus

    if output.exists() and any(output.iterdir()) and not (output / MARK).exists():
        raise ValueError(f"{output}: holds files that no demo made; name a new folder")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    (output / MARK).touch()
    began = time.monotonic()
    plan = stages(output, ranks=min(2, len(visible_gpus()) or 2))
    for number, stage in enumerate(plan, start=1):
        _say(f"\n[{number}/{len(plan)}] {stage.title}\n$ python -m {stage.command}")
        started = time.monotonic()
        code = subprocess.run(
            [sys.executable, "-m", *shlex.split(stage.command)], check=False
        ).returncode
        if code:
            _say(f"stage {number} failed with exit code {code}")
            return code
        _say(f"({time.monotonic() - started:.0f} s)")
    _say("\n" + table(output, time.monotonic() - began))
    return 0


def table(output: Path, seconds: float) -> str:
    """What the demo measured, and where to look further."""
    from data_prep.manifest import load_manifest
    from pretrain.run import ledger, metrics

    corpus = load_manifest(output / "corpus")
    evaluations: list[dict[str, Any]] = json.loads((output / "evaluation.json").read_text())
    records = ledger.read(output / "run" / ledger.FILE_NAME)
    rollbacks = [record for record in records if record["kind"] == "rollback"]
    steps = metrics.surviving(metrics.read(output / "run" / metrics.METRICS))
    speed = statistics.median(step["tokens"] / step["seconds"] for step in steps)
    rows = [
        (f"validation perplexity, {e['length']} tokens", f"{e['total']['perplexity']:.1f}")
        for e in evaluations
    ]
    rows.append(("  of the unigram distribution", f"{corpus.unigram_perplexity:.1f}"))
    rows += _score_rows(output / "scores")
    rows += [
        ("loss spikes survived", f"{len(rollbacks)}"),
        ("pretraining speed", f"{speed:,.0f} tokens/s"),
        ("whole demo", f"{seconds:.0f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:>14}" for name, value in rows]
    places = [
        f"loss plot            {output / 'run' / 'loss.png'}",
        f"TensorBoard          tensorboard --logdir {output / 'run' / 'tensorboard'}",
        f"corpus               {output / 'corpus' / 'corpus.png'}",
        f"fine-tuning scores   {output / 'scores' / 'report.md'}",
    ]
    return "\n".join([*lines, "", *places])


def _score_rows(scores: Path) -> list[tuple[str, str]]:
    from finetune.report import MAJORITY, collect, summary

    names = {
        "pretrained": "pretrained weights",
        "random": "random weights",
        MAJORITY: "the majority class",
    }
    rows = []
    for weights, row in summary(collect(scores))["CoLA"].items():
        if weights not in names:
            continue
        values = [f"{row.last[metric].median:.3f}" for metric in ("accuracy", "matthews")]
        rows.append((f"acceptability accuracy / Matthews, {names[weights]}", " / ".join(values)))
    return rows


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

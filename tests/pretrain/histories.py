"""Runs that never trained: ledger and metrics as an attempt writes them, from a random history."""

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.config.load import RUN_FILE, digest, dump
from pretrain.config.run import RunConfig, Segments
from pretrain.config.sections import (
    BatchConfig,
    CorpusConfig,
    DataConfig,
    PhaseConfig,
    ScheduleConfig,
    TrainingConfig,
)
from pretrain.data import lineage
from pretrain.records import ledger, metrics, proof
from pretrain.records.segments import RECIPES, order_of

TOTAL = 37
"""Blocks of an epoch."""
SIZES = ((0, 2), (3, 4), (6, 6))
"""Of the recipe: the batch grows."""
SEED = 5
STEPS = RunConfig().training.steps


Weights = Sequence[tuple[int, Sequence[float]]]


def recipe(
    sizes: Sequence[tuple[int, int]], names: Sequence[str] = (), weights: Weights = ()
) -> RunConfig:
    """A recipe with these blocks a step, and weights of corpora, by step."""
    steps = sorted({first for first, _ in (*sizes, *weights)})
    phases = []
    for first, end in zip(steps, [*steps[1:], 0], strict=True):
        size = [blocks for step, blocks in sizes if step <= first][-1]
        rows = [row for step, row in weights if step <= first][-1:]
        shares = {n: {"weight": w} for row in rows for n, w in zip(names, row, strict=False)}
        data = {"corpora": shares} if shares else {}
        length = end - first if end else 0
        phases.append(PhaseConfig(steps=length, batch={"global_batch_size": size}, data=data))
    first = dict(zip(names, weights[0][1], strict=False)) if weights else {}
    corpora = {name: CorpusConfig(name, float(first.get(name, 1))) for name in names}
    return RunConfig(
        data=DataConfig(corpora=corpora) if names else DataConfig("one"),
        batch=BatchConfig(global_batch_size=sizes[0][1], micro_batch_size=1),
        training=TrainingConfig(seed=SEED),
        schedule=ScheduleConfig(warmup_steps=0),
        phases=phases if len(phases) > 1 else [],
    )


class History:
    """A run's records and lines, written by the rules of train.py, a step at a time."""

    def __init__(
        self,
        total: int = TOTAL,
        sizes: Sequence[tuple[int, int]] = SIZES,
        totals: dict[str, int] | None = None,
        weights: Weights = (),
        corpus: str = "0" * 64,
    ) -> None:
        """Of one corpus with `total` blocks, or of several with `totals`, by name."""
        self.records: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.measured: list[dict[str, Any]] = []
        self.recipes: list[RunConfig] = []
        self.totals, self.digest = totals or {"": total}, corpus
        self.segment("start", 0, recipe(sizes, [*(totals or {})], weights), seed=SEED)
        self.attempt, self.step = 0, 0
        self.versions = {"zeroclap": "1a2b", "torch": "2.13"}

    def segment(self, why: str, step: int, config: RunConfig, **fields: Any) -> None:
        """What begins with a recipe."""
        self.recipes.append(config)
        corpora = [
            {"name": n, "digest": self.digest, "cut": "c-1", "blocks": b, "share_of_tokens": 0.75}
            for n, b in self.totals.items()
        ]
        parts = Segments.of([(step, config)])
        read = {"batches": parts.sizes.parts, "weights": parts.weights()}
        name = digest(config, [self.digest] * len(corpora))
        recorded = {"recipe": name, "corpora": corpora, **read, **fields}
        self.add("segment", why=why, step=step, **recorded)

    def add(self, kind: str, **fields: Any) -> None:
        self.records.append({"number": len(self.records), "time": 0.0, "kind": kind, **fields})

    @property
    def state(self) -> ledger.RunState:
        return ledger.run_state(self.records)

    def begin(self, steps: int = 0) -> None:
        """An attempt from the newest surviving checkpoint, and so many steps of it."""
        state = self.state
        self.attempt, self.step = state.next_attempt, state.resume_step()
        commits = [r for r in self.records if r["kind"] == "commit" and r["step"] == self.step]
        self.order, self.sizes = order_of(self.records)
        manifest = commits[-1]["manifest"] if self.step and commits else ""
        loaded = {"lineage": self.order.identity(), "manifest": manifest}
        place = {"ranks": 2, "host": "here", "hosts": ["here", "there"]}
        code = {"versions": dict(self.versions), "kernels": ["cpu", "math", False]}
        fields = {"seed": state.seeds_by_step[-1][1], **loaded, **place, **code}
        self.add("attempt", attempt=self.attempt, step=self.step, **fields)
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            place, size = self.sizes.first_block(self.step), self.sizes.size(self.step)
            blocks = lineage.digest(*self.order.blocks(place, size))
            line = {"attempt": self.attempt, "step": self.step, "loss": 5.0, "blocks": blocks}
            line |= {"seed": self.order.seed_at(place), "tokens": 100, "seconds": 0.5}
            line |= {"gradient_norm": 1.0, "learning_rate": 1e-3, "loss_scale": 1.0}
            self.lines.append({**line, "skipped": False})
            self.step += 1

    def measure(self, step: int, loss: float | None = 5.0, **more: Any) -> None:
        """A line of validation.jsonl after `step` updates, of the newest attempt."""
        score = {"loss": loss, "perplexity": loss and math.exp(loss), "targets": 10}
        line = {"attempt": self.attempt, "step": step, **score, "subsets": {}, "validation_id": "m"}
        self.measured.append({**line, **more})

    def commit(self) -> None:
        manifest = f"{self.attempt}-{self.step}"
        self.add("commit", attempt=self.attempt, step=self.step, manifest=manifest)

    def spike(self, onset: int) -> None:
        rise = {"channel": "fast", "loss": 7.0, "baseline": 5.0}
        self.add("spike", attempt=self.attempt, step=self.step - 1, onset=onset, **rise)

    def roll_back(self, step: int, skip: tuple[int, int] | None = None) -> None:
        order = {"seed": max(self.state.seeds) + 1, "skip": list(skip) if skip else None}
        rate = {"learning_rate_factor": 1.0, "learning_rate_steps": 0}
        rung = 2 if skip else 1
        self.add("segment", why="spike", step=step, rung=rung, onset=step, **order, **rate)

    def audit(self) -> proof.Audit:
        return proof.examine(self.records, self.lines)

    def write(self, run: Path) -> None:
        run.mkdir()
        dump(dataclasses.replace(self.recipes[-1], folder=str(run)), run / RUN_FILE)
        (run / RECIPES).mkdir()
        begun = [record for record in self.records if "recipe" in record]
        for config, record in zip(self.recipes, begun, strict=False):
            dump(config, run / RECIPES / f"{record['recipe']}.yaml")
        for record in self.records:
            fields = {k: v for k, v in record.items() if k not in ("number", "time", "kind")}
            ledger.append(run / ledger.FILE_NAME, record["kind"], **fields)
        for name, lines in ((metrics.METRICS, self.lines), (metrics.VALIDATION, self.measured)):
            (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def spiked(skip: tuple[int, int] | None = None) -> History:
    """A run that committed step 9, spiked at step 13, and was rolled back."""
    history = History()
    history.begin(steps=9)
    history.commit()
    history.train(5)
    history.spike(onset=10)
    history.roll_back(9, skip)
    return history


def other_recipe(history: History, draw: random.Random) -> None:
    """The user goes on with other batches and weights, maybe with one more corpus."""
    kept = history.state.checkpoints
    newest = kept[-1] if kept else 0
    step = draw.choice([*kept, newest + 1, newest + draw.randint(1, 9)])
    if "" not in history.totals and draw.random() < 0.5:
        history.totals |= {f"more{len(history.totals)}": draw.randint(1, 30)}
    names = [name for name in history.totals if name]
    weights = [(0, [draw.randint(0, 3) for _ in names[1:]] + [1])] if names else []
    history.segment("user", step, recipe([(0, draw.randint(1, 8))], names, weights))


def random_history(seed: int) -> History:
    """Crashes, commits, spikes, rollbacks, skips and other recipes, at random."""
    draw = random.Random(seed)
    history = History(total=draw.randint(1, 40))
    if seed % 2:
        totals = {name: draw.randint(1, 30) for name in "abc"}
        steps = [0, *sorted(draw.sample(range(1, 25), 3))]
        weights = [(s, [draw.randint(0, 3), draw.randint(0, 3), 1]) for s in steps]
        history = History(totals=totals, weights=weights)
    for _ in range(draw.randint(1, 6)):
        history.begin()
        for _ in range(draw.randint(0, 4)):
            history.train(draw.randint(0, 5))
            if draw.random() < 0.6 and history.step:
                history.commit()
        if draw.random() < 0.6 and history.step:
            onset = draw.randrange(history.step)
            history.spike(onset)
            targets = [0, *(c for c in history.state.checkpoints if c <= onset)]
            target = draw.choice(targets)
            skip = None
            if draw.random() < 0.6:
                first = draw.randint(target, history.step)
                skip = (first, draw.randint(first, history.step))
            history.roll_back(target, skip)
        if draw.random() < 0.3:
            other_recipe(history, draw)
    return history

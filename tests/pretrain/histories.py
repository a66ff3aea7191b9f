"""Runs that never trained: ledger and metrics as an attempt writes them, from a random history."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.config.sections import BatchConfig, PhaseConfig, Sizes
from pretrain.records import ledger, metrics, proof

TOTAL = 37
"""Blocks of an epoch."""
BATCH = BatchConfig(global_batch_size=6, micro_batch_size=1)
PHASES = [*(PhaseConfig(steps=3, batch={"global_batch_size": n}) for n in (2, 4)), PhaseConfig()]
"""Of the recipe: the batch grows."""
SIZES = Sizes(((0, 2), (3, 4), (6, 6)))
SEED = 5


Weights = Sequence[tuple[int, Sequence[float]]]


class History:
    """A run's records and lines, written by the rules of train.py, a step at a time."""

    def __init__(
        self,
        total: int = TOTAL,
        sizes: Sizes = SIZES,
        totals: dict[str, int] | None = None,
        weights: Weights = (),
    ) -> None:
        """Of one corpus with `total` blocks, or of several with `totals`, by name."""
        self.sizes, self.totals, self.weights = sizes, totals, list(weights)
        self.total = sum(totals.values()) if totals else total
        self.records: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.add("created", corpus="0" * 64, seed=SEED, batch={**vars(BATCH)})
        self.attempt, self.step = 0, 0
        self.digest = "0" * 64
        self.versions = {"zeroclap": "1a2b", "torch": "2.13"}

    def add(self, kind: str, **fields: Any) -> None:
        self.records.append({"number": len(self.records), "time": 0.0, "kind": kind, **fields})

    @property
    def state(self) -> ledger.RunState:
        return ledger.run_state(self.records, SEED)

    def begin(self) -> None:
        """An attempt from the newest surviving checkpoint."""
        state = self.state
        self.attempt, self.step = state.next_attempt, state.resume_step()
        manifest = next(
            (
                r["manifest"]
                for r in reversed(self.records)
                if r["kind"] == "commit" and r["step"] == self.step
            ),
            "",
        )
        read: dict[str, Any] = {"blocks": self.total, "share_of_tokens": 0.75}
        if self.totals:
            read["digest"] = self.digest
            corpora = [{**read, "name": n, "blocks": blocks} for n, blocks in self.totals.items()]
            read |= {"corpora": corpora, "weights": self.weights}
        if len(self.sizes.parts) > 1:
            read["batches"] = self.sizes.to_record()
        self.order = ledger.Corpora.of(read).order(state, self.sizes.first_block)
        self.add(
            "attempt",
            attempt=self.attempt,
            step=self.step,
            **read,
            lineage=ledger.lineage_record(self.order),
            manifest=manifest if self.step else "",
            ranks=2,
            seed=state.segments[-1][1],
            host="here",
            hosts=["here", "there"],
            versions=dict(self.versions),
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            place = self.sizes.first_block(self.step)
            self.lines.append(
                {
                    "attempt": self.attempt,
                    "step": self.step,
                    "loss": 5.0,
                    "seed": self.order.seed_at(place),
                    "blocks": self.order.digest(place, self.sizes.size(self.step)),
                    "tokens": 100,
                    "seconds": 0.5,
                    "gradient_norm": 1.0,
                    "learning_rate": 1e-3,
                    "loss_scale": 1.0,
                    "skipped": False,
                }
            )
            self.step += 1

    def commit(self) -> None:
        self.add(
            "commit", attempt=self.attempt, step=self.step, manifest=f"{self.attempt}-{self.step}"
        )

    def spike(self, onset: int) -> None:
        self.add(
            "spike",
            attempt=self.attempt,
            channel="fast",
            step=self.step - 1,
            onset=onset,
            loss=7.0,
            baseline=5.0,
        )

    def roll_back(self, step: int, skip: tuple[int, int] | None = None) -> None:
        self.add(
            "rollback",
            step=step,
            seed=max(self.state.seeds) + 1,
            skip=list(skip) if skip else None,
            rung=2 if skip else 1,
            onset=step,
            learning_rate_factor=1.0,
            learning_rate_steps=0,
        )

    def audit(self) -> proof.Audit:
        return proof.examine(self.records, self.lines)

    def write(self, run: Path) -> None:
        run.mkdir()
        for record in self.records:
            fields = {k: v for k, v in record.items() if k not in ("number", "time", "kind")}
            ledger.append(run / ledger.FILE_NAME, record["kind"], **fields)
        lines = "".join(json.dumps(line) + "\n" for line in self.lines)
        (run / metrics.METRICS).write_text(lines)


def random_history(seed: int) -> History:
    """Crashes, commits, spikes, rollbacks and skips, at random."""
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
    return history

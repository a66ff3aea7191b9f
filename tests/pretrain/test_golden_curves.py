"""Short training curves of every variant, recorded in golden/curves.json.

Text, vocabulary, weights and batches are functions of this file and of the project, so the curves
say whether any number has changed: `make test` holds them to a tolerance that other processors
meet (torch before 2.13 draws ALBERT's weights otherwise). A refactoring has to reproduce them bit
for bit on one machine:

    ZEROCLAP_CURVES=before.json python -m pytest tests/pretrain/test_golden_curves.py

writes the file where there is none, and compares every bit with it where there is one. A change
that is meant to change numbers records golden/curves.json anew, in the same way, and says why.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
from pathlib import Path

import pytest

from data_prep.common.exit_codes import EXIT_SPIKE
from pretrain.config import load as recipes
from pretrain.model.presets import VARIANTS
from pretrain.records import checkpoints, ledger, metrics
from pretrain.spikes.policy import answer_to_spike
from pretrain.train import __main__ as train
from tests.fixtures import data_prep
from tests.pretrain.builders import slow

RECORDED = Path(__file__).parent / "golden" / "curves.json"
STEPS = 20
# Relative, of a loss. bf16 rounds to 8 bits, and processors differ in how they add up.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
RECIPE = """
data: {{corpus: "{corpus}", sequence_length: 64, packing: best-fit}}
model: {{size: tiny}}
batch: {{global_batch_size: 8, micro_batch_size: 2}}
optimizer: {{learning_rate: 3e-3, gradient_clipping: 1.0}}
schedule: {{warmup_steps: 4, minimum_learning_rate: 3e-4}}
training: {{steps: 20, evaluation_interval: 10, evaluation_blocks: 6, checkpoint_interval: 10}}
spike: {{window: 40, deviations: 2.5, patience: 2, confirm_steps: 4,
  gross_nats: 20.0, margin_steps: 4}}
"""
SENTENCE = "the quick brown fox jumps over a lazy dog while seven wizards mix vodka by jug"


def text(number: int) -> str:
    """Document `number`: words drawn by a linear congruential generator, with repetitions."""
    state, words, known = number * 7919 + 1, [], SENTENCE.split()
    for _ in range(3 + number % 9):
        state = (state * 1103515245 + 12345) % 2**31
        words.append(known[(state >> 16) % len(known)])
    return " ".join(words)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    raw = folder / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": text(n)}) + "\n" for n in range(600)))
    words = ["--input", str(raw), "--output", str(folder / "vocabulary")]
    data_prep(["train-tokenizer", *words, "--characters"])
    words = ["--input", str(raw), "--output", str(folder / "corpus"), "--max-tokens", "64"]
    words += ["--tokenizer", str(folder / "vocabulary"), "--valid-fraction", "0.1"]
    data_prep(["prepare", *words])
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(corpus=folder / "corpus"))
    return path


def attempt(recipe, run, *words):
    """One attempt by the calling rank; its exit code."""
    with contextlib.redirect_stdout(io.StringIO()):
        return train.attempt([str(recipe), f"folder={run}", *words])


def curve(run):
    """What a run recorded, and the hash of the weights that it ended with."""
    from pretrain.engine.consolidated import consolidated_weights

    lines = metrics.read_metrics(run / metrics.METRICS)
    validation = metrics.read_metrics(run / metrics.VALIDATION)
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    last = ledger.run_state(records).resume_step()
    weights = consolidated_weights(checkpoints.folder_of(run, last))
    return {
        "steps": [line["step"] for line in lines],
        "losses": [line["loss"] for line in lines],
        "gradient_norms": [line["gradient_norm"] for line in lines],
        "blocks": digest(*(line["blocks"].encode() for line in lines)),
        "validation": [line["loss"] for line in validation],
        "ledger": [[r["kind"], r.get("step"), r.get("onset"), r.get("seed")] for r in records],
        "weights": digest(*(weights[name].numpy().tobytes() for name in sorted(weights))),
    }


def digest(*parts):
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True)
class Case:
    """Runs that ranks do one after the other in the same processes."""

    ranks: int
    precision: str
    runs: tuple[tuple[str, tuple[str, ...]], ...]
    """Name and settings of each."""


CAUSAL = ("objective.name=causal-lm", "data.packing=contiguous")
"""Settings of the variants that are causal."""


def runs_of(causal):
    """A run of each variant that is causal, or of each that is not.

    But for models of characters, and `modern`, whose curves have not been recorded.
    """
    return tuple(
        (variant, (f"model.variant={variant}", *(CAUSAL if causal else ())))
        for variant, delta in VARIANTS.items()
        if delta.get("causal", False) == causal and not variant.startswith(("char-", "modern"))
    )


DROPOUT = ("model.variant=zero-clap", "model.overrides.dropout=0.1")
CASES = {
    f"{kind}{precision}-{ranks}": Case(ranks, precision, runs_of(causal))
    for kind, causal in (("", False), ("causal-", True))
    for precision in ("fp32", "bf16")
    for ranks in (1, 2)
}
CASES["stages"] = Case(
    2,
    "fp32",
    tuple((f"zero{n}", (*DROPOUT, f"training.deepspeed=zero{n}_fp32")) for n in (0, 2, 3)),
)
FAST = "fp32-1"
"""Of two ranks are the runs of `HISTORIES`."""
SLOW = ["bf16-2", "causal-fp32-2", "causal-bf16-1", "stages"]
"""With `FAST`, each pair of direction, precision and number of ranks. A comparison has all."""
if os.environ.get("ZEROCLAP_CURVES"):
    SLOW = [name for name in CASES if name != FAST]


def train_all(case, run_ranks, recipe, folder):
    def work():
        engine = f"training.deepspeed=zero1_{case.precision}"
        return [attempt(recipe, folder / name, engine, *words) for name, words in case.runs]

    assert run_ranks(case.ranks, work) == [[0] * len(case.runs)] * case.ranks
    return {name: curve(folder / name) for name, _ in case.runs}


def train_interrupted(run_ranks, recipe, folder):
    """Stopped within step 13, and resumed from the checkpoint of step 10."""

    def interrupted():
        from pretrain.engine.engine import Engine

        backward = Engine.backward

        def stop(self, given):
            if given.step == 13:
                raise KeyboardInterrupt
            return backward(self, given)

        Engine.backward = stop
        with contextlib.suppress(KeyboardInterrupt):
            attempt(recipe, folder / "resume", *DROPOUT, "training.deepspeed=zero1_fp32")

    def resumed():
        return attempt(recipe, folder / "resume", *DROPOUT, "training.deepspeed=zero1_fp32")

    run_ranks(2, interrupted)
    assert run_ranks(2, resumed) == [0, 0]
    return {"resume": curve(folder / "resume")}


def train_rolled_back(run_ranks, recipe, folder):
    """Random labels from step 30 on, a spike, and the rollback that the policy answers it with."""
    words = ["training.steps=50", "training.checkpoint_interval=5", "training.checkpoints_kept=4"]
    words += ["fault.random_labels=[30, 44]"]
    words += ["training.deepspeed=zero1_fp32", "model.variant=baseline"]
    run = folder / "rollback"

    def work():
        return attempt(recipe, run, *words)

    assert run_ranks(2, work) == [EXIT_SPIKE] * 2
    config = recipes.load(str(recipe), [f"folder={run}", *words])
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    onset = ledger.run_state(records).unanswered_spike["onset"]
    answer = answer_to_spike(records, config)
    fields = {"why": ledger.SPIKE, "onset": onset, **dataclasses.asdict(answer)}
    ledger.append(run / ledger.FILE_NAME, "segment", **fields)
    assert run_ranks(2, work) == [0, 0]
    return {"rollback": curve(run)}


HISTORIES = {"interrupted": train_interrupted, "rolled-back": train_rolled_back}


@pytest.mark.parametrize("name", [FAST, *slow(*([name] for name in SLOW))])
def test_curves(name, run_ranks, recipe, tmp_path):
    found = train_all(CASES[name], run_ranks, recipe, tmp_path)
    compare(name, found, CASES[name].precision)


@pytest.mark.parametrize("name", HISTORIES)
def test_curves_of_runs_that_were(name, run_ranks, recipe, tmp_path):
    compare(name, HISTORIES[name](run_ranks, recipe, tmp_path), "fp32")


def compare(name, found, precision):
    """Hold curves against the recorded ones, or record them; see the top of the file."""
    local = os.environ.get("ZEROCLAP_CURVES")
    path = Path(local) if local else RECORDED
    recorded = json.loads(path.read_text()) if path.exists() else {}
    if local and name not in recorded:
        path.write_text(json.dumps({**recorded, name: found}, indent=1))
        return
    expected = recorded[name]
    assert found.keys() == expected.keys()
    for run, curve in found.items():
        if local:
            assert curve == expected[run], run
        else:
            assert_near(curve, expected[run], TOLERANCE[precision], f"{name}: {run}")


def assert_near(found, expected, tolerance, where):
    for exact in ("steps", "blocks"):
        assert found[exact] == expected[exact], f"{where}: {exact}"
    # What is hardly suspected here may not be suspected on another processor.
    events = [
        [r for r in c["ledger"] if r[0] not in ("suspect", "healed")] for c in (found, expected)
    ]
    assert events[0] == events[1], f"{where}: ledger"
    for key, wider in (("losses", 1), ("validation", 1), ("gradient_norms", 20)):
        near = pytest.approx(expected[key], rel=wider * tolerance)
        assert found[key] == near, f"{where}: {key}"

"""Benchmark of the comparisons that find silent corruption: what they find, and what they cost.

    python -m tests.benchmarks.corruption

Trains a small model on two ranks, and flips one bit of the exponent of a number of rank 1: in its
weights, in the optimizer's copy of them and its two moments, in a gradient before the ranks add
theirs, in an activation once, and in an activation of every forward pass from then on. Each of the
eight bits is tried `--repeats` times, at a random place and step, from the same checkpoint. Within
100 steps a flip is found by a comparison, is a spike for the detector (fed as in a run), or is not
found; then the mean of the last 20 losses is compared with that of the undisturbed run. A second,
larger model shows what a comparison costs. Takes about 20 minutes on two idle cores.
"""

import argparse
import contextlib
import dataclasses
import itertools
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks import ranks
from tests.benchmarks.step_overhead import prepared

RECIPE = """
folder: "{folder}"
data: {{corpus: "{corpus}", sequence_length: 64}}
model: {{variant: baseline, size: tiny, overrides: {overrides}}}
batch: {{global_batch_size: 16, micro_batch_size: 8}}
schedule: {{warmup_steps: 10}}
optimizer: {{learning_rate: 1.0e-3}}
training: {{steps: 400, deepspeed: {deepspeed}}}
"""
TINY = "{hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 128}"
LARGER = "{hidden_size: 512, num_layers: 6, num_heads: 8, intermediate_size: 2048}"
DEEPSPEED = ("zero0_fp32", "zero1_fp32", "zero1_bf16", "zero3_fp32")
FIRST, STEPS = 300, 100
"""Step of the checkpoint that trials begin with, and length of a trial."""
INTERVAL = 50
LEAST_HARM = 0.01
"""Nats that count as a difference of the loss."""
EXPONENT = range(23, 31)
"""Bits of fp32's exponent; bf16 has the same, 16 places lower."""
PLACES = (
    "weight",
    "optimizer's weight",
    "first moment",
    "second moment",
    "gradient",
    "activation",
    "every activation",
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One flip."""

    place: str
    bit: int
    after: int
    """Steps from the checkpoint on."""
    seed: int
    """Chooses the number."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a flip."""

    found_by: str
    """comparison, detector, or neither."""
    steps: int
    """From the flip on."""
    harm: float
    """Nats above the undisturbed run's loss; 0 where it was found."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="of each bit in each place")
    parser.add_argument("--deepspeed", nargs="*", default=DEEPSPEED, help="files of ds_configs/")
    parser.add_argument("--places", nargs="*", default=PLACES, choices=PLACES, metavar="PLACE")
    options = parser.parse_args()
    ranks.prepare()
    logging.disable(logging.WARNING)  # DeepSpeed tells of each skipped update
    draw = random.Random(1)
    trials = [
        Trial(place, bit, draw.randrange(1, INTERVAL), draw.randrange(10**6))
        for place in options.places
        for bit in EXPONENT
        for _ in range(options.repeats)
    ]
    with tempfile.TemporaryDirectory() as name:
        corpus = prepared(Path(name))
        for deepspeed in options.deepspeed:
            recipe = Path(name) / f"{deepspeed}.yaml"
            fields = {"folder": recipe.with_suffix(""), "corpus": corpus, "deepspeed": deepspeed}
            recipe.write_text(RECIPE.format(overrides=TINY, **fields))
            print(f"\n{deepspeed}, a comparison every {INTERVAL} steps", flush=True)
            print(table(trials, ranks.run(2, try_all, recipe, trials)), flush=True)
        recipe.write_text(RECIPE.format(overrides=LARGER, **fields))
        step, comparison, hashes = ranks.run(2, cost, recipe)
        shares = [comparison / every / step + hashes / step for every in (100, 500)]
        print(
            f"\na step takes {step:.2f} s with {hashes:.3f} s of hashes, a comparison "
            f"{comparison:.2f} s: {shares[0]:.2%} of the time with one every 100 steps, "
            f"{shares[1]:.2%} with one every 500"
        )


def table(trials: list[Trial], outcomes: list[Outcome]) -> str:
    """The outcomes of each place."""
    lines = [
        f"{'one bit of a number':20} trials  comparison  (steps)  detector  (steps)  "
        f"neither  of these harm"
    ]
    pairs = list(zip(trials, outcomes, strict=True))
    for place in dict.fromkeys(trial.place for trial in trials):
        of_place = [outcome for trial, outcome in pairs if trial.place == place]
        row = [f"{place:20} {len(of_place):6}"]
        for way, width in (("comparison", 12), ("detector", 10)):
            steps = [outcome.steps for outcome in of_place if outcome.found_by == way]
            median = f"{statistics.median(steps):.0f}" if steps else "-"
            row.append(f"{len(steps):{width}}{median:>9}")
        left = [outcome for outcome in of_place if outcome.found_by == "neither"]
        harmed = [outcome.harm for outcome in left if not outcome.harm < LEAST_HARM]
        worst = f" (at most {max(harmed):.2f} nats)" if harmed else ""
        row.append(f"{len(left):9}{len(harmed):15}{worst}")
        lines.append("".join(row))
    return "\n".join(lines)


class Run:
    """A model in training, on one rank."""

    def __init__(self, recipe: Path) -> None:
        from pretrain import recipe_checks
        from pretrain.config.load import load
        from pretrain.engine import engine
        from pretrain.inference.initial_weights import initial_model
        from pretrain.objectives.base import Vocabulary
        from tests.pretrain.builders import batches_of

        self.config = config = load(str(recipe))
        architecture, manifests = recipe_checks.check(config, 2)
        process = engine.start()
        model = initial_model(config, architecture, "dense", read=False)
        clipping = config.optimizer.gradient_clipping
        settings = engine.deepspeed_json(config.training.deepspeed, config.batch, clipping, 2)
        self.engine = engine.Engine(model, config.optimizer, settings, process, compared=True)
        ((name, manifest),) = manifests.items()
        source = recipe_checks.open_stream(
            next(s for s in config.streams if s.name == name), "train"
        )
        vocabulary = Vocabulary(
            manifest.vocab_size, architecture.vocab_size, Path(config.streams[0].path)
        )
        self.objective = config.objective.build(vocabulary)
        seed = config.training.seed
        self.batches = batches_of(
            source, self.objective, config.batch, seed=seed, fault=config.fault
        )
        self.lines: list[dict[str, Any]] = []
        """Of the undisturbed run, on rank 0."""

    def compare(self, step: int) -> bool:
        """Whether a comparison after so many steps finds anything."""
        (batch, *_) = self.batches.micro_batches(step - 1, 0, 2)
        seed = self.batches.seed(step - 1)
        return self.engine.find_corruption(batch, self.objective, seed, step - 1) is not None

    def train(
        self, first: int, last: int, before: Callable[[int], None] = lambda step: None
    ) -> tuple[str, int, list[float]]:
        """Train; returns what ended it, after how many updates, and the losses on rank 0."""
        from pretrain.engine.schedules import learning_rate
        from pretrain.exit_codes import EXIT_SPIKE
        from pretrain.loop import Hook, StepRecord
        from pretrain.loop import run as run_loop
        from pretrain.spikes.detector import SpikeDetector
        from pretrain.spikes.live import SpikeWatch, observations

        lines: list[dict[str, Any]] = []
        if self.engine.rank == 0:
            detector = SpikeDetector(self.config.spike)
            history = observations([line for line in self.lines if line["step"] < first])
            watch = SpikeWatch(detector, history, lambda event: None)

        def compare(step: int) -> None:
            if self.compare(step):
                raise StopIteration(step)

        def observe(record: StepRecord) -> None:
            lines.append(vars(record))

        before(first)
        ended, at = "neither", last
        try:
            verdict = run_loop(
                self.engine,
                self.batches,
                self.objective,
                learning_rate=lambda step: learning_rate(self.config, step),
                first_step=first,
                last_step=last,
                hooks=[Hook(INTERVAL, compare)],
                observers=[observe],
                watch=lambda record: watch(record),
                after_step=before,
            )
            if verdict == EXIT_SPIKE:
                ended, at = "detector", lines[-1]["step"] + 1 if lines else 0
        except StopIteration as found:
            ended, at = "comparison", found.value
        if not self.lines:
            self.lines = lines
        return ended, at, [line["loss"] for line in lines]


def try_all(recipe: Path, trials: list[Trial]) -> list[Outcome]:
    """Train without a fault, and then with each."""
    run = Run(recipe)
    folder = recipe.with_suffix("") / f"step-{FIRST:08d}"
    assert run.train(0, FIRST)[0] == "neither"
    run.engine.save(folder)
    ended, _, clean = run.train(FIRST, FIRST + STEPS)
    assert ended == "neither"
    outcomes = []
    for trial in trials:
        run.engine.load(folder)
        with flipped(run, trial) as before:
            ended, at, losses = run.train(FIRST, FIRST + STEPS, before)
        harm = 0.0
        if ended == "neither" and run.engine.rank == 0:
            harm = statistics.fmean(losses[-20:]) - statistics.fmean(clean[-20:])
        outcomes.append(Outcome(ended, at - FIRST - trial.after, harm))
    run.engine.load(folder)
    assert run.train(FIRST, FIRST + STEPS)[2] == clean, "a trial has changed the next one"
    return outcomes


@contextlib.contextmanager
def flipped(run: Run, trial: Trial) -> Iterator[Callable[[int], None]]:
    """Give what flips the bit once it is called with the right step."""
    handles: list[Any] = []
    draw = random.Random(trial.seed)

    def begin(step: int) -> None:
        if step != FIRST + trial.after or run.engine.rank != 1:
            return
        if tensors := held(run, trial.place):
            flip(draw.choices(tensors, [each.numel() for each in tensors])[0], trial.bit, draw)
        elif trial.place == "gradient":
            parameters = [p for p in run.engine.module.parameters() if p.requires_grad]
            sizes = [getattr(each, "ds_numel", each.numel()) for each in parameters]
            (chosen,) = draw.choices(parameters, sizes)
            handles.append(chosen.register_hook(lambda gradient: once(gradient.clone())))
        else:
            layer = draw.choice(list(run.engine.module.module.encoder.layers))
            always = trial.place == "every activation"
            handles.append(
                layer.register_forward_hook(lambda m, i, output: once(output, keeps=always))
            )

    def once(tensor: Any, keeps: bool = False) -> Any:  # noqa: ANN401
        flip(tensor, trial.bit, draw)
        if not keeps:
            handles.pop().remove()
        return tensor

    yield begin
    for handle in handles:
        handle.remove()


def held(run: Run, place: str) -> list[Any]:
    """The tensors of this rank that have the numbers of a place; none for what is computed."""
    from pretrain.engine import workarounds

    zero = run.engine._deepspeed
    parameters = [p for p in zero.module.parameters() if p.requires_grad]
    if place == "weight":
        return [getattr(each, "ds_tensor", each) for each in parameters]
    tensors, wrapped = parameters, zero.optimizer
    if zero.zero_optimization_stage():
        tensors = [tensor for tensor, _ in workarounds.partitions(zero.optimizer)]
        wrapped = zero.optimizer.optimizer
    if place == "optimizer's weight":
        return tensors
    names = {"first moment": "exp_avg", "second moment": "exp_avg_sq"}
    return [wrapped.state[each][names[place]] for each in tensors] if place in names else []


def flip(tensor: Any, bit: int, draw: random.Random) -> None:  # noqa: ANN401
    """Flip a bit of the exponent of one number that is not 0."""
    import torch

    flat = tensor.detach().view(-1)
    place = next(p for p in iter(lambda: draw.randrange(len(flat)), None) if flat[p] != 0)
    is_short = flat.element_size() == 2
    whole = flat[place : place + 1].view(torch.int16 if is_short else torch.int32)
    whole.bitwise_xor_(torch.tensor(1 << (bit - 16 if is_short else bit), dtype=whole.dtype))


def cost(recipe: Path, repeats: int = 7) -> tuple[float, float, float]:
    """Median seconds of a step, of a comparison, and of the hashes in a step."""
    run = Run(recipe)
    steps, comparisons, hashes = [], [], []
    for step in range(repeats + 1):
        times = [time.perf_counter()]
        run.train(step, step + 1)  # compares after its last step
        times.append(time.perf_counter())
        run.compare(step + 1)
        times.append(time.perf_counter())
        run.engine._kept.check()
        run.engine._kept.note()
        times.append(time.perf_counter())
        trained, compared, hashed = (after - before for before, after in itertools.pairwise(times))
        steps.append(trained - compared)
        comparisons.append(compared)
        hashes.append(hashed)
    return tuple(statistics.median(each[1:]) for each in (steps, comparisons, hashes))


if __name__ == "__main__":
    main()

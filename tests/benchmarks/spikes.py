"""The spike detector on labelled synthetic curves and recorded ones, and what a step costs.

    python -m tests.benchmarks.spikes [--seeds 40] [--curves FOLDER]

Prints tables and exits with status 1 if a target is missed. Takes about three minutes on one core.
The defaults of SpikeConfig were chosen on seeds below 1000; the report uses seeds from 1000 on, and
for small rises both.
"""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.config.sections import SpikeConfig
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.observations import Event, Observation
from pretrain.spikes.replay import detect, read_curve, table
from tests.benchmarks import non_finite

Losses = npt.NDArray[np.float64]

VOCABULARY = 50_265
RECORDS = 6_000
REPORT_SEED = 1_000
NEAR_RECORDS = 100
"""A spike is the labelled one if its onset lies within so many records of the label."""


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A curve and its label."""

    kind: str
    """clean, fast, slow, level, divergence, non-finite, blip, gross-blip, shift, returning-shift
    or creeping"""
    losses: Losses
    onset: int | None
    """First record of the rise; of a divergence the first where it exceeds one standard deviation
    of the noise, below which nothing can be dated."""
    begins: int
    """First record that was changed: before the onset of a divergence, else the onset; the end of a
    clean curve."""

    rise: Losses | None = None
    """Nats above the undisturbed loss, from `begins` on."""

    @property
    def spike(self) -> bool:
        """Whether the run should be rolled back."""
        return self.onset is not None and self.kind.split("-")[-1] not in ("blip", "shift")


def clean(
    seed: int,
    records: int = RECORDS,
    first: int = 0,
    deviation: float | None = None,
    correlation: float = 0.3,
) -> tuple[Losses, float]:
    """A loss without spikes, and the standard deviation of its noise.

    It falls from ln V to a floor by a power law. The noise is an AR(1) process with innovations of
    Student's t with 5 degrees of freedom.

    Args:
        seed: seed of every random number.
        records: number of records.
        first: number of earlier records: 0 starts at ln V, 20000 is almost flat.
        deviation: standard deviation of the noise in nats; by default drawn from 0.03 to 0.08.
        correlation: of the noise of neighbouring records.
    """
    draw = np.random.default_rng([seed, 0])
    drawn = float(draw.uniform(0.03, 0.08))
    deviation = drawn if deviation is None else deviation
    floor, exponent = draw.uniform(1.8, 3.2), draw.uniform(0.25, 0.5)
    onset_of_fall = draw.uniform(20, 200)
    time_ = np.arange(first, first + records)
    trend = floor + (math.log(VOCABULARY) - floor) * (1 + time_ / onset_of_fall) ** -exponent
    shocks = draw.standard_t(5, records) / math.sqrt(5 / 3) * math.sqrt(1 - correlation**2)
    noise = np.empty(records)
    value = 0.0
    for index, shock in enumerate(shocks):
        value = correlation * value + shock
        noise[index] = value
    return trend + deviation * noise, deviation


def curve(kind: str, seed: int, records: int = RECORDS) -> Labelled:
    """A labelled curve of one kind.

    Odd seeds start at ln V, even ones later in the run; rises begin at record 300 or later. Their
    heights in nats: fast 0.8 to 2, decaying with a time constant of 60 to 300 records; slow 0.4 to
    0.8 with 500 to 2000; level 0.2 to 0.5, permanently; divergence doubles every 20 to 100 records
    up to ln V; blips 0.3 to 2 (gross ones 4 to 6), for at most 30 records.

    Shifts rise by 0.02 to 0.15 within 10 to 500 records and stay; returning ones last for 50 to
    1,500 records more. A creeping rise begins like a shift, and doubles every 50 to 400 records
    from there. The noise of these three is at one of three levels, by seed, and correlated.
    """
    draw = np.random.default_rng([seed, 1])
    noise = (NOISE[seed // 2 % 3], (0.3, 0.7)[seed // 6 % 2]) if kind in SMALL else ()
    losses, deviation = clean(seed, records, 0 if seed % 2 else 20_000, *noise)
    if kind == "clean":
        return Labelled(kind, losses, None, records)
    onset = int(draw.integers(300, records - 1500))
    after = np.arange(records - onset, dtype=float)
    rise = _RISES[kind](draw, after, deviation)
    losses[onset:] = np.minimum(losses[onset:] + rise, math.log(VOCABULARY) + losses[onset:] % 0.1)
    begins = onset
    if kind in ("divergence", "creeping"):
        onset += int(np.argmax(rise > deviation))
    return Labelled(kind, losses, onset, begins, rise)


Rise = Callable[[np.random.Generator, Losses, float], Losses]


def _decaying(low: float, high: float, fastest: float, slowest: float) -> Rise:
    def rise(draw: np.random.Generator, after: Losses, deviation: float) -> Losses:
        return draw.uniform(low, high) * np.exp(-after / draw.uniform(fastest, slowest))

    return rise


def _level(draw: np.random.Generator, after: Losses, deviation: float) -> Losses:
    return np.full_like(after, draw.uniform(0.2, 0.5))


def _divergence(draw: np.random.Generator, after: Losses, deviation: float) -> Losses:
    return 0.2 * deviation * 2.0 ** np.minimum(after / draw.uniform(20, 100), 60)


def _not_finite(draw: np.random.Generator, after: Losses, deviation: float) -> Losses:
    return np.full_like(after, np.nan)


def _blip(low: float, high: float) -> Rise:
    def rise(draw: np.random.Generator, after: Losses, deviation: float) -> Losses:
        height, length = draw.uniform(low, high), draw.uniform(3, 30)
        if draw.random() < 0.5:
            return height * (after < length)
        return height * np.exp(-after / (length / 3)) * (after < length)

    return rise


def _shift(draw: np.random.Generator, after: Losses, deviation: float) -> Losses:
    height, length = draw.uniform(0.02, 0.15), math.exp(draw.uniform(*np.log((10, 500))))
    return height * np.minimum(after / length, 1)


def _returning_shift(draw: np.random.Generator, after: Losses, deviation: float) -> Losses:
    height, length = draw.uniform(0.02, 0.15), math.exp(draw.uniform(*np.log((10, 500))))
    end = length + draw.uniform(50, 1500)
    return height * np.clip(np.minimum(after / length, 1 - (after - end) / length), 0, 1)


def _creeping(draw: np.random.Generator, after: Losses, deviation: float) -> Losses:
    height, length = draw.uniform(0.02, 0.15), math.exp(draw.uniform(*np.log((10, 500))))
    doublings = np.maximum(0, after - length) / draw.uniform(50, 400)
    return height * np.minimum(after / length, 1) * 2.0 ** np.minimum(doublings, 60)


_RISES: dict[str, Rise] = {
    "fast": _decaying(0.8, 2.0, 60, 300),
    "slow": _decaying(0.4, 0.8, 500, 2000),
    "level": _level,
    "divergence": _divergence,
    "non-finite": _not_finite,
    "blip": _blip(0.3, 2.0),
    "gross-blip": _blip(4.0, 6.0),
    "shift": _shift,
    "returning-shift": _returning_shift,
    "creeping": _creeping,
}
SMALL = ("shift", "returning-shift", "creeping")
NOISE = (0.02, 0.04, 0.08)
"""Standard deviations of the noise of small rises, in nats."""
SPIKES = ("fast", "slow", "level", "divergence", "non-finite")


def detections(losses: Sequence[float] | Losses, config: SpikeConfig | None = None) -> list[Event]:
    """Every event of the detector on a curve."""
    detector = SpikeDetector(config or SpikeConfig())
    events: list[Event] = []
    for step, loss in enumerate(np.asarray(losses).tolist()):
        events += detector.update(Observation(step, loss))
    return events


@dataclasses.dataclass(frozen=True)
class Row:
    """Suspicions, spikes and onsets on one kind of curve, over all seeds."""

    kind: str
    curves: int
    records: int
    suspected: int
    found: int
    """Spikes at the label."""
    false: int
    """Other spikes. A curve is followed to its first spike after the rise begins, where a run would
    be rolled back."""
    delays: list[int]
    confirmations: list[int]
    errors: list[int]


def measure(kind: str, seeds: Sequence[int], config: SpikeConfig | None = None) -> Row:
    """Run the detector on the curves of one kind."""
    row = Row(kind, len(seeds), 0, 0, 0, 0, [], [], [])
    records = suspected = found = false = 0
    for seed in seeds:
        labelled = curve(kind, seed)
        events = detections(labelled.losses, config)
        records += len(labelled.losses)
        suspected += any(event.kind == "suspect" for event in events)
        for spike in (event for event in events if event.kind == "spike"):
            if not is_labelled(spike, labelled):
                false += 1
                if labelled.spike and spike.step >= labelled.begins:
                    break
                continue
            found += 1
            alarm = next(event.step for event in events if event.onset == spike.onset)
            row.delays.append(alarm - labelled.onset)
            row.confirmations.append(spike.step - labelled.onset)
            row.errors.append(abs(spike.onset - labelled.onset))
            break
    return dataclasses.replace(row, records=records, suspected=suspected, found=found, false=false)


def is_labelled(spike: Event, labelled: Labelled) -> bool:
    """Whether the onset of a spike is near enough to the label for a correct rollback."""
    if not labelled.spike:
        return False
    return labelled.begins - NEAR_RECORDS <= spike.onset <= labelled.onset + NEAR_RECORDS


Target = tuple[str, float, float, bool]
"""Name, figure, target, and whether the target is an upper (or a lower) bound."""


@dataclasses.dataclass(frozen=True)
class SmallRises:
    """What happened on curves with a small rise, up to the first spike."""

    curves: int
    suspected: int
    new_levels: int
    """Curves with a new level."""
    spikes: int
    """Curves with a spike."""
    early: int
    """Curves with a spike that is dated to before the rise."""
    delays: list[int]
    """Records from the first changed one to the spike."""
    heights: list[float]
    """Nats above the undisturbed loss at the spike."""


def measure_small(kind: str, seeds: Sequence[int], config: SpikeConfig) -> SmallRises:
    """Run the detector on the curves of one kind of `SMALL`."""
    counts = dict.fromkeys(("suspect", "new-level", "spike", "early"), 0)
    delays, heights = [], []
    for seed in seeds:
        labelled = curve(kind, seed)
        assert labelled.rise is not None
        events = detections(labelled.losses, config)
        first = next((n for n, event in enumerate(events) if event.kind == "spike"), None)
        events = events if first is None else events[: first + 1]
        for kind_ in {event.kind for event in events} - {"healed"}:
            counts[kind_] += 1
        if first is not None:
            spike = events[-1]
            counts["early"] += spike.onset < labelled.begins - NEAR_RECORDS
            delays.append(spike.step - labelled.begins)
            heights.append(float(labelled.rise[max(0, spike.step - labelled.begins)]))
    suspected, new_levels, spikes, early = counts.values()
    return SmallRises(len(seeds), suspected, new_levels, spikes, early, delays, heights)


def small_table(seeds: Sequence[int], config: SpikeConfig) -> dict[str, SmallRises]:
    """Print a table of the small rises, and return its rows."""
    print(
        f"small rises, seeds {seeds[0]} to {seeds[-1]}\n"
        f"{'kind':16} curves suspected new-level rolled-back   delay to the spike   its height"
    )
    rows = {kind: measure_small(kind, seeds, config) for kind in SMALL}
    for kind, row in rows.items():
        spread = ["-", "-"]
        if row.delays:
            middle, most = np.quantile(row.delays, (0.5, 0.9))
            high, highest = np.quantile(row.heights, (0.5, 0.9))
            spread = [f"{middle:.0f}, 90 %: {most:.0f}", f"{high:.2f}, 90 %: {highest:.2f}"]
        print(
            f"{kind:16} {row.curves:6} {row.suspected:9} {row.new_levels:9} {row.spikes:11}   "
            f"{spread[0]:18}   {spread[1]}"
        )
    print()
    return rows


def small_targets(rows: dict[str, SmallRises]) -> list[Target]:
    """Precision and recall of the rollbacks on small rises."""
    true = rows["creeping"].spikes - rows["creeping"].early
    false = sum(row.spikes for row in rows.values()) - true
    return [
        ("precision, small rises", true / max(1, true + false), 0.95, False),
        ("recall, creeping", true / rows["creeping"].curves, 0.95, False),
    ]


def microseconds_a_step() -> float:
    """Duration of an update with every channel in use: the median of five repetitions."""
    losses, _ = clean(0, 4000)
    observations = [
        Observation(step, loss, gradient_norm=math.exp(math.sin(step * step)), loss_scale=1024.0)
        for step, loss in enumerate(losses.tolist())
    ]
    times = []
    for _ in range(5):
        detector = SpikeDetector(SpikeConfig())
        began = time.perf_counter()
        for observation in observations:
            detector.update(observation)
        times.append((time.perf_counter() - began) / len(observations))
    return 1e6 * statistics.median(times)


def targets(rows: dict[str, Row]) -> list[Target]:
    """The figures that have a target."""
    quiet = rows["clean"]
    spiky = [rows[kind] for kind in SPIKES]
    found = sum(row.found for row in spiky)
    false = sum(row.false for row in (*spiky, quiet, rows["blip"]))
    gentle = rows["slow"].delays + rows["level"].delays
    errors = [error for row in spiky for error in row.errors]
    return [
        ("false rollbacks / 100,000 clean records", 1e5 * quiet.false / quiet.records, 1, True),
        ("rollbacks on blips that heal", rows["blip"].false, 0, True),
        ("median delay, fast", statistics.median(rows["fast"].delays), 8, True),
        ("median delay, slow and level", statistics.median(gentle), 50, True),
        ("median delay, level alone", statistics.median(rows["level"].delays), 50, True),
        ("median delay, non-finite", statistics.median(rows["non-finite"].delays), 1, True),
        ("median onset error", statistics.median(errors), 10, True),
        ("precision", found / (found + false), 0.95, False),
        ("recall", found / sum(row.curves for row in spiky), 0.95, False),
        ("microseconds a step", microseconds_a_step(), 50, True),
    ]


def main() -> int:
    """Print the tables; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40, help="curves of each kind (%(default)s)")
    parser.add_argument("--curves", type=Path, help="a folder of recorded curves to report on too")
    options = parser.parse_args()
    seeds = range(REPORT_SEED, REPORT_SEED + options.seeds)
    rows = {}
    print(f"{'kind':11} curves records suspected found false  delay confirmed error")
    for kind in ("clean", "blip", *SPIKES, "gross-blip"):
        # False alarms are rare, so that more clean curves are needed.
        rows[kind] = row = measure(
            kind, seeds if kind != "clean" else range(seeds.start, seeds.start + 3 * len(seeds))
        )
        medians = [
            f"{statistics.median(values):g}" if values else "-"
            for values in (row.delays, row.confirmations, row.errors)
        ]
        print(
            f"{kind:11} {row.curves:6} {row.records:7} {row.suspected:9} {row.found:5} "
            f"{row.false:5} {medians[0]:>6} {medians[1]:>9} {medians[2]:>5}"
        )
    print(
        "delay: median number of records from the label to the suspicion that is confirmed later; "
        "error: of the onset.\nGross blips (4 to 6 nats) are confirmed at once.\n"
    )
    for first in (0, seeds.start):
        small = small_table(range(first, first + 3 * options.seeds), SpikeConfig())
    outcomes = [non_finite.outcome(case) for case in non_finite.CASES]
    print(non_finite.table(outcomes), end="\n\n")
    missed = sum(not each.as_wanted for each in outcomes)
    for name, figure, target, at_most in targets(rows) + small_targets(small):
        good = figure <= target if at_most else figure >= target
        missed += not good
        sign = "<=" if at_most else ">="
        print(f"{name:40} {figure:8.3g}   {sign} {target:<5g} {'' if good else 'MISSED'}")
    if options.curves:
        paths = sorted(options.curves.rglob("*.csv"))
        found = [detect(path.stem, read_curve(path), SpikeConfig(), 500) for path in paths]
        print("\n" + table(found))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

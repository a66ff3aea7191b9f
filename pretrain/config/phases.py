"""Phases of a run: stretches of steps with settings of their own.

Every setting of a step is a function of the recipe and the step. A phase's settings change the
recipe's, not those of the phase before; the optimizer's state, the numbers of the steps and the
order of the blocks go on. A run without phases is a run of one phase.

Read `Phase`, then `resolve`. `RunConfig` has what follows from all phases together.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.records import NonNegativeInt, decode
from pretrain.config.settings import flatten, is_within, merge

if TYPE_CHECKING:
    from pretrain.config.run import BatchConfig, RunConfig

MAY_CHANGE = (
    "data.corpus",
    "data.corpora",
    "data.sequence_length",
    "data.packing",
    "data.min_token_coverage",
    "objective",
    "batch",
    "optimizer.learning_rate",
    "schedule",
    "training.evaluation_interval",
    "training.evaluation_blocks",
    "training.checkpoint_interval",
    "training.checkpoints_kept",
)
"""What a phase may change, except `objective.name`."""


@dataclasses.dataclass(frozen=True)
class PhaseConfig:
    """One phase: its length, and what differs from the recipe in it."""

    name: str = ""
    """What messages call the phase, beside its number."""
    steps: NonNegativeInt = 0
    """Updates of the phase. 0, of the last phase only: up to training.steps."""
    tokens: NonNegativeInt = 0
    """Length in place of `steps`: as many updates as read so many tokens, padding included."""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other corpora, weights, sequence_length, packing or min_token_coverage. A corpus that an
    earlier phase read with the same length and packing goes on where that phase ended."""
    objective: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other settings of the objective, such as {probability: 0.15}; its name stays."""
    batch: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other sizes of batches. A ramp that is set here counts from the phase's first step."""
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Another learning_rate: the peak of the schedule."""
    schedule: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Another schedule. If anything is set here, warm-up and decay count from the phase's first
    step, `training.steps` stands for the phase's length, and decay_steps is 0 unless it is set
    here; else the run's schedule goes on."""
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Another evaluation_interval, evaluation_blocks, checkpoint_interval or checkpoints_kept."""

    @property
    def delta(self) -> dict[str, Any]:
        """What differs from the recipe, by section."""
        sections = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: each for name, each in sections.items() if isinstance(each, dict) and each}


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a run, with all its settings."""

    number: int
    """From 1."""
    name: str
    first_step: int
    end_step: int
    config: RunConfig
    """The recipe with the phase's settings, and without phases."""
    schedule_start: int
    """Step that the learning rate schedule counts from."""
    schedule_steps: int
    """Steps that the schedule is for."""
    ramp_start: int
    """Step that the ramp of the batch counts from."""

    def __str__(self) -> str:
        """What messages call the phase."""
        return f"phase {self.number}" + (f" ({self.name})" if self.name else "")


def resolve(config: RunConfig) -> tuple[Phase, ...]:
    """Return the phases of a run, first one first.

    Raises:
        ValueError: a phase changes what it may not, has no length, ends during a warm-up, or its
            settings do not fit together; names the phase.
    """
    steps = config.training.steps
    if not config.phases:
        return (Phase(1, "", 0, steps, config, 0, steps, 0),)
    base = dataclasses.asdict(config)
    del base["phases"]
    found: list[Phase] = []
    first = 0
    for number, settings in enumerate(config.phases, start=1):
        name = str(Phase(number, settings.name, 0, 0, config, 0, 0, 0))
        last = number == len(config.phases)
        try:
            found.append(_resolve_one(config, base, number, first, last))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        first = found[-1].end_step
    if first != steps:
        raise ValueError(
            f"phases: have {first:,} steps in all, training.steps is {steps}; accepted: "
            f"training.steps={first}, or a last phase without a length, which takes the rest"
        )
    for phase, following in itertools.zip_longest(found, found[1:]):
        goes_on = following is not None and following.schedule_start == phase.schedule_start
        warmup = phase.config.schedule.warmup_steps
        if not goes_on and phase.end_step <= phase.schedule_start + warmup:
            raise ValueError(
                f"{phase}: ends at step {phase.end_step}, during its warm-up: "
                f"schedule.warmup_steps {warmup} counted from step {phase.schedule_start}"
            )
    return tuple(found)


def _resolve_one(
    config: RunConfig, base: Mapping[str, Any], number: int, first: int, last: bool
) -> Phase:
    """Return the phase that begins at step `first`."""
    settings = config.phases[number - 1]
    delta = settings.delta
    before = flatten(base)
    for key, value in flatten(delta).items():
        fits = any(is_within(key, name) for name in MAY_CHANGE) and key != "objective.name"
        if not fits and before.get(key) != value:
            raise ValueError(
                f"{key}: a phase cannot change it; accepted: {', '.join(MAY_CHANGE)} (without "
                "objective.name)"
            )
    own = "schedule" in delta
    if own:  # another length than the run's
        delta["schedule"] = {"decay_steps": 0, **delta["schedule"]}
    merged = decode(type(config), merge(base, delta))
    ramp_start = first if {"ramp_from", "ramp_steps"} & {*delta.get("batch", {})} else 0
    length = _length(settings, merged, first, ramp_start, last)
    if own:
        merged.schedule.refuse_misfit(length, f"the {length} steps of the phase")
    return Phase(
        number,
        settings.name,
        first,
        first + length,
        merged,
        first if own else 0,
        length if own else config.training.steps,
        ramp_start,
    )


def _length(
    settings: PhaseConfig, config: RunConfig, first: int, ramp_start: int, last: bool
) -> int:
    """Number of steps of a phase."""
    if settings.steps and settings.tokens:
        raise ValueError(
            f"steps {settings.steps} beside tokens {settings.tokens}; accepted: one of both"
        )
    if settings.steps:
        return settings.steps
    if settings.tokens:
        blocks = -(-settings.tokens // config.data.sequence_length)
        sizes = Sizes(((0, ramp_start, config.batch),))
        begun = sizes.first_block(first)
        steps = range(first, first + blocks + 1)
        return bisect.bisect_left(steps, blocks, key=lambda step: sizes.first_block(step) - begun)
    if not last:
        raise ValueError("has neither steps nor tokens; only the last phase may leave them out")
    if first >= config.training.steps:
        raise ValueError(
            f"has no length, and the phases before it have {first} steps, no fewer than "
            f"training.steps {config.training.steps}; accepted: steps, or a larger training.steps"
        )
    return config.training.steps - first


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of global batches by step, over all phases; see `BatchConfig`, which has one size."""

    parts: tuple[tuple[int, int, BatchConfig], ...]
    """(first step, step that its ramp counts from, sizes), ascending; the first begins at 0."""

    def size(self, step: int) -> int:
        """Blocks that a step reads."""
        _, start, batch = [part for part in self.parts if part[0] <= step][-1]
        return batch.size(step - start)

    def first_block(self, step: int) -> int:
        """Number of blocks that the steps before a step read."""
        blocks = 0
        for (first, start, batch), end in self._ended():
            if first < step:
                last = int(min(step, end))
                blocks += batch.first_block(last - start) - batch.first_block(first - start)
        return blocks

    def changes(self) -> list[int]:
        """The steps that read more or fewer blocks than the step before."""
        grown = {
            start + change
            for (first, start, batch), end in self._ended()
            for change in batch.changes()
            if first < start + change < end
        }
        begun = {first for first, *_ in self.parts[1:] if self.size(first) != self.size(first - 1)}
        return sorted(grown | begun)

    def to_record(self) -> list[list[Any]]:
        """For a ledger: one list a part."""
        return [[first, start, dataclasses.asdict(batch)] for first, start, batch in self.parts]

    def _ended(self) -> Iterator[tuple[tuple[int, int, BatchConfig], float]]:
        """Each part with the first step after it."""
        ends = [first for first, *_ in self.parts[1:]]
        return zip(self.parts, [*ends, math.inf], strict=True)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Blocks with an order of their own: a corpus, cut in one way."""

    name: str
    """The corpus's, with the length and where needed the packing if a run cuts it in several ways;
    empty where a run has a single one without a name."""
    path: str
    """Folder of the corpus."""
    sequence_length: int
    packing: str

    @cached_property
    def key(self) -> tuple[str, int, str]:
        """Equal where the blocks are the same."""
        return str(Path(self.path)), self.sequence_length, self.packing


def streams(phases: Sequence[Phase]) -> tuple[list[Stream], list[list[int]]]:
    """Return what a run reads, in the order in which phases first name it.

    Returns:
        The streams, and for each phase the number of the stream of each of its corpora.
    """
    found: list[Stream] = []
    numbers: list[list[int]] = []
    for phase in phases:
        data, own = phase.config.data, []
        known = {stream.key: number for number, stream in enumerate(found)}
        for name, corpus in data.named_corpora.items():
            stream = Stream(name, corpus.path, data.sequence_length, data.packing)
            if stream.key not in known:
                found.append(stream)
            own.append(known.get(stream.key, len(found) - 1))
        numbers.append(own)
    pairs = zip(found, _names(found), strict=True)
    return [dataclasses.replace(stream, name=name) for stream, name in pairs], numbers


def _names(streams: Sequence[Stream]) -> list[str]:
    """Different names: of the corpora, and of one that is cut in several ways with the length."""
    if len(streams) == 1:
        return [streams[0].name]
    given = {s.key[0]: s.name for s in reversed(streams) if s.name}  # by a phase, to a path
    plain = [given.get(s.key[0], Path(s.path).name) for s in streams]
    longer = [f"{n}@{s.sequence_length}" for n, s in zip(plain, streams, strict=True)]
    packed = [f"{n}/{s.packing}" for n, s in zip(longer, streams, strict=True)]
    numbered = [f"{n}/{number}" for number, n in enumerate(longer)]
    forms = (plain, longer, packed)
    return [
        next((form[n] for form in forms if form.count(form[n]) == 1), numbered[n])
        for n in range(len(streams))
    ]


def weights(
    phases: Sequence[Phase], numbers: Sequence[Sequence[int]], count: int
) -> list[tuple[int, list[float]]]:
    """(first step, weight of each of `count` streams), ascending, from step 0 on."""
    stages: list[tuple[int, list[float]]] = []
    for phase, own in zip(phases, numbers, strict=True):
        all_stages = phase.config.data.weights()
        begun = [stage for stage in all_stages if stage[0] <= phase.first_step][-1:]
        later = [s for s in all_stages if phase.first_step < s[0] < phase.end_step]
        for step, of_corpora in (*begun, *later):
            row = [0.0] * count
            for number, weight in zip(own, of_corpora, strict=True):
                row[number] = weight
            stages.append((max(step, phase.first_step), row))
    return stages

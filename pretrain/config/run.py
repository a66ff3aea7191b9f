"""The recipe of a pretraining run, and its phases: stretches of steps with settings of their own.

Read `RunConfig`, then `Phase` and `resolve`. Every setting of a step is a function of the recipe
and the step. A phase's settings change the recipe's, not those of the phase before; the optimizer's
state, the numbers of the steps and the order of the blocks go on. A run without phases is a run of
one phase.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from data_prep.common.records import OneOf, decode
from pretrain.config.sections import (
    BatchConfig,
    DataConfig,
    FaultConfig,
    ForkConfig,
    ModelRecipe,
    NotifyConfig,
    OptimizerConfig,
    PhaseConfig,
    ProfileConfig,
    ScheduleConfig,
    Sizes,
    SpikeConfig,
    SupervisionConfig,
    TrainingConfig,
)
from pretrain.config.settings import flatten, is_within, merge
from pretrain.config.streams import Stream, named
from pretrain.model.config import ModelConfig
from pretrain.model.presets import build
from pretrain.objectives.base import ObjectiveSettings
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.registry import SETTINGS_BY_NAME

PHASES_MAY_CHANGE = (
    "data.corpus",
    "data.corpora",
    "data.sequence_length",
    "data.packing",
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
class RunConfig:
    """One pretraining run."""

    folder: str = ""
    """The run's folder: checkpoints, metrics, ledger, plots. Empty: runs/ and the recipe's name."""
    tracker: Literal["tensorboard", "wandb"] = "tensorboard"
    """What shows the run's curves; wandb: Weights & Biases beside TensorBoard."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelRecipe = dataclasses.field(default_factory=ModelRecipe)
    objective: Annotated[ObjectiveSettings, OneOf(SETTINGS_BY_NAME)] = dataclasses.field(
        default_factory=MaskedLMConfig
    )
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    spike: SpikeConfig = dataclasses.field(default_factory=SpikeConfig)
    supervision: SupervisionConfig = dataclasses.field(default_factory=SupervisionConfig)
    fault: FaultConfig = dataclasses.field(default_factory=FaultConfig)
    notify: NotifyConfig = dataclasses.field(default_factory=NotifyConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)
    phases: list[PhaseConfig] = dataclasses.field(default_factory=list)
    """Stretches of steps with other settings, such as [{steps: 20000}, {steps: 4000, objective:
    {probability: 0.15}, data: {sequence_length: 2048}}]. Each changes this recipe, not the phase
    before. Empty: the same settings from the first step to the last."""
    fork_from: ForkConfig = dataclasses.field(default_factory=ForkConfig)

    @cached_property
    def resolved_phases(self) -> tuple[Phase, ...]:
        """The phases with all their settings; a run without phases is one phase."""
        return resolve(self)

    def phase(self, step: int) -> Phase:
        """The phase of a step; of `training.steps` and later, the last one."""
        begun = [phase for phase in self.resolved_phases if phase.first_step <= step]
        return begun[-1]

    @property
    def sizes(self) -> Sizes:
        """Sizes of batches by step."""
        phases = self.resolved_phases
        return Sizes(tuple((p.first_step, p.config.batch.global_batch_size) for p in phases))

    @cached_property
    def _streams(self) -> tuple[list[Stream], list[list[int]]]:
        """The streams, and for each phase the number of the stream of each of its corpora."""
        found: list[Stream] = []
        numbers: list[list[int]] = []
        for data in (phase.config.data for phase in self.resolved_phases):
            known = {stream.key: number for number, stream in enumerate(found)}
            numbers.append([])
            for name, corpus in data.named_corpora.items():
                stream = Stream(name, corpus.path, data.sequence_length, data.packing)
                if stream.key not in known:
                    found.append(stream)
                numbers[-1].append(known.get(stream.key, len(found) - 1))
        return named(found), numbers

    @property
    def streams(self) -> list[Stream]:
        """What has an order of its own: each corpus, in each way in which phases cut it.

        In the order in which phases first name it.
        """
        return self._streams[0]

    @property
    def stream_names(self) -> list[list[str]]:
        """For each phase, the name of the stream of each of its corpora."""
        found, numbers = self._streams
        return [[found[number].name for number in of_phase] for of_phase in numbers]

    def weights(self) -> list[tuple[int, list[float]]]:
        """(first step, weight of each of `streams`) of each phase."""
        streams, numbers = self._streams
        found = []
        for phase, own in zip(self.resolved_phases, numbers, strict=True):
            row = [0.0] * len(streams)
            for number, corpus in zip(own, phase.config.data.named_corpora.values(), strict=True):
                row[number] = corpus.weight
            found.append((phase.first_step, row))
        return found

    def deepspeed_arguments(self, world_size: int) -> tuple[str, BatchConfig, float, int]:
        """Return what `deepspeed.read_settings` takes.

        The batch is the first phase's, as none may have the recipe's own. Its sizes change nothing
        that DeepSpeed computes.
        """
        batch, clipping = self.phase(0).config.batch, self.optimizer.gradient_clipping
        return self.training.deepspeed, batch, clipping, world_size

    def architecture(self, vocab_size: int) -> ModelConfig:
        """Return the model's architecture for a corpus of `vocab_size` ids.

        Raises:
            ValueError: a value that ModelConfig refuses.
        """
        model = self.model
        overrides = {**model.overrides, "pair_head": self.objective.pairs}
        return build(model.size, model.variant, vocab_size, overrides)

    def __post_init__(self) -> None:
        """Refuse values of different sections that do not fit together."""
        if self.phases:
            _ = self.resolved_phases  # refuses
        steps = self.training.steps
        if self.profile.steps and self.profile.steps[0] >= steps:
            raise ValueError(
                f"profile.steps {self.profile.steps}: must begin below training.steps {steps}"
            )
        self.schedule.refuse_misfit(steps, f"training.steps {steps}")
        if self.schedule.minimum_learning_rate > self.optimizer.learning_rate:
            raise ValueError(
                f"schedule.minimum_learning_rate {self.schedule.minimum_learning_rate} is above "
                f"optimizer.learning_rate {self.optimizer.learning_rate}"
            )
        needed = self.spike.margin_steps + self.spike.longest_alarm
        if self.short_reach and steps > needed:
            raise ValueError(self.short_reach)

    @property
    def short_reach(self) -> str:
        """Why no rollback would be possible once a spike is confirmed; "" where one is.

        A run of fewer steps than it takes to confirm a spike is only warned.
        """
        reach = (self.training.checkpoints_kept - 1) * self.training.checkpoint_interval
        needed = self.spike.margin_steps + self.spike.longest_alarm
        if reach >= needed:
            return ""
        return (
            f"(training.checkpoints_kept - 1) x training.checkpoint_interval = {reach} steps is "
            "below spike.margin_steps + the larger of spike.confirm_steps and spike.patience + 1 "
            f"= {needed}: when a spike is confirmed, no checkpoint from before it would be left; "
            "set training.checkpoints_kept to "
            f"{math.ceil(needed / self.training.checkpoint_interval) + 1} or more, or a longer "
            "interval"
        )


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
        return (Phase(1, "", 0, steps, config, 0, steps),)
    base = dataclasses.asdict(config)
    del base["phases"]
    found: list[Phase] = []
    first = 0
    for number, settings in enumerate(config.phases, start=1):
        name = str(Phase(number, settings.name, 0, 0, config, 0, 0))
        last = number == len(config.phases)
        try:
            found.append(_resolve_one(config, base, number, first, last))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        first = found[-1].end_step
    if first != steps:
        raise ValueError(
            f"phases: have {first:,} steps in all, training.steps is {steps}; set "
            f"training.steps={first}, or leave out the length of the last phase, which then takes "
            "the rest"
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
        fits = any(is_within(key, name) for name in PHASES_MAY_CHANGE) and key != "objective.name"
        if not fits and before.get(key) != value:
            raise ValueError(
                f"{key}: a phase cannot change it; accepted: {', '.join(PHASES_MAY_CHANGE)} "
                "(without objective.name)"
            )
    own = "schedule" in delta
    if own:  # another length than the run's
        delta["schedule"] = {"decay_steps": 0, **delta["schedule"]}
    merged = decode(type(config), merge(base, delta))
    if not (settings.steps or last):
        raise ValueError("has no steps; only the last phase may leave them out")
    length = settings.steps or config.training.steps - first
    if length < 1:
        raise ValueError(
            f"has no length, and the phases before it have {first} steps, no fewer than "
            f"training.steps {config.training.steps}; give it steps, or a larger training.steps"
        )
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
    )

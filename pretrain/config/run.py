"""The recipe of a pretraining run, and segments: what holds from a step of a run on.

Read `RunConfig`, then `Segments`. A recipe gives a segment for each of its phases, one without
phases. A phase's settings change the recipe's, not those of the phase before; the optimizer's
state, the numbers of the steps and the order of the blocks go on. In a run, other recipes may
follow from some step on (records/segments.py). Every setting of a step is a function of the
segments and the step.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from data_prep.common.files import named_errors
from data_prep.common.records import OneOf, decode
from pretrain.config import sections
from pretrain.config.changes import PHASES_MAY_CHANGE
from pretrain.config.settings import flatten, is_within, merge
from pretrain.model.config import ModelConfig
from pretrain.model.presets import build
from pretrain.objectives.base import ObjectiveSettings
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.registry import SETTINGS_BY_NAME


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One pretraining run."""

    folder: str = ""
    """The run's folder: checkpoints, metrics, ledger, plots. Empty: runs/ and the recipe's name."""
    tracker: Literal["tensorboard", "wandb"] = "tensorboard"
    """What shows the run's curves; wandb: Weights & Biases beside TensorBoard."""
    data: sections.DataConfig = sections.DataConfig()
    model: sections.ModelRecipe = sections.ModelRecipe()
    objective: Annotated[ObjectiveSettings, OneOf(SETTINGS_BY_NAME)] = MaskedLMConfig()
    batch: sections.BatchConfig = sections.BatchConfig()
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    schedule: sections.ScheduleConfig = sections.ScheduleConfig()
    training: sections.TrainingConfig = sections.TrainingConfig()
    spike: sections.SpikeConfig = sections.SpikeConfig()
    supervision: sections.SupervisionConfig = sections.SupervisionConfig()
    fault: sections.FaultConfig = sections.FaultConfig()
    notify: sections.NotifyConfig = sections.NotifyConfig()
    profile: sections.ProfileConfig = sections.ProfileConfig()
    phases: list[sections.PhaseConfig] = dataclasses.field(default_factory=list)
    """Stretches of steps with other settings, such as [{steps: 20000}, {steps: 4000, objective:
    {probability: 0.15}, data: {sequence_length: 2048}}]. Each changes this recipe, not the phase
    before. Empty: the same settings from the first step to the last."""

    @cached_property
    def segments(self) -> "Segments":
        """What holds in each step of a run that has this recipe from its first step on."""
        return Segments(resolve(self))

    def deepspeed_arguments(self, world_size: int) -> tuple[str, sections.BatchConfig, float, int]:
        """Return what `deepspeed.read_settings` takes.

        The batch is the first phase's, as none may have the recipe's own. Of what DeepSpeed
        computes, its sizes decide only after how many steps fp16's loss scale doubles.
        """
        batch, clipping = self.segments.at(0).config.batch, self.optimizer.gradient_clipping
        return self.training.deepspeed, batch, clipping, world_size

    def architecture(self, vocab_size: int) -> ModelConfig:
        """Return the model's architecture for a corpus of `vocab_size` ids.

        Raises:
            ValueError: a value that ModelConfig refuses.
        """
        recipe = self.model
        with named_errors("model.overrides", "."):
            model = build(recipe.size, recipe.variant, vocab_size, recipe.overrides)
        # That a causal model reads no pairs is refused by the objective's name.
        return dataclasses.replace(model, pair_head=self.objective.pairs and not model.causal)

    def __post_init__(self) -> None:
        """Refuse values of different sections that do not fit together."""
        if self.phases:
            _ = self.segments  # checks them
        steps = self.training.steps
        if self.profile.steps and self.profile.steps[0] >= steps:
            raise ValueError(
                f"profile.steps {self.profile.steps}: must begin below training.steps {steps}"
            )
        self.schedule.check_fit(steps, f"training.steps {steps}")
        if self.schedule.minimum_learning_rate > self.optimizer.learning_rate:
            raise ValueError(
                f"schedule.minimum_learning_rate {self.schedule.minimum_learning_rate} is above "
                f"optimizer.learning_rate {self.optimizer.learning_rate}"
            )
        if self.short_reach and steps > self.spike.least_reach:
            raise ValueError(self.short_reach)

    @property
    def short_reach(self) -> str:
        """Why no rollback would be possible once a spike is confirmed; "" where one is.

        A run of fewer steps than it takes to confirm a spike is only warned.
        """
        reach = (self.training.checkpoints_kept - 1) * self.training.checkpoint_interval
        needed = self.spike.least_reach
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
class Sizes:
    """Blocks that each step of a run reads."""

    parts: tuple[tuple[int, int], ...]
    """(first step, blocks of each step from it on), ascending; the first begins at 0."""

    def size(self, step: int) -> int:
        """Blocks that a step reads."""
        return [blocks for first, blocks in self.parts if first <= step][-1]

    def first_block(self, step: int) -> int:
        """Number of blocks that the steps before a step read."""
        ends = [*(first for first, _ in self.parts[1:]), step]
        parts = zip(self.parts, ends, strict=True)
        return sum(blocks * max(0, min(step, end) - first) for (first, blocks), end in parts)


@dataclasses.dataclass(frozen=True)
class BlockSource:
    """Blocks with an order of their own: a corpus, cut in one way. Equal under any name."""

    path: str
    """Folder of the corpus, as `pathlib` writes it."""
    sequence_length: int
    packing: str
    name: str = dataclasses.field(compare=False)
    """The corpus's, with the length and where needed the packing if a run cuts it in several ways;
    empty where a run has a single one without a name."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Steps in a row that have the same settings."""

    name: str
    """Such as "phase 2 (short)"; empty where the recipe has no phases."""
    first_step: int
    end_step: int
    config: RunConfig
    """The recipe with the phase's settings, and without phases."""
    schedule_start: int
    """Step that the learning rate schedule counts from."""
    schedule_steps: int
    """Steps that the schedule is for."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of a run."""

    parts: tuple[Segment, ...]
    """From step 0 on; each begins where the one before ends."""

    @classmethod
    def of(cls, recipes: Sequence[tuple[int, RunConfig]]) -> "Segments":
        """The segments of a run whose recipes follow each other.

        Args:
            recipes: (first step, recipe), ascending; each holds up to the next one's first step.
        """
        parts: list[Segment] = []
        for first, recipe in recipes:
            parts = [
                dataclasses.replace(part, end_step=min(part.end_step, first))
                for part in parts
                if part.first_step < first
            ]
            parts += [
                dataclasses.replace(part, first_step=max(part.first_step, first))
                for part in recipe.segments.parts
                if part.end_step > first
            ]
        return cls(tuple(parts))

    def at(self, step: int) -> Segment:
        """The segment of a step; of steps after the end, the last one."""
        return [part for part in self.parts if part.first_step <= step][-1]

    def learning_rate(self, step: int) -> float:
        """Learning rate of update `step`, counted from 0.

        It rises linearly from the minimum at update 0 to the peak at update `warmup`. After that

            cosine: minimum + (peak - minimum) / 2 * (1 + cos(pi * (step - warmup) / period))
            linear: minimum + (peak - minimum) * max(0, steps - step) / (steps - warmup)
            constant: peak
            wsd: minimum + (peak - minimum) * f(1 - (steps - step) / cooldown_steps) from update
                steps - cooldown_steps on, where f(x) = 1 - sqrt(x), which ends lower than
                1 - x; peak before (Hägele et al. 2024, section 3)

        where `steps` is `training.steps` and period = steps - warmup, or of an overestimated-cosine
        floor(1.1 * steps), as in EIFY/fairseq, so that the published run ends at 84 % of the
        period.

        In a phase that has a schedule of its own, updates count from its first, and its length
        takes the place of `training.steps`. The other phases share the run's schedule; each may
        have another peak.
        """
        part = self.at(step)
        config, steps, step = part.config, part.schedule_steps, step - part.schedule_start
        peak, minimum = config.optimizer.learning_rate, config.schedule.minimum_learning_rate
        warmup = config.schedule.warmup_steps
        if step < warmup:
            return minimum + (peak - minimum) * step / warmup
        if config.schedule.name == "constant":
            return peak
        if config.schedule.name == "linear":
            return minimum + (peak - minimum) * max(0, steps - step) / (steps - warmup)
        if config.schedule.name == "wsd":
            cooldown = config.schedule.cooldown_steps
            if step < steps - cooldown or not cooldown:
                return peak
            left = (steps - step) / cooldown
            return minimum + (peak - minimum) * (1.0 - math.sqrt(1.0 - left))
        overestimated = config.schedule.name == "overestimated-cosine"
        period = 11 * steps // 10 if overestimated else steps - warmup
        phase = (step - warmup) / period
        return minimum + 0.5 * (peak - minimum) * (1.0 + math.cos(math.pi * phase))

    @property
    def sizes(self) -> Sizes:
        """Sizes of batches by step."""
        return Sizes(tuple((p.first_step, p.config.batch.global_batch_size) for p in self.parts))

    @cached_property
    def _weights(self) -> list[dict[BlockSource, float]]:
        """For each segment, the weight of the source of each of its corpora."""
        return [
            {
                BlockSource(str(Path(c.path)), data.sequence_length, data.packing, name): c.weight
                for name, c in data.named_corpora.items()
            }
            for data in (part.config.data for part in self.parts)
        ]

    @cached_property
    def sources(self) -> list[BlockSource]:
        """What has an order of its own: each corpus, in each way in which segments cut it.

        In the order in which segments first name it.
        """
        return _named([*dict.fromkeys(itertools.chain(*self._weights))])

    def weights(self) -> list[tuple[int, list[float]]]:
        """(first step, weight of each of `sources`) of each segment."""
        return [
            (part.first_step, [own.get(source, 0.0) for source in self.sources])
            for part, own in zip(self.parts, self._weights, strict=True)
        ]


def _named(sources: Sequence[BlockSource]) -> list[BlockSource]:
    """Return sources with different names: of the corpora, with the length where one has several.

    Where the length is the same, too, the packing or a number follows.
    """
    if len(sources) == 1:
        return [*sources]
    given = {s.path: s.name for s in reversed(sources) if s.name}  # by a phase, to a path
    plain = [given.get(s.path, Path(s.path).name) for s in sources]
    longer = [f"{n}@{s.sequence_length}" for n, s in zip(plain, sources, strict=True)]
    packed = [f"{n}/{s.packing}" for n, s in zip(longer, sources, strict=True)]
    found = []
    for number, source in enumerate(sources):
        forms = (form[number] for form in (plain, longer, packed) if form.count(form[number]) == 1)
        found.append(dataclasses.replace(source, name=next(forms, f"{longer[number]}/{number}")))
    return found


def resolve(config: RunConfig) -> tuple[Segment, ...]:
    """Return the segments of a recipe, one for each phase.

    Raises:
        ValueError: a phase changes what it may not, has no length, ends during a warm-up, or its
            settings do not fit together; names the phase.
    """
    steps = config.training.steps
    if not config.phases:
        return (Segment("", 0, steps, config, 0, steps),)
    found: list[Segment] = []
    first = 0
    for number, settings in enumerate(config.phases, start=1):
        name = f"phase {number}" + (f" ({settings.name})" if settings.name else "")
        with named_errors(name):
            last = number == len(config.phases)
            found.append(_resolve_one(config, settings, name, first, last))
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
                f"{phase.name}: ends at step {phase.end_step}, during its warm-up: "
                f"schedule.warmup_steps {warmup} counted from step {phase.schedule_start}"
            )
    return tuple(found)


def _resolve_one(
    config: RunConfig, settings: sections.PhaseConfig, name: str, first: int, last: bool
) -> Segment:
    """Return the segment of the phase that begins at step `first`."""
    base, delta = {**dataclasses.asdict(config), "phases": []}, settings.delta
    before = flatten(base)
    for key, value in flatten(delta).items():
        fits = any(is_within(key, name) for name in PHASES_MAY_CHANGE) and key != "objective.name"
        if not fits and before.get(key) != value:
            raise ValueError(
                f"{key}: a phase cannot change it; accepted: {', '.join(PHASES_MAY_CHANGE)} "
                "(without objective.name)"
            )
    own = "schedule" in delta
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
        merged.schedule.check_fit(length, f"the {length} steps of the phase")
    schedule = (first, length) if own else (0, config.training.steps)
    return Segment(name, first, first + length, merged, *schedule)

"""What a run is made of, as typed records (recipe.py loads them).

Read `RunConfig` first. Every number has one owner: what can be computed from another field is a
property, and DeepSpeed's JSON takes its sizes from here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pretrain.model.config import ModelConfig
from pretrain.model.presets import SIZES, VARIANTS
from pretrain.settings import check, unknown_key


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, cut how."""

    corpus: str = ""
    """Folder that `data_prep prepare` made."""
    sequence_length: int = 2048
    """Tokens of a block, `<s>` included."""
    packing: str = "best-fit"
    """How documents fill blocks: best-fit (each read by itself), or complete (as they come, read as
    one text: the original's way)."""
    vocab_size: int = 0
    """Ids that the corpus must have been encoded with, `<mask>` included; 0: any number."""

    def __post_init__(self) -> None:
        """Refuse lengths without room for text."""
        length = self.sequence_length
        check(length >= 2, "data.sequence_length", length, "at least 2: <s> and a token")
        known = ("best-fit", "complete")
        check(self.packing in known, "data.packing", self.packing, " or ".join(known))
        check(self.vocab_size >= 0, "data.vocab_size", self.vocab_size, "0 (any) or above")


@dataclasses.dataclass(frozen=True)
class ModelRecipe:
    """A named model and what differs from it."""

    size: str = "base"
    variant: str = "baseline"
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ModelConfig that differ from the named model's."""

    def __post_init__(self) -> None:
        """Refuse names that are not in the table."""
        check(self.size in SIZES, "model.size", self.size, f"one of {', '.join(SIZES)}")
        check(
            self.variant in VARIANTS,
            "model.variant",
            self.variant,
            f"one of {', '.join(VARIANTS)}",
        )
        known = {field.name for field in dataclasses.fields(ModelConfig)} - {"vocab_size"}
        for name in self.overrides:
            if name not in known:
                raise ValueError(unknown_key(f"model.overrides.{name}", name, known))


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
    """How tokens are hidden (Devlin et al. 2019: 80 % `<mask>`, 10 % random, 10 % kept)."""

    probability: float = 0.15
    keep_probability: float = 0.1
    random_probability: float = 0.1
    targets: str = "masked"
    """What is predicted: the chosen tokens, or all (with keep and random 0: self-masking)."""
    whole_words: bool = False
    """Choose words, not tokens: a word begins where a token begins with white space."""

    def __post_init__(self) -> None:
        """Refuse what is no probability."""
        for name in ("probability", "keep_probability", "random_probability"):
            value = getattr(self, name)
            check(0.0 <= value <= 1.0, f"masking.{name}", value, "in [0, 1]")
        known = ("masked", "all")
        check(self.targets in known, "masking.targets", self.targets, " or ".join(known))
        check(self.probability > 0.0, "masking.probability", self.probability, "above 0")
        share = self.keep_probability + self.random_probability
        check(share <= 1.0, "masking.keep_probability + random_probability", share, "at most 1")


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """Blocks an optimiser step, and blocks a forward pass."""

    global_batch_size: int = 512
    micro_batch_size: int = 4

    def __post_init__(self) -> None:
        """Refuse sizes that do not divide."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check(value > 0, f"batch.{field.name}", value, "a positive number")
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch.global_batch_size {self.global_batch_size} is not a multiple of "
                f"batch.micro_batch_size {self.micro_batch_size}"
            )

    def accumulation_steps(self, ranks: int) -> int:
        """Micro-batches a rank takes for one step.

        Raises:
            ValueError: the ranks do not divide the batch.
        """
        if self.global_batch_size % (self.micro_batch_size * ranks):
            raise ValueError(
                f"batch.global_batch_size {self.global_batch_size} is not a multiple of "
                f"batch.micro_batch_size {self.micro_batch_size} x {ranks} ranks"
            )
        return self.global_batch_size // (self.micro_batch_size * ranks)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam with decoupled weight decay (optimizers.py)."""

    learning_rate: float = 6e-4
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    weight_decay_on: str = "all"
    """Which parameters decay: all, as in the original, or matrices (no bias, no layer norm)."""
    gradient_clipping: float = 0.0
    """Largest global gradient norm; 0 does not clip."""

    def __post_init__(self) -> None:
        """Refuse what no optimiser takes."""
        check(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "above 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            check(0.0 <= value < 1.0, f"optimizer.{name}", value, "in [0, 1)")
        for name in ("epsilon", "weight_decay", "gradient_clipping"):
            value = getattr(self, name)
            check(value >= 0, f"optimizer.{name}", value, "0 or above")
        known = ("all", "matrices")
        value = self.weight_decay_on
        check(value in known, "optimizer.weight_decay_on", value, " or ".join(known))


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the steps; see schedules.py for the formulas."""

    name: str = "cosine"
    warmup_steps: int = 10000
    minimum_learning_rate: float = 6e-5
    overestimate: float = 1.1
    """The cosine's half period over the run's steps: above 1, the run ends before its minimum
    (Hoffmann et al. 2022, appendix B; 1.1 in the original)."""

    def __post_init__(self) -> None:
        """Refuse unknown schedules."""
        check(self.name in ("cosine", "linear"), "schedule.name", self.name, "cosine or linear")
        check(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "0 or above")
        check(self.overestimate >= 1, "schedule.overestimate", self.overestimate, "1 or above")
        minimum = self.minimum_learning_rate
        check(minimum >= 0, "schedule.minimum_learning_rate", minimum, "0 or above")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long, on how many ranks, with which engine."""

    steps: int = 133082
    seed: int = 1
    deepspeed: str = "zero1_bf16"
    """A file of ds_configs/ (without .json), or a path to a DeepSpeed JSON."""
    ranks: int = 0
    """Processes that `supervise` starts on this machine; 0: one a GPU, or 2 on a CPU."""
    data_workers: int = 0
    """Processes a rank that make the next steps' batches ahead; 0: each when it is needed."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory for a forward pass more."""
    compile: bool = False
    """Let torch.compile make the forward and backward passes."""
    evaluation_interval: int = 5000
    vocabulary_multiple: int = 128
    """The token table has a multiple of so many rows while it is trained, which makes its matrix
    multiplications faster; nothing that comes out shows it."""
    evaluation_blocks: int = 0
    """Validation blocks read at each evaluation; 0: all."""
    checkpoint_interval: int = 500
    checkpoints_kept: int = 5

    def __post_init__(self) -> None:
        """Refuse a run that cannot be."""
        check(self.steps > 0, "training.steps", self.steps, "a positive number")
        for name in ("evaluation_interval", "checkpoint_interval", "vocabulary_multiple"):
            check(getattr(self, name) > 0, f"training.{name}", getattr(self, name), "above 0")
        for name in ("seed", "ranks", "evaluation_blocks", "data_workers"):
            value = getattr(self, name)
            check(value >= 0, f"training.{name}", value, "0 or above")
        check(
            self.checkpoints_kept >= 2,
            "training.checkpoints_kept",
            self.checkpoints_kept,
            "at least 2: a rollback needs one from before the spike",
        )


@dataclasses.dataclass(frozen=True)
class SpikeConfig:
    """When a loss counts as a spike, and how often a run may be rolled back (spikes.py)."""

    window: int = 256
    """Losses that judge the next one."""
    minimum_history: int = 64
    deviations: float = 6.0
    """Distance from the window's median, in robust standard deviations, that makes an outlier."""
    patience: int = 6
    """Outliers among the last `patience + 2` losses that make a suspicion."""
    confirm_steps: int = 50
    """Steps a suspected loss has to return before it is a spike."""
    gross_nats: float = 3.0
    """A rise of the suspected losses' median over the window's that needs no waiting."""
    margin_steps: int = 100
    """A rollback goes to a checkpoint at least this far before the spike's onset."""
    max_rollbacks: int = 3
    max_crashes: int = 3
    """Relaunches without a new checkpoint in between."""
    hang_seconds: float = 1800.0
    """Silence of a running attempt that counts as a hang."""

    def __post_init__(self) -> None:
        """Refuse a detector that could never speak, or speaks of everything."""
        for name in ("window", "minimum_history", "deviations", "patience", "hang_seconds"):
            check(getattr(self, name) > 0, f"spike.{name}", getattr(self, name), "above 0")
        others = ("confirm_steps", "gross_nats", "margin_steps", "max_rollbacks", "max_crashes")
        for name in others:
            check(getattr(self, name) >= 0, f"spike.{name}", getattr(self, name), "0 or above")
        if self.minimum_history > self.window:
            raise ValueError(
                f"spike.minimum_history {self.minimum_history} is above spike.window "
                f"{self.window}: the window would never hold enough to judge by"
            )

    @property
    def longest_alarm(self) -> int:
        """Most steps from a spike's onset to its confirmation."""
        return max(self.confirm_steps, self.patience + 1)


@dataclasses.dataclass(frozen=True)
class FaultConfig:
    """A fault to rehearse: the labels of steps [first_step, last_step) become random tokens.

    It strikes only while the order's seed is the recipe's own: a plain relaunch runs into it
    again, a reseed escapes, as with a real conjunction of data and state.
    """

    kind: str = "none"
    first_step: int = 0
    last_step: int = 0

    def __post_init__(self) -> None:
        """Refuse faults we do not know."""
        check(
            self.kind in ("none", "random-labels"),
            "fault.kind",
            self.kind,
            "none or random-labels",
        )

    def strikes(self, step: int, seed: int, recipe_seed: int) -> bool:
        """Whether the batch of `step` is to be spoiled."""
        return (
            self.kind != "none" and seed == recipe_seed and self.first_step <= step < self.last_step
        )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One pretraining run."""

    folder: str = ""
    """Where the run lives: checkpoints, metrics, ledger, plots."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelRecipe = dataclasses.field(default_factory=ModelRecipe)
    masking: MaskingConfig = dataclasses.field(default_factory=MaskingConfig)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    spike: SpikeConfig = dataclasses.field(default_factory=SpikeConfig)
    fault: FaultConfig = dataclasses.field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        """Refuse pairs of values that do not fit."""
        if self.schedule.warmup_steps >= self.training.steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} is not below "
                f"training.steps {self.training.steps}: the run would end while warming up"
            )
        if self.schedule.minimum_learning_rate > self.optimizer.learning_rate:
            raise ValueError(
                f"schedule.minimum_learning_rate {self.schedule.minimum_learning_rate} is above "
                f"optimizer.learning_rate {self.optimizer.learning_rate}"
            )
        reach = (self.training.checkpoints_kept - 1) * self.training.checkpoint_interval
        needed = self.spike.margin_steps + self.spike.longest_alarm
        if reach < needed:
            raise ValueError(
                f"(training.checkpoints_kept - 1) x training.checkpoint_interval = {reach} steps "
                "is below spike.margin_steps + the larger of spike.confirm_steps and "
                f"spike.patience + 1 = {needed}: when a spike is confirmed, no checkpoint from "
                "before it would be left"
            )

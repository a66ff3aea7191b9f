"""What a run is made of, as typed records (recipe.py loads them).

Read `RunConfig` first. Every number has one owner: what can be computed from another field is a
property, and DeepSpeed's JSON takes its sizes from here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pretrain.config.settings import check, unknown_key
from pretrain.data.sources import SOURCES
from pretrain.model.config import ATTENTION_BACKENDS, ModelConfig
from pretrain.model.presets import SIZES, VARIANTS
from pretrain.objectives.base import ObjectiveSettings
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.registry import SETTINGS_BY_NAME


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
        check(self.packing in SOURCES, "data.packing", self.packing, " or ".join(SOURCES))
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
class BatchConfig:
    """Blocks an optimiser step, and blocks a forward pass."""

    global_batch_size: int = 512
    micro_batch_size: int = 4
    ramp_from: int = 0
    """Blocks of the first steps; the batch grows by as many until it is whole. 0: whole at once."""
    ramp_steps: int = 0
    """Steps at each size below the whole one."""

    def __post_init__(self) -> None:
        """Refuse sizes that do not divide."""
        for name in ("global_batch_size", "micro_batch_size"):
            check(
                getattr(self, name) > 0, f"batch.{name}", getattr(self, name), "a positive number"
            )
        for name in ("ramp_from", "ramp_steps"):
            check(getattr(self, name) >= 0, f"batch.{name}", getattr(self, name), "0 or above")
        if bool(self.ramp_from) != bool(self.ramp_steps):
            raise ValueError(
                f"batch.ramp_from {self.ramp_from} with batch.ramp_steps {self.ramp_steps}: a ramp "
                "has both above 0, no ramp has neither"
            )
        if self.global_batch_size % self._smallest:
            raise ValueError(
                f"batch.global_batch_size {self.global_batch_size} is not a multiple of "
                f"batch.ramp_from {self.ramp_from}"
            )
        self._refuse_remainder(self.micro_batch_size, "")

    @property
    def _smallest(self) -> int:
        """Blocks of the first step, of which every size is a multiple."""
        return self.ramp_from or self.global_batch_size

    def _refuse_remainder(self, divisor: int, words: str) -> None:
        if self._smallest % divisor:
            name = "ramp_from" if self.ramp_from else "global_batch_size"
            raise ValueError(
                f"batch.{name} {self._smallest} is not a multiple of "
                f"batch.micro_batch_size {self.micro_batch_size}{words}"
            )

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches a rank takes for a whole batch.

        Raises:
            ValueError: the ranks do not divide the batch, at the start of its ramp or later.
        """
        self._refuse_remainder(self.micro_batch_size * world_size, f" x {world_size} ranks")
        return self.global_batch_size // (self.micro_batch_size * world_size)

    def size(self, step: int) -> int:
        """Blocks that a step reads."""
        return self._smallest * (self._stage(step) + 1)

    def first_block(self, step: int) -> int:
        """Place of a step's first block: what the steps before it have read."""
        stage = self._stage(step)
        # 1 + 2 + ... + stage units for ramp_steps each, and the steps at this size since.
        units = self.ramp_steps * stage * (stage + 1) // 2
        return self._smallest * (units + (step - self.ramp_steps * stage) * (stage + 1))

    def changes(self) -> list[int]:
        """The steps that read more than the one before."""
        stages = self.global_batch_size // self._smallest
        return [self.ramp_steps * stage for stage in range(1, stages)]

    def _stage(self, step: int) -> int:
        """How often the batch has grown."""
        last = self.global_batch_size // self._smallest - 1
        return min(step // self.ramp_steps, last) if self.ramp_steps else 0


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
    """Where the warm-up starts, and where the decay leads to."""
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
    data_workers: int = 0
    """Processes a rank that make the next steps' batches ahead; 0: each when it is needed."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory for a forward pass more."""
    compile: bool = False
    """Let torch.compile make each layer, the head and the loss, forwards and backwards."""
    attention_backend: str = "dense"
    """How attention is computed: dense (any device), flex (FlexAttention, on GPUs), or flex-flash
    (its kernels for Hopper and later); see model/config.py."""
    evaluation_interval: int = 5000
    vocabulary_multiple: int = 128
    """The token table has a multiple of so many rows while it is trained, which makes its matrix
    multiplications faster; nothing that comes out shows it."""
    evaluation_blocks: int = 0
    """Validation blocks read at each evaluation; 0: all."""
    checkpoint_interval: int = 500
    checkpoints_kept: int = 5
    """Of the newest. Those that a rollback may go back to are kept as well (decisions.py)."""

    def __post_init__(self) -> None:
        """Refuse a run that cannot be."""
        check(self.steps > 0, "training.steps", self.steps, "a positive number")
        known = ATTENTION_BACKENDS
        value = self.attention_backend
        check(value in known, "training.attention_backend", value, f"one of {', '.join(known)}")
        for name in ("evaluation_interval", "checkpoint_interval", "vocabulary_multiple"):
            check(getattr(self, name) > 0, f"training.{name}", getattr(self, name), "above 0")
        for name in ("seed", "evaluation_blocks", "data_workers"):
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
    """Losses whose scatter judges the next one; updates of which at most a tenth may be skipped as
    not finite."""
    minimum_history: int = 64
    """Losses before anything is judged, at the start and after a declared change."""
    deviations: float = 6.0
    """Distance from the last losses' median, in robust standard deviations, of an outlier."""
    patience: int = 6
    """Outliers among the last `patience + 2` losses that make a suspicion."""
    confirm_steps: int = 50
    """Steps a suspected loss has to return before it is a spike."""
    slow_window: int = 64
    """Losses whose median is compared with its lowest among the last `window`."""
    slow_deviations: float = 2.0
    """Distance of the two, in robust standard deviations of one loss, that makes a suspicion."""
    slow_confirm_steps: int = 200
    """Steps that a slow suspicion has to return."""
    gross_nats: float = 3.0
    """A rise of the suspected losses' median over the baseline that needs no waiting."""
    validation_nats: float = 0.5
    """A rise of the validation loss since the last evaluation that makes a suspicion; if the next
    one shows it too, a spike."""
    margin_steps: int = 100
    """A rollback goes to a checkpoint at least this far before the spike's onset."""
    skip_before_steps: int = 100
    skip_after_steps: int = 400
    """Around the onset, the steps whose data the second rollback skips, where they were read."""
    learning_rate_factor: float = 0.7
    """Of the third rollback."""
    learning_rate_steps: int = 1000
    """How long after the onset that factor holds."""
    region_steps: int = 1000
    """Spikes that begin no further apart are the same trouble, and climb the ladder (policy.py)."""
    rollbacks_per_10k_steps: int = 5
    max_rollbacks: int = 20
    """In the whole run."""

    def __post_init__(self) -> None:
        """Refuse a detector that could never speak, or speaks of everything."""
        positive = {
            *("window", "minimum_history", "deviations", "patience"),
            *("slow_window", "slow_deviations", "validation_nats", "learning_rate_factor"),
        }
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in positive:
                check(value > 0, f"spike.{name}", value, "above 0")
            else:
                check(value >= 0, f"spike.{name}", value, "0 or above")
        factor = self.learning_rate_factor
        check(factor <= 1, "spike.learning_rate_factor", factor, "at most 1")
        if self.minimum_history > self.window:
            raise ValueError(
                f"spike.minimum_history {self.minimum_history} is above spike.window "
                f"{self.window}: the window would never hold enough to judge by"
            )

    @property
    def longest_alarm(self) -> int:
        """Most steps from the onset of a rise that the fast channel sees to its confirmation."""
        return max(self.confirm_steps, self.patience + 1)

    @property
    def longest_delay(self) -> int:
        """Most steps from an onset to its suspicion, on the slowest channel but validation.

        The channel non-finite counts over a whole window, and may date a spike to its first step
        after earlier suspicions have healed.
        """
        return max(2 * self.slow_window, self.patience + 2, self.window)


@dataclasses.dataclass(frozen=True)
class SupervisionConfig:
    """How a run is launched and watched, and how often it is launched again (supervisor.py)."""

    launcher: str = "deepspeed"
    """deepspeed, torchrun, or srun."""
    processes_per_node: int = 0
    """Ranks that `supervise` starts on each machine; 0: one per GPU, or 2 on a CPU."""
    hostfile: str = ""
    """Machines for the deepspeed launcher to reach by ssh; empty: this one, or an agent on each."""
    hang_seconds: float = 60.0
    """Silence of a step after which the attempt hangs, unless ten times the 99th percentile of the
    last 1000 steps is more (of the median, while fewer than 100 steps are known). A process that
    is stopped (SIGSTOP) for as long counts as a hang at any time."""
    init_seconds: float = 600.0
    """Silence in the start-up after which the attempt hangs: the longest time between two of
    launch, ranks joined, model built, checkpoint verified, engine made, checkpoint loaded, batches
    ready, and the end of the first step (which compiles where `training.compile` is set)."""
    save_seconds: float = 1800.0
    evaluate_seconds: float = 1800.0
    grace_seconds: float = 10.0
    """For processes that are told to end, and for those whose launcher or peers have gone."""
    preemption_seconds: float = 240.0
    """To finish the step and save, when asked to leave."""
    node_silence_seconds: float = 60.0
    """Silence of another machine's agent that counts as its death."""
    node_wait_seconds: float = 1800.0
    """To wait for machines that are not there."""
    max_crashes: int = 3
    """Crashes without a new checkpoint in between, after which the run is still launched again."""
    max_hangs: int = 2
    max_preemptions: int = 20
    max_stalled: int = 5
    """The same for all three together, however they are mixed."""

    def __post_init__(self) -> None:
        """Refuse a supervisor that could never wait, and launchers that we do not know."""
        known, launcher = ("deepspeed", "torchrun", "srun"), self.launcher
        check(launcher in known, "supervision.launcher", launcher, f"one of {', '.join(known)}")
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name.endswith("_seconds"):
                check(value > 0, f"supervision.{name}", value, "above 0")
            elif name.startswith("max_"):
                check(value >= 0, f"supervision.{name}", value, "0 or above")
        count = self.processes_per_node
        check(count >= 0, "supervision.processes_per_node", count, "0 or above")
        if self.hostfile and launcher != "deepspeed":
            raise ValueError(
                f"supervision.hostfile {self.hostfile!r} with supervision.launcher {launcher!r}: "
                "only the deepspeed launcher takes a hostfile"
            )


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
    objective: ObjectiveSettings = dataclasses.field(
        default_factory=MaskedLMConfig, metadata={"choices": SETTINGS_BY_NAME}
    )
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    spike: SpikeConfig = dataclasses.field(default_factory=SpikeConfig)
    supervision: SupervisionConfig = dataclasses.field(default_factory=SupervisionConfig)
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

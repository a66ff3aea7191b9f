"""The sections of a recipe, as typed records (run.py puts them together).

Every number has one owner: what follows from other fields is a property, and DeepSpeed's JSON takes
its sizes from here. Limits of single values stand in the annotations and are checked when a recipe
is decoded (data_prep/common/records.py); rules about several are checked by `__post_init__`. The
docstrings below fields are what `zeroclap show` prints.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt
from pydantic import AfterValidator

from data_prep.common.records import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Whole,
    check_value,
    unknown_key,
    whole,
)
from data_prep.common.wording import count
from pretrain.model.backends import ATTENTION_BACKENDS, AUTOMATIC
from pretrain.model.config import ModelConfig
from pretrain.model.presets import SIZES, VARIANTS

MOST_STEPS_PROFILED = 20


def _check_range(name: str, steps: Sequence[int], most: float = math.inf) -> None:
    """Refuse what is neither empty nor the first step of a range and the first one after it."""
    fits = not steps or (len(steps) == 2 and 0 < steps[1] - steps[0] <= most)
    limit = "" if most == math.inf else f", at most {most} steps"
    check_value(name, steps, fits, f"a step and a later one{limit}, such as [480, 490]")


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """One of several corpora."""

    path: str = ""
    """Folder that `zeroclap prepare` made."""
    weight: NonNegativeFloat = 1.0
    """Share of the blocks that are read from this corpus, relative to the weights of the others. A
    corpus of weight 0 is used for validation only."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus or corpora, and how they are cut into blocks."""

    corpus: str = ""
    """Folder that `zeroclap prepare` made."""
    corpora: dict[str, CorpusConfig] = dataclasses.field(default_factory=dict)
    """Several corpora by name, in place of `corpus`, such as {web: {path: corpora/web, weight: 3},
    books: {path: corpora/books, weight: 1}}. Each has an order and epochs of its own. Their order
    must not change; another one may be added at the end. A phase may change the weights."""
    sequence_length: Annotated[Whole, Ge(2), Le(1_000_000)] = 2048
    """Tokens of a block, `<s>` included."""
    packing: Literal[
        "chunked", "best-fit", "complete", "contiguous", "one-document", "sentence-pairs"
    ] = "chunked"
    """How documents fill blocks. chunked: documents that are longer than a block are cut into
    chunks; several documents or chunks a block, which do not see each other. best-fit: the same,
    but longer documents are dropped. complete: longer documents are dropped as well; the others
    stand in their order and are read as one text (EIFY/fairseq). contiguous: all documents in their
    order are one text, which is cut into blocks (for causal models). one-document: the beginning of
    one document a block; the rest is dropped. sentence-pairs: consecutive sentences of one document
    a block (for objective.name sentence-pairs)."""

    def __post_init__(self) -> None:
        """Refuse corpora without a usable name or a path, or beside a single one."""
        if self.corpus and self.corpora:
            raise ValueError(
                f"data.corpus {self.corpus!r} beside data.corpora ({', '.join(self.corpora)}): "
                'give one of them; data.corpus="" unsets what a recipe says'
            )
        for name, corpus in self.corpora.items():
            fits = re.fullmatch(r"[\w-]+", name) is not None
            check_value("data.corpora", name, fits, "a name of letters, digits, - and _")
            if not corpus.path:
                raise ValueError(
                    f"data.corpora.{name}.path: is not set; name a folder that `zeroclap prepare` "
                    "made"
                )

    @property
    def named_corpora(self) -> Mapping[str, CorpusConfig]:
        """The corpora by name; the name of a single one, `corpus`, is ""."""
        return self.corpora or ({"": CorpusConfig(self.corpus)} if self.corpus else {})


OVERRIDABLE = {
    field.name: field.type
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("vocab_size", "pair_head")
}
"""Types of the fields of ModelConfig that a recipe may set; the corpus and the objective decide the
others."""


def _whole_sizes(overrides: dict[str, Any]) -> dict[str, Any]:
    return {n: whole(v) if OVERRIDABLE.get(n) is int else v for n, v in overrides.items()}


@dataclasses.dataclass(frozen=True)
class ModelRecipe:
    """A named model, and what differs from it."""

    size: Annotated[str, OneOf(SIZES)] = "base"
    """Hidden size, layers and heads, by name."""
    variant: Annotated[str, OneOf(VARIANTS)] = "baseline"
    """Positions, embeddings and head, by name."""
    overrides: Annotated[dict[str, Any], ModelConfig, AfterValidator(_whole_sizes)] = (
        dataclasses.field(default_factory=dict)
    )
    """Fields of ModelConfig that differ from the named model's."""
    init_from: str = ""
    """Model whose weights the run starts from: a model folder, or a Hugging Face folder such as
    RoBERTa's. It has the vocabulary of the corpus, and the architecture that this section names,
    save for dropout. Empty: weights are drawn from training.seed."""

    def __post_init__(self) -> None:
        """Refuse fields that do not exist or that other sections decide."""
        known = [f"model.overrides.{name}" for name in OVERRIDABLE]
        for key in (f"model.overrides.{name}" for name in self.overrides):
            if key not in known:
                raise ValueError(unknown_key(key, known))


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """Sizes of batches, in blocks."""

    global_batch_size: PositiveInt = 512
    """Blocks that an update reads, over all ranks."""
    micro_batch_size: PositiveInt = 4
    """Blocks of one forward pass of one rank."""

    def __post_init__(self) -> None:
        """Refuse a batch that is no whole number of micro-batches."""
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch.global_batch_size {self.global_batch_size} is not a multiple of "
                f"batch.micro_batch_size {self.micro_batch_size}"
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an update, over all ranks."""
        return self.global_batch_size // self.micro_batch_size

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches of each rank in an update; the last one of some ranks may be empty.

        Raises:
            ValueError: some ranks would have none; names a size that fits, if one does.
        """
        if self.micro_batches < world_size:
            total = self.global_batch_size
            fits = [n for n in range(1, total // world_size + 1) if total % n == 0]
            raise ValueError(
                f"batch.global_batch_size {total} is less than batch.micro_batch_size "
                f"{self.micro_batch_size} x {count(world_size, 'rank')}"
                + (f"; set batch.micro_batch_size={fits[-1]}" if fits else "")
            )
        return math.ceil(self.micro_batches / world_size)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer; the files of engine/ with their names have the formulas."""

    name: Literal["adamw", "lamb", "muon"] = "adamw"
    """adamw: Adam with decoupled weight decay. lamb: LAMB (You et al. 2020), which moves each
    matrix in proportion to its norm, for large batches. muon: orthogonal updates of the layers'
    matrices, AdamW for the rest, with the same learning rate (Liu et al. 2025)."""
    learning_rate: PositiveFloat = 6e-4
    """Peak of the schedule."""
    beta1: Fraction = 0.9
    """Decay rate of the first moment."""
    beta2: Fraction = 0.98
    """Decay rate of the second moment."""
    epsilon: NonNegativeFloat = 1e-6
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.01
    """Per unit of the learning rate."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """Parameters that decay: all (EIFY/fairseq), or matrices (no bias, no layer norm; ALBERT)."""
    gradient_clipping: NonNegativeFloat = 0.0
    """Largest norm of the whole gradient; 0 does not clip."""


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate by step; `Segments.learning_rate` (run.py) has the formulas."""

    name: Literal["overestimated-cosine", "cosine", "linear", "constant", "wsd"] = (
        "overestimated-cosine"
    )
    """Shape of the decay after the warm-up; overestimated-cosine: for 1.1 times the steps, so that
    the run ends above the minimum (as published, after Hoffmann et al. 2022, appendix B); constant:
    the peak to the end; wsd: warm-up, stable, decay: the peak up to the last `cooldown_steps`."""
    warmup_steps: NonNegativeInt = 10000
    """Updates until the learning rate reaches its peak."""
    minimum_learning_rate: NonNegativeFloat = 6e-5
    """Learning rate that the warm-up starts from and the decay leads to."""
    cooldown_steps: NonNegativeInt = 0
    """Last updates of wsd, over which the learning rate falls to the
    minimum, as 1 - sqrt (Hägele et al. 2024, "Scaling laws and compute-optimal training beyond
    fixed training durations", section 3)."""

    def check_fit(self, steps: int, named: str) -> None:
        """Check that a run of so many steps gets through the schedule.

        Args:
            steps: that the schedule is for.
            named: what messages call them.

        Raises:
            ValueError: names both numbers.
        """
        if self.warmup_steps >= steps:
            raise ValueError(f"schedule.warmup_steps {self.warmup_steps} is not below {named}")
        if self.cooldown_steps and self.name != "wsd":
            raise ValueError(
                f"schedule.cooldown_steps {self.cooldown_steps} with schedule.name {self.name}; "
                "accepted: schedule.name=wsd, or 0"
            )
        if self.warmup_steps + self.cooldown_steps > steps:
            raise ValueError(
                f"schedule.cooldown_steps {self.cooldown_steps} and schedule.warmup_steps "
                f"{self.warmup_steps} are more than {named}"
            )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length of the run, engine, evaluation and checkpoints."""

    steps: PositiveInt = 133082
    """Updates of the whole run."""
    seed: Annotated[Whole, Ge(0), Lt(2**62)] = 1
    """Start value of all randomness: initial weights, order of blocks, masks, dropout."""
    deepspeed: str = "zero1_bf16"
    """A file of ds_configs/ (without .json), or a path to a DeepSpeed JSON file."""
    data_workers: Annotated[Whole, Ge(0), Le(1000)] = 0
    """Processes per rank that prepare the batches of the next steps; 0: the rank itself."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory, one more forward pass."""
    compile: Literal[True, False, "auto"] = AUTOMATIC
    """Compile each layer, the head and the loss with torch.compile; auto: on GPUs, except at ZeRO
    stage 3. See config/deepspeed.py."""
    deterministic: bool = False
    """Choose kernels that give the same bits in every attempt, and keep what is compiled in the
    run's folder. Needed on a GPU only, to resume bitwise; slower there."""
    attention_backend: Annotated[str, OneOf((AUTOMATIC, *ATTENTION_BACKENDS))] = AUTOMATIC
    """How attention is computed: dense (any device) or flex (FlexAttention, on GPUs); auto:
    flex on a GPU for a model without attention dropout, else dense. See model/backends.py."""
    evaluation_interval: PositiveInt = 5000
    """Updates between evaluations."""
    evaluation_blocks: NonNegativeInt = 0
    """Validation blocks read at each evaluation; 0: all."""
    checkpoint_interval: PositiveInt = 500
    """Updates between checkpoints."""
    checkpoints_kept: Annotated[Whole, Ge(2), Le(10_000)] = 5
    """Newest checkpoints that are kept; a rollback needs one from before the spike. Checkpoints
    that a rollback may go back to are kept as well (spikes/policy.py)."""


@dataclasses.dataclass(frozen=True)
class SpikeConfig:
    """When a loss counts as a spike, and what a rollback changes (spikes/)."""

    window: PositiveInt = 256
    """Losses by whose scatter the next one is judged; none is judged before there is a quarter of
    them. The slow channel compares medians of a quarter. At most a tenth of as many updates may be
    skipped because their gradient is not finite."""
    deviations: PositiveFloat = 6.0
    """Robust standard deviations from the median of the last losses that make an outlier; a third
    of them, between two medians, make a suspicion on the slow channel."""
    patience: PositiveInt = 6
    """Outliers among the last `patience + 2` losses that make a suspicion."""
    confirm_steps: NonNegativeInt = 50
    """Steps that a suspected loss has to come down before it is a spike; four times as many where
    it rises slowly."""
    gross_nats: NonNegativeFloat = 3.0
    """Rise of the suspected losses' median over the baseline that is a spike at once."""
    validation_nats: PositiveFloat = 0.5
    """Rise of the validation loss since the last evaluation that makes a suspicion; it is a spike
    if the next evaluation shows it too."""
    margin_steps: NonNegativeInt = 100
    """Steps between the checkpoint of a rollback and the spike's onset, at least. The second
    rollback skips the blocks of as many steps before the onset, and of those from there to the
    confirmation, at most four times as many."""

    @property
    def slow_window(self) -> int:
        """Losses whose median is compared with its lowest value among the last `window`.

        None is judged before there are as many; after a declared change, before there are 16.
        """
        return max(1, self.window // 4)

    @property
    def slow_deviations(self) -> float:
        """Robust standard deviations of one loss between two medians that make a suspicion."""
        return self.deviations / 3

    @property
    def slow_confirm_steps(self) -> int:
        """Steps that a slowly rising loss has to come down before it is a spike."""
        return 4 * self.confirm_steps

    @property
    def least_reach(self) -> int:
        """Steps that the kept checkpoints have to reach back when a spike is confirmed.

        Those before the onset, and the most from it to the confirmation by the fast channel.
        """
        return self.margin_steps + max(self.confirm_steps, self.patience + 1)

    @property
    def longest_delay(self) -> int:
        """Most steps from an onset to its suspicion, on the slowest channel but validation.

        The channel `non-finite` counts over a whole window, and may date a spike to its first step
        after earlier suspicions have healed.
        """
        return max(self.window, self.patience + 2)


@dataclasses.dataclass(frozen=True)
class SupervisionConfig:
    """How a run is launched and watched, and how often it is relaunched (supervision/)."""

    processes_per_node: NonNegativeInt = 0
    """Ranks that `supervise` starts on each machine; 0: one per GPU, or 2 on a CPU."""
    hostfile: str = ""
    """File of machines with lines such as `gpu-1 slots=8`, this machine first; `supervise` reaches
    the others by ssh. Empty: this machine, or one `supervise` on each."""
    hang_seconds: PositiveFloat = 60.0
    """Silence after which a step counts as hanging, unless ten times the 99th percentile of the
    last steps, some 200, is longer (of the median, while fewer than 100 are known). Until a step of
    the attempt, or of a new phase, is recorded, `init_seconds` counts if it is longer. A process
    that stays stopped (SIGSTOP) counts as hanging at any time, after two thirds of it."""
    init_seconds: PositiveFloat = 600.0
    """Silence after which the start-up counts as hanging. It is the longest time between two of:
    launch, ranks joined, model built, checkpoint verified, engine made, checkpoint loaded, batches
    ready, end of the first step (which compiles kernels on GPUs, see `training.compile`). Saving a
    checkpoint, or an evaluation, counts as hanging after three times as long."""
    node_wait_seconds: PositiveFloat = 1800.0
    """Time to wait for missing machines."""
    max_retries: NonNegativeInt = 3
    """Relaunches after crashes and hangs with no new checkpoint in between; at the next one the run
    is given up."""


@dataclasses.dataclass(frozen=True)
class NotifyConfig:
    """Who is told of rollbacks, of a full disk, of giving up, and of the end of `supervise`."""

    command: list[str] = dataclasses.field(default_factory=list)
    """Program and arguments that each event is given to, as JSON on its standard input. It is run
    without a shell where `supervise` runs, and has 30 seconds. Empty: none."""


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """Steps that torch.profiler traces, on rank 0 (train/profile.py)."""

    steps: list[NonNegativeInt] = dataclasses.field(default_factory=list)
    """First step that is traced, and the first that no longer is, such as [100, 105]; at most 20.
    Empty: none."""

    def __post_init__(self) -> None:
        """Refuse what is no range of steps, or one whose traces would be too large to open."""
        _check_range("profile.steps", self.steps, MOST_STEPS_PROFILED)


@dataclasses.dataclass(frozen=True)
class FaultConfig:
    """A rehearsed fault, with which a loss spike is tried out."""

    random_labels: list[NonNegativeInt] = dataclasses.field(default_factory=list)
    """First step whose labels are replaced by random tokens, and the first whose no longer are,
    such as [480, 540], while the order's seed is the recipe's own: a reseed escapes, as with a
    spike that certain data cause in a certain state. Empty: none."""
    damaged_block: NonNegativeInt = 0
    """Step whose first block, in the order of the recipe's seed, is damaged: in each step of the
    first epoch that reads this block, with any seed, the gradient is 10,000 times too large. 0: no
    block."""

    def __post_init__(self) -> None:
        """Refuse what is no range of steps."""
        _check_range("fault.random_labels", self.random_labels)

    def strikes(self, step: int, seed: int, recipe_seed: int) -> bool:
        """Whether the fault strikes a step."""
        return seed == recipe_seed and step in range(*(self.random_labels or (0,)))


ADVANCED = (
    "model.init_from",
    "spike",
    "fault",
    "profile",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.epsilon",
    "optimizer.weight_decay_on",
    "schedule.cooldown_steps",
    "training.data_workers",
    "training.compile",
    "training.attention_backend",
    "training.deterministic",
    "supervision.hang_seconds",
    "supervision.init_seconds",
    "supervision.node_wait_seconds",
    "supervision.max_retries",
)
"""Settings and sections that a first run goes well without knowing of: `show` leaves out those that
nothing sets. The fields of ModelConfig that `model.overrides` does not set are advanced too."""


@dataclasses.dataclass(frozen=True)
class PhaseConfig:
    """One phase: its length, and what differs from the recipe in it."""

    name: str = ""
    """What messages call the phase, beside its number."""
    steps: NonNegativeInt = 0
    """Updates of the phase. 0, of the last phase only: up to training.steps."""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other corpora, weights, sequence_length or packing. A corpus that an
    earlier phase read with the same length and packing goes on where that phase ended."""
    objective: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other settings of the objective, such as {probability: 0.15}; its name stays."""
    batch: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other sizes of batches. A batch that grows is a phase for each size."""
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Another learning_rate: the peak of the schedule."""
    schedule: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Another schedule. If anything is set here, warm-up and decay count from the phase's first
    step and end with the phase; else the recipe's schedule goes on."""
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Another evaluation_interval, evaluation_blocks, checkpoint_interval or checkpoints_kept."""

    @property
    def delta(self) -> dict[str, Any]:
        """What differs from the recipe, by section."""
        sections = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: each for name, each in sections.items() if isinstance(each, dict) and each}

"""Estimate the cost of a recipe: parameters, memory, hours, checkpoints."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from data_prep.common.wording import count
from data_prep.manifest import load_manifest
from pretrain.checks import needs
from pretrain.checks import recipe as recipe_checks
from pretrain.checks.devices import DEVICES, HEADROOM
from pretrain.config import deepspeed as deepspeed_settings
from pretrain.config.run import RunConfig
from pretrain.data.mixture import Mixture
from pretrain.data.sources import SOURCES, open_source
from pretrain.engine.engine import deepspeed_json
from pretrain.model.backends import choose_backend
from pretrain.model.config import VOCABULARY_MULTIPLE, ModelConfig
from pretrain.spikes.policy import max_checkpoints_kept, usual_checkpoints_kept

RATES = {
    "h100": {"flex": 355e12, "rotary": 270e12, "dense": 270e12, "not compiled": 220e12},
    "h200": {"flex": 369e12},
}
"""FLOP/s of one GPU that the model needs (needs.flops_per_token) while it trains, as `bench`
measured it on base models in bf16, 16 rows of 2048 tokens a micro-batch: by attention back end,
with rotary positions (modern-base, flex), or where layers are not compiled. Means over up to three
H100 and over variants with and without ALiBi and dropout, from which these differ by up to a tenth;
of one H200.
"""
CPU = "CPU"
"""Stands for all cores of a machine, as a device."""
MOST_EPOCHS = 40
"""More cause a warning. Repeated text is worth almost nothing beyond about 40 epochs (Muennighoff
et al. 2023, figure 1, for causal language models); BERT was trained for 40 (Devlin et al. 2019,
A.2).
"""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A device of this machine, on which the recipe was measured."""

    device: str
    """Name of the GPU, or CPU."""
    memory_bytes: int
    """Of a GPU, or of the machine."""
    world_size: int
    """Ranks that were measured."""
    flops: float
    """FLOP/s of one rank that the model needs at this speed, as in RATES."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one rank, without allocator overhead and kernel workspaces."""

    weights: int
    gradients: int
    optimizer: int
    """In host memory if it is offloaded."""
    bucket: int
    """DeepSpeed's communication buffer for gradients."""
    activations: int
    offloaded: bool
    """Whether the optimizer state is in host memory."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        parts = (self.weights, self.gradients, self.optimizer, self.bucket, self.activations)
        return sum(parts)

    def fits(self, device_memory: float) -> bool:
        """Whether a GPU with this much memory can hold it."""
        on_device = self.total - (self.optimizer if self.offloaded else 0)
        return on_device <= HEADROOM * device_memory


@dataclasses.dataclass(frozen=True)
class Reading:
    """Usage of a corpus's train split by a run."""

    blocks: int
    """Blocks of the split."""
    tokens: int
    """Tokens of the split."""
    share_of_tokens: float
    """Share of these tokens that the blocks hold."""
    fill: float
    """Share of the blocks' capacity that holds tokens."""
    epochs: float
    """Blocks that the run reads over blocks of the split."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a run; sizes in bytes."""

    vocab_size: int
    vocab_size_is_assumed: bool
    """Whether neither the recipe nor a corpus on this machine gives it."""
    parameters: int
    """As exported, without the padding rows of the token table."""
    tokens: int
    """Tokens in all blocks; padding counts, because it is computed."""
    reading: dict[str, Reading] | None
    """Of each corpus by name, the name of a single one is ""; None: one is not on this machine."""
    flops: float
    """FLOPs of the model for these tokens."""
    world_size: int
    stage: int
    """The recipe's ZeRO stage."""
    backend: str
    """Attention back end that the recipe takes on this device."""
    micro_batch_size: int
    """Of the phase that needs most memory."""
    memory: dict[int, Memory]
    """By ZeRO stage, of that phase."""
    checkpoint: int
    checkpoints_usual: int
    """Number kept while no spike is suspected."""
    checkpoints_most: int
    """Most on disk at once: the newest, rollback targets, one that is being written. Of the
    newest two, those that were saved at a stop, between regular ones, come in addition."""
    exported: int
    device: str
    """A key of DEVICES, or the name of this machine's."""
    device_memory: float
    measured: int
    """Ranks that were measured on this machine; 0: the rate is one of RATES."""
    seconds: float | None
    """Seconds of training alone, without validation and checkpoints, nor communication where it was
    not measured; None if no such recipe was measured on this device."""


def plan(config: RunConfig, world_size: int, kind: str, measured: Measured | None = None) -> Plan:
    """Compute the cost of a recipe.

    Args:
        config: the recipe.
        world_size: number of GPUs.
        kind: a key of DEVICES.
        measured: of the recipe on this machine, which counts in place of that kind.

    Raises:
        ValueError: the recipe's batch has fewer micro-batches than there are ranks.
    """
    model, training = model_of(config), config.training
    on_gpu, sharing = True, world_size
    if measured and measured.device == CPU:
        # More ranks than were measured would share the same cores.
        on_gpu, sharing = False, measured.world_size
    # Only DeepSpeed, whose import takes seconds, knows all keys of a file of the user's own.
    is_ours = (deepspeed_settings.DS_CONFIGS / f"{training.deepspeed}.json").exists()
    read = deepspeed_settings.read_settings if is_ours else deepspeed_json
    settings = read(*config.deepspeed_arguments(world_size))
    width, stage = needs.weight_bytes(settings), deepspeed_settings.stage_of(settings)
    count, trained = needs.parameters(model), needs.parameters(model, VOCABULARY_MULTIPLE)
    backend = choose_backend(model, training.attention_backend, on_gpu)
    phases = [phase.config for phase in config.segments.parts]
    compiled = deepspeed_settings.compiles(training.compile, settings, on_gpu)

    def saved(phase: RunConfig, compiled: bool) -> int:
        """Return the bytes of `needs.activations` of a phase."""
        data, rows, share = phase.data, phase.batch.micro_batch_size, phase.objective.target_share
        length, packed = data.sequence_length, SOURCES[data.packing].documents_apart
        dense = backend == "dense"
        bias = needs.bias_bytes(model, rows, length, width, packed) if dense else (0, 0)
        again = training.activation_checkpointing
        return needs.activations(model, rows, length, share, width, again, bias, compiled)

    heaviest = max(phases, key=lambda phase: saved(phase, compiled))
    blocks, tokens, flops = needs.work(config, model)
    if measured:
        rate: float | None = measured.flops
    else:
        case = "rotary" if backend == "flex" and model.method.rotation else backend
        case = case if compiled else "not compiled"
        rate = RATES.get(kind, {}).get(case) if width == 2 else None
    offloaded = deepspeed_settings.offloads(settings, "offload_optimizer")
    return Plan(
        vocab_size=vocabulary_size(config),
        vocab_size_is_assumed=not _folders(config),
        parameters=count,
        tokens=tokens,
        reading=_reading(config, blocks),
        flops=flops,
        world_size=world_size,
        stage=stage,
        backend=backend,
        micro_batch_size=heaviest.batch.micro_batch_size,
        memory={
            n: Memory(
                *needs.states(trained, n, world_size, settings),
                saved(heaviest, compiled and n < 3),  # stage 3 compiles nothing
                offloaded,
            )
            for n in (range(4) if width == 4 else range(1, 4))
        },
        checkpoint=needs.checkpoint_bytes(trained, width, stage),
        checkpoints_usual=usual_checkpoints_kept(config),
        checkpoints_most=max_checkpoints_kept(config) + 1,
        exported=4 * count,
        device=measured.device if measured else kind,
        device_memory=measured.memory_bytes if measured else DEVICES[kind].memory,
        measured=measured.world_size if measured else 0,
        seconds=flops / rate / sharing if rate else None,
    )


def most_gpus(config: RunConfig) -> int:
    """Return the most GPUs, of 8 at most, that share the batches of all phases evenly."""
    batches = [phase.config.batch for phase in config.segments.parts]
    return max(n for n in range(1, 9) if not any(batch.micro_batches % n for batch in batches))


def model_of(config: RunConfig) -> ModelConfig:
    """Return the model's config, with the vocabulary of `vocabulary_size`.

    Raises:
        ValueError: a value that ModelConfig refuses.
    """
    return config.architecture(vocabulary_size(config))


def vocabulary_size(config: RunConfig) -> int:
    """Return the number of ids of the corpora; if none is on this machine, the usual one."""
    for folder in _folders(config)[:1]:  # all have the same vocabulary
        return load_manifest(folder).vocab_size
    return recipe_checks.USUAL_VOCABULARY


def _folders(config: RunConfig) -> list[Path]:
    """Return the folders of `config.segments.sources` that are on this machine."""
    folders = (Path(source.path) for source in config.segments.sources)
    return [folder for folder in folders if folder.exists()]


def _reading(config: RunConfig, blocks: int) -> dict[str, Reading] | None:
    """Return the usage of each corpus by a run of `blocks`; None if one is not on this machine."""
    sources = config.segments.sources
    if not sources or len(_folders(config)) < len(sources):
        return None
    found = {}
    for source, drawn in zip(sources, Mixture.of_run(config.segments).counts(blocks), strict=True):
        train = open_source(source, "train")
        tokens, share = train.corpus.tokens, train.share_of_tokens
        found[source.name] = Reading(len(train), tokens, share, train.fill, drawn / len(train))
    return found


def table(planned: Plan) -> str:
    """Format a plan as text."""
    each, usual = planned.checkpoint, planned.checkpoints_usual
    most = planned.checkpoints_most
    rows = [("parameters", f"{planned.parameters:,}")]
    if planned.vocab_size_is_assumed:
        assumed = f"{planned.vocab_size:,} ids, assumed: no corpus is on this machine"
        rows.append(("vocabulary", assumed))
    rows += [
        ("tokens", f"{planned.tokens:,} (padding included), {planned.flops:.3g} FLOPs"),
        *_epochs(planned),
        ("time", _time(planned)),
        *_memory(planned),
        (
            "checkpoints",
            f"{_size(each)} each; {usual} kept ({_size(each * usual)}), at most {most} after loss "
            f"spikes ({_size(each * most)})",
        ),
        ("exported", _size(planned.exported)),
    ]
    return "".join(f"{name:12} {text}\n" for name, text in rows)


def _time(planned: Plan) -> str:
    if planned.seconds is None:
        return (
            f"unknown: recipes of this kind were not measured on {planned.device}; run `plan "
            "--kind here` on such a machine"
        )
    devices, rest = f"{planned.world_size} {planned.device}", "validation and checkpoints"
    source = f"measured now with {count(planned.measured, 'rank')}"
    if planned.device == CPU:
        devices = "this machine's CPU"
    elif planned.measured < planned.world_size:
        rest = "validation, checkpoints and communication"
        source = source if planned.measured else "scaled from base models on one"
    return (
        f"about {_duration(planned.seconds)} on {devices}, "
        f"{planned.tokens / planned.seconds:,.0f} tokens/s (padding included), {source}; {rest} "
        "come on top"
    )


def _memory(planned: Plan) -> Iterator[tuple[str, str]]:
    """Rows about the memory of a rank at each ZeRO stage."""
    device, sharing = planned.device, 1
    if device == CPU:
        device, sharing = "this machine", planned.measured
    yield (
        "memory",
        f"per rank of {planned.world_size}, with micro-batches of {planned.micro_batch_size} and "
        f"{planned.backend} attention; {device} has {_size(planned.device_memory)}",
    )
    heads = ("weights", "gradients", "optimizer", "bucket", "activations", "total")
    yield "", "".join(f"{head:>12}" for head in heads)
    for stage, memory in planned.memory.items():
        marks = ["<- the recipe's"] if stage == planned.stage else []
        marks += [] if memory.fits(planned.device_memory / sharing) else ["(does not fit)"]
        figures = "".join(f"{_size(getattr(memory, head)):>12}" for head in heads)
        yield f"  ZeRO {stage}", " ".join([figures, *marks])


def _epochs(planned: Plan) -> Iterator[tuple[str, str]]:
    """Rows about what is read of each corpus."""
    if planned.reading is None:
        yield "epochs", "unknown: data.corpus is not a folder on this machine"
        return
    for number, (name, reading) in enumerate(planned.reading.items()):
        yield (
            "" if number else "epochs",
            f"{f'{name}: ' if name else ''}{reading.epochs:,.2f} epochs of {reading.blocks:,} "
            f"blocks, {reading.fill:.1%} full, which hold {reading.share_of_tokens:.1%} of the "
            f"train split's {reading.tokens:,} tokens",
        )
        if reading.epochs > MOST_EPOCHS:
            yield (
                "",
                f"WARNING: beyond {MOST_EPOCHS} epochs repeated text adds almost nothing; use a "
                "larger corpus or fewer training.steps",
            )


def _duration(seconds: float) -> str:
    """A duration in the largest unit of which it has at least two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} seconds"


def _size(count: float) -> str:
    """A number of bytes, in GB from 1 GB on, in MB below."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"

"""The cost of a recipe before it is run: parameters, memory, time, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from data_prep.corpus import Corpus
from data_prep.manifest import load_manifest
from pretrain.checks import needs
from pretrain.checks import recipe as recipe_checks
from pretrain.checks.devices import DEVICES, HEADROOM
from pretrain.config import deepspeed as deepspeed_settings
from pretrain.config.run import Phase, RunConfig
from pretrain.data.mixture import Mixture
from pretrain.data.sources import SOURCES
from pretrain.model.backends import check_backend, choose_backend
from pretrain.model.config import VOCABULARY_MULTIPLE, ModelConfig
from pretrain.spikes.policy import max_checkpoints_kept, usual_checkpoints_kept

STATED = "stated, not measured"
"""Source of a utilization that the user gave."""


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

    @property
    def on_device(self) -> int:
        """Sum of the parts on the GPU."""
        return self.total - (self.optimizer if self.offloaded else 0)

    def fits(self, device_memory: float) -> bool:
        """Whether a GPU of so many bytes can hold this."""
        return self.on_device <= HEADROOM * device_memory


@dataclasses.dataclass(frozen=True)
class Fit:
    """What an attention back end needs at the recipe's ZeRO stage."""

    backend: str
    problem: str
    """Why it cannot compute the model; "" if it can."""
    micro_batch_size: int
    """The recipe's."""
    bytes: int
    """On the GPU, with the recipe's micro-batch."""
    largest: int
    """The largest micro-batch that fits, of those that divide the batch; 0 if none does."""
    largest_bytes: int
    """On the GPU, with the largest."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a run reads of the train split of a corpus."""

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
class PhaseCost:
    """What one phase of a run costs."""

    name: str
    steps: int
    blocks: int
    tokens: int
    flops_per_token: float
    seconds: float

    @property
    def flops(self) -> float:
        """Of the whole phase."""
        return self.flops_per_token * self.tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a run; sizes in bytes."""

    vocab_size: int
    vocab_size_is_assumed: bool
    """Whether neither the recipe nor a corpus on this machine says it."""
    parameters: int
    """As exported, without the padding rows of the token table."""
    trained_parameters: int
    """As trained, with the padding rows."""
    tokens: int
    """Tokens in all blocks; padding counts, because it is computed."""
    reading: dict[str, Reading] | None
    """Of each corpus by name, the name of a single one is ""; None: one is not on this machine."""
    flops_per_token: float
    flops: float
    world_size: int
    stage: int
    """The recipe's ZeRO stage."""
    backend: str
    """Attention back end that the recipe takes on a GPU."""
    memory: dict[int, Memory]
    """By ZeRO stage, with that back end."""
    fits: list[Fit]
    """Of every back end."""
    checkpoint: int
    checkpoints_newest: int
    """Newest checkpoints that are kept whatever happens."""
    checkpoints_usual: int
    """Number kept while no spike is suspected."""
    checkpoints_most: int
    """Most on disk at once: the newest, rollback targets, one that is being written. Of the
    newest two, those that were saved at a stop, between regular ones, come in addition."""
    exported: int
    kind: str
    device_memory: float
    utilization: float
    """Assumed share of the peak FLOP/s."""
    source: str
    """Where the utilization comes from."""
    seconds: float
    phases: list[PhaseCost] = dataclasses.field(default_factory=list)
    """Of a run with phases; the memory is that of the phase that needs most."""


def plan(
    config: RunConfig, world_size: int, kind: str, utilization: float, source: str = STATED
) -> Plan:
    """Compute the cost of a recipe.

    Args:
        config: the recipe.
        world_size: number of GPUs.
        kind: a key of DEVICES.
        utilization: share of the peak FLOP/s that is reached.
        source: where `utilization` comes from.

    Raises:
        ValueError: the recipe's batch does not divide over the ranks, or an argument is out of
            range.
    """
    if not 0 < utilization <= 1:
        raise ValueError(f"--mfu {utilization}: accepted: above 0, at most 1")
    model = model_of(config)
    training = config.training
    settings = deepspeed_settings.read(
        training.deepspeed,
        config.phase(0).config.batch,
        config.optimizer.gradient_clipping,
        world_size,
    )
    width = needs.weight_bytes(settings)
    stage = int(settings.get("zero_optimization", {}).get("stage", 0))
    count, trained = needs.parameters(model), needs.parameters(model, VOCABULARY_MULTIPLE)
    device = DEVICES[kind]
    costs = _phase_costs(config, model, world_size * device.flops * utilization)
    tokens, flops = sum(cost.tokens for cost in costs), sum(cost.flops for cost in costs)
    blocks = sum(cost.blocks for cost in costs)
    backend = choose_backend(model, training.attention_backend, on_gpu=True)
    stages = range(4) if width == 4 else range(1, 4)

    def activations(phase: Phase) -> int:
        rows = phase.config.batch.micro_batch_size
        return _activations_with(phase.config, model, backend, rows, width)

    heaviest = max(config.resolved_phases, key=activations).config

    offloaded = deepspeed_settings.offload_device(settings, "offload_optimizer") != "none"

    def memory(backend: str, rows: int, stage: int) -> Memory:
        kept = _activations_with(heaviest, model, backend, rows, width)
        return Memory(*needs.states(trained, stage, world_size, settings), kept, offloaded)

    fits = [
        _fit(
            heaviest, model, name, device.memory, world_size, functools.partial(memory, stage=stage)
        )
        for name in ("dense", "flex")
    ]
    return Plan(
        vocab_size=model.vocab_size,
        vocab_size_is_assumed=not config.data.vocab_size and not _folders(config),
        parameters=count,
        trained_parameters=trained,
        tokens=tokens,
        reading=_reading(config, blocks),
        flops_per_token=flops / tokens if config.phases else costs[0].flops_per_token,
        flops=flops,
        world_size=world_size,
        stage=stage,
        backend=backend,
        memory={n: memory(backend, heaviest.batch.micro_batch_size, n) for n in stages},
        fits=fits,
        checkpoint=needs.checkpoint_bytes(trained, width, stage),
        checkpoints_newest=training.checkpoints_kept,
        checkpoints_usual=usual_checkpoints_kept(config),
        checkpoints_most=max_checkpoints_kept(config) + 1,
        exported=4 * count,
        kind=kind,
        device_memory=device.memory,
        utilization=utilization,
        source=source,
        seconds=sum(cost.seconds for cost in costs),
        phases=costs if config.phases else [],
    )


def _phase_costs(config: RunConfig, model: ModelConfig, flops_per_second: float) -> list[PhaseCost]:
    """Return the cost of each phase of a run on devices of so many FLOP/s."""
    costs = []
    for phase in config.resolved_phases:
        data, first_block = phase.config.data, config.sizes.first_block
        blocks = first_block(phase.end_step) - first_block(phase.first_step)
        per_token = needs.flops_per_token(
            model, data.sequence_length, phase.config.objective.target_share
        )
        tokens = blocks * data.sequence_length
        seconds = per_token * tokens / flops_per_second
        steps = phase.end_step - phase.first_step
        costs.append(PhaseCost(str(phase), steps, blocks, tokens, per_token, seconds))
    return costs


def _activations_with(
    config: RunConfig, model: ModelConfig, backend: str, rows: int, width: int
) -> int:
    """Return the bytes of `activations` with an attention back end and so many rows."""
    length, packed = config.data.sequence_length, SOURCES[config.data.packing].documents_apart
    bias = needs.bias_bytes(model, rows, length, width, packed) if backend == "dense" else (0, 0)
    checkpointing = config.training.activation_checkpointing
    share = config.objective.target_share
    return needs.activations(model, rows, length, share, width, checkpointing, bias)


def _fit(
    config: RunConfig,
    model: ModelConfig,
    backend: str,
    device_memory: float,
    world_size: int,
    memory: Callable[[str, int], Memory],
) -> Fit:
    """Return which micro-batches fit a GPU with an attention back end."""
    problem = ""
    try:
        check_backend(model, backend)
    except ValueError as error:
        problem = str(error)
    rows, blocks = config.batch.micro_batch_size, config.batch.size(0) // world_size
    sizes = [
        size
        for size in range(1, blocks + 1)
        if blocks % size == 0 and memory(backend, size).fits(device_memory)
    ]
    largest = max(sizes, default=0)
    largest_bytes = memory(backend, largest).on_device if largest else 0
    return Fit(backend, problem, rows, memory(backend, rows).on_device, largest, largest_bytes)


def model_of(config: RunConfig) -> ModelConfig:
    """Return the model's config, with the corpus's vocabulary, `data.vocab_size` or the usual one.

    Raises:
        ValueError: a value that ModelConfig refuses.
    """
    size = config.data.vocab_size or recipe_checks.USUAL_VOCABULARY
    for folder in _folders(config)[:1]:  # all have the same vocabulary
        size = load_manifest(folder).vocab_size
    return config.architecture(size)


def _folders(config: RunConfig) -> list[Path]:
    """Return the folders of `config.streams` that are on this machine."""
    folders = (Path(stream.path) for stream in config.streams)
    return [folder for folder in folders if folder.exists()]


def _reading(config: RunConfig, blocks: int) -> dict[str, Reading] | None:
    """Return what a run of so many blocks reads of each corpus; None if one is not here."""
    folders = _folders(config)
    if not folders or len(folders) < len(config.streams):
        return None
    found = {}
    draws = Mixture.of_run(config).counts(blocks)
    for stream, folder, drawn in zip(config.streams, folders, draws, strict=True):
        corpus = Corpus(folder, "train")
        source = SOURCES[stream.packing](corpus, stream.sequence_length)
        tokens, share = int(corpus.lengths.sum()), source.share_of_tokens
        found[stream.name] = Reading(len(source), tokens, share, source.fill, drawn / len(source))
    return found

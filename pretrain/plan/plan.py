"""The cost of a recipe before it is run: parameters, memory, time, checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.corpus import Corpus
from data_prep.manifest import load_manifest
from pretrain.checks import needs
from pretrain.checks import recipe as recipe_checks
from pretrain.checks.devices import DEVICES, HEADROOM
from pretrain.config import deepspeed as deepspeed_settings
from pretrain.config.run import RunConfig
from pretrain.data.mixture import Mixture
from pretrain.data.sources import SOURCES
from pretrain.model.backends import AUTOMATIC, check_backend, choose_backend
from pretrain.model.config import VOCABULARY_MULTIPLE, ModelConfig
from pretrain.plan import roofline
from pretrain.plan.measured_speed import Correction
from pretrain.spikes.policy import max_checkpoints_kept, usual_checkpoints_kept

NOT_MEASURED = Correction(1.0, roofline.UNCERTAINTY, "expected, not measured")
_LEAST_GAIN = 0.03
"""Share of the time that a change has to save to be worth naming."""


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
class Change:
    """A setting that would make a run faster."""

    setting: str
    """As it is written on a command line."""
    seconds: float
    """Of the run with it."""


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
    seconds: float
    """Of training alone, without validation and checkpoints."""
    parts: dict[str, float]
    """Seconds by what they are spent on (roofline.Expected)."""
    uncertainty: float
    """Relative, of the speed."""
    source: str
    """Whether the speed was measured, and on what."""
    change: Change | None
    """What would help most, if anything does."""
    phases: list[PhaseCost] = dataclasses.field(default_factory=list)
    """Of a run with phases; the memory is that of the phase that needs most."""


def plan(
    config: RunConfig, world_size: int, kind: str, correction: Correction = NOT_MEASURED
) -> Plan:
    """Compute the cost of a recipe.

    Args:
        config: the recipe.
        world_size: number of GPUs.
        kind: a key of DEVICES.
        correction: of the time, by a measurement.

    Raises:
        ValueError: the recipe's batch does not divide over the ranks.
    """
    model, training = model_of(config), config.training
    settings = _settings(config, world_size)
    width = needs.weight_bytes(settings)
    stage = deepspeed_settings.stage_of(settings)
    count, trained = needs.parameters(model), needs.parameters(model, VOCABULARY_MULTIPLE)
    costs, parts = _phase_costs(config, model, world_size, kind, correction.factor)
    tokens, flops = sum(cost.tokens for cost in costs), sum(cost.flops for cost in costs)
    blocks, seconds = sum(cost.blocks for cost in costs), sum(cost.seconds for cost in costs)
    backend = choose_backend(model, training.attention_backend, on_gpu=True)
    rows = _heaviest(config, model, backend, width).batch.micro_batch_size
    fits = [_fit(config, model, name, kind, world_size, stage) for name in ("dense", "flex")]
    (largest,) = (fit.largest for fit in fits if fit.backend == backend)
    return Plan(
        vocab_size=model.vocab_size,
        vocab_size_is_assumed=not _folders(config),
        parameters=count,
        trained_parameters=trained,
        tokens=tokens,
        reading=_reading(config, blocks),
        flops_per_token=flops / tokens if config.phases else costs[0].flops_per_token,
        flops=flops,
        world_size=world_size,
        stage=stage,
        backend=backend,
        memory={
            n: _memory(config, model, backend, rows, n, world_size)
            for n in (range(4) if width == 4 else range(1, 4))
        },
        fits=fits,
        checkpoint=needs.checkpoint_bytes(trained, width, stage),
        checkpoints_newest=training.checkpoints_kept,
        checkpoints_usual=usual_checkpoints_kept(config),
        checkpoints_most=max_checkpoints_kept(config) + 1,
        exported=4 * count,
        kind=kind,
        device_memory=DEVICES[kind].memory,
        seconds=seconds,
        parts=parts,
        uncertainty=correction.uncertainty,
        source=correction.source,
        change=_best_change(config, largest, world_size, kind, seconds, correction.factor),
        phases=costs if config.phases else [],
    )


def _settings(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return a run's DeepSpeed settings."""
    batch, clipping = config.phase(0).config.batch, config.optimizer.gradient_clipping
    return deepspeed_settings.read_settings(config.training.deepspeed, batch, clipping, world_size)


def _phase_costs(
    config: RunConfig, model: ModelConfig, world_size: int, kind: str, factor: float
) -> tuple[list[PhaseCost], dict[str, float]]:
    """Return the cost of each phase of a run, and the seconds of all by what they are spent on."""
    costs, parts = [], dict[str, float]()
    for phase in config.resolved_phases:
        data, first_block = phase.config.data, config.sizes.first_block
        blocks = first_block(phase.end_step) - first_block(phase.first_step)
        per_token = needs.flops_per_token(
            model, data.sequence_length, phase.config.objective.target_share
        )
        tokens, steps = blocks * data.sequence_length, phase.end_step - phase.first_step
        expected = roofline.expect(phase.config, model, world_size, kind, steps, blocks)
        for name, seconds in expected.parts.items():
            parts[name] = parts.get(name, 0.0) + factor * seconds
        seconds = factor * expected.seconds
        costs.append(PhaseCost(str(phase), steps, blocks, tokens, per_token, seconds))
    return costs, parts


def _best_change(
    config: RunConfig, largest: int, world_size: int, kind: str, seconds: float, factor: float
) -> Change | None:
    """Return the single change of a setting that saves most time, of those that fit the GPU."""
    found = []
    for setting, changed in _changes(config, largest):
        model, settings = model_of(changed), _settings(changed, world_size)
        backend = choose_backend(model, changed.training.attention_backend, on_gpu=True)
        heaviest = _heaviest(changed, model, backend, needs.weight_bytes(settings))
        rows, stage = heaviest.batch.micro_batch_size, deepspeed_settings.stage_of(settings)
        memory = _memory(changed, model, backend, rows, stage, world_size)
        if memory.fits(DEVICES[kind].memory):
            costs, _ = _phase_costs(changed, model, world_size, kind, factor)
            found.append(Change(setting, sum(cost.seconds for cost in costs)))
    best = min(found, key=lambda change: change.seconds, default=None)
    return best if best and best.seconds < (1 - _LEAST_GAIN) * seconds else None


def _changes(config: RunConfig, largest: int) -> Iterator[tuple[str, RunConfig]]:
    """Yield settings that may make a run faster, and the recipe with each.

    Args:
        config: the recipe.
        largest: the largest micro-batch that fits.
    """
    training, batch, model = config.training, config.batch, config.model

    def trained(**values: Any) -> RunConfig:  # noqa: ANN401 - a setting's
        return dataclasses.replace(config, training=dataclasses.replace(training, **values))

    if model_of(config).attention_dropout and training.attention_backend == AUTOMATIC:
        overrides = {**model.overrides, "attention_dropout": 0.0}
        without = dataclasses.replace(model, overrides=overrides)
        yield (
            "model.overrides.attention_dropout=0",
            dataclasses.replace(config, model=without),
        )
    if training.attention_backend == "dense":
        yield "training.attention_backend=auto", trained(attention_backend=AUTOMATIC)
    if training.compile is False:
        yield "training.compile=auto", trained(compile=AUTOMATIC)
    if training.activation_checkpointing:
        yield (
            "training.activation_checkpointing=false",
            trained(activation_checkpointing=False),
        )
    if training.deepspeed != "zero1_bf16":
        yield "training.deepspeed=zero1_bf16", trained(deepspeed="zero1_bf16")
    if largest > batch.micro_batch_size and not config.phases:
        larger = dataclasses.replace(batch, micro_batch_size=largest)
        yield f"batch.micro_batch_size={largest}", dataclasses.replace(config, batch=larger)


def _heaviest(config: RunConfig, model: ModelConfig, backend: str, width: int) -> RunConfig:
    """Return the recipe of the phase whose micro-batches need most memory."""
    return max(
        (phase.config for phase in config.resolved_phases),
        key=lambda c: _activations_with(c, model, backend, c.batch.micro_batch_size, width),
    )


def _memory(
    config: RunConfig, model: ModelConfig, backend: str, rows: int, stage: int, world_size: int
) -> Memory:
    """Return what the heaviest phase needs on a rank, with so many rows at a ZeRO stage."""
    settings = _settings(config, world_size)
    width = needs.weight_bytes(settings)
    heaviest = _heaviest(config, model, backend, width)
    kept = _activations_with(heaviest, model, backend, rows, width)
    count = needs.parameters(model, VOCABULARY_MULTIPLE)
    offloaded = deepspeed_settings.offload_device(settings, "offload_optimizer") != "none"
    return Memory(*needs.states(count, stage, world_size, settings), kept, offloaded)


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
    config: RunConfig, model: ModelConfig, backend: str, kind: str, world_size: int, stage: int
) -> Fit:
    """Return which micro-batches fit a GPU with an attention back end."""
    problem = ""
    try:
        check_backend(model, backend)
    except ValueError as error:
        problem = str(error)
    heaviest = _heaviest(config, model, backend, needs.weight_bytes(_settings(config, world_size)))
    batch = heaviest.batch
    rows, blocks = batch.micro_batch_size, batch.global_batch_size // world_size

    def memory(rows: int) -> Memory:
        return _memory(config, model, backend, rows, stage, world_size)

    sizes = [
        size
        for size in range(1, blocks + 1)
        if blocks % size == 0 and memory(size).fits(DEVICES[kind].memory)
    ]
    largest = max(sizes, default=0)
    largest_bytes = memory(largest).on_device if largest else 0
    return Fit(backend, problem, rows, memory(rows).on_device, largest, largest_bytes)


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

"""What comes before the first step of an attempt: checks, the group of ranks, and the start.

Read `prepare`. Every rank calls it; what it returns does not change any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.manifest import CorpusManifest
from pretrain.checks import devices
from pretrain.checks import recipe as recipe_checks
from pretrain.checks import resume as resume_checks
from pretrain.config.deepspeed import check_same_state, compiles
from pretrain.config.load import public
from pretrain.config.run import RunConfig, Segments
from pretrain.config.schedules import learning_rate
from pretrain.data.sources import ConcatenatedBlocks, open_source
from pretrain.model.backends import choose_backend
from pretrain.model.config import ModelConfig
from pretrain.records import checkpoints, control, folder, ledger, versions
from pretrain.records import segments as run_segments
from pretrain.records.collective import Group
from pretrain.records.segments import Course, Source, corpora_of, order_of
from pretrain.spikes.policy import max_checkpoints_kept
from pretrain.train import resume
from pretrain.train.client import SupervisorClient
from pretrain.train.resume import ResumeState

if TYPE_CHECKING:
    from pretrain.engine.distributed import Process
    from pretrain.model.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Setup:
    """An attempt that the ledger knows, before its engine is built."""

    config: RunConfig
    """The newest recipe."""
    segments: Segments
    """Of the run."""
    architecture: ModelConfig
    manifests: Mapping[str, CorpusManifest]
    """Of `segments.sources`, by name."""
    settings: dict[str, Any]
    """DeepSpeed's."""
    process: Process
    group: Group
    hosts: Sequence[str]
    """Of each rank."""
    backend: str
    """Of attention."""
    compiled: bool
    peak_flops: float | None
    """Of all devices, per second; None where it is not known."""
    environment: Mapping[str, Any]
    """For the records: versions, machine, attention, compilation."""
    supervisor: SupervisorClient
    model: LanguageModel
    """With its initial weights."""
    parameters: int
    """Number of the model's, with padding."""
    blocks: ConcatenatedBlocks
    """Of the training splits."""
    start: ResumeState
    lock: Sequence[contextlib.ExitStack]
    """On rank 0, what keeps other attempts out of the run."""

    @property
    def run_folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.folder)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, lowered where a rollback asked for it."""
        return learning_rate(self.segments, step) * self.start.state.learning_rate_factor(step)

    def facts(self, step: int) -> dict[str, object]:
        """What a reader of a checkpoint needs to know without the run's folder."""
        blocks, order = self.segments.sizes.first_block(step), self.start.order
        (manifest, *_) = self.manifests.values()
        return {
            "architecture": self.architecture.to_dict(),
            "recipe": public(self.config),
            "deepspeed": self.settings,
            "ranks": self.group.world_size,
            "lineage": order.identity(blocks),
            "position": {
                "blocks": blocks,
                "epoch": order.epoch(blocks),
                "learning_rate": self.learning_rate(step),
            },
            "corpus": {
                "tokenizer_digest": manifest.tokenizer_digest,
                "vocab_size": manifest.vocab_size,
            },
            "corpora": self.start.corpora,
            "environment": self.environment,
        }


def prepare(config: RunConfig, source: Source | None, world_size: int) -> Setup | None:
    """Check the recipe, join the other ranks, build the model, choose where the run resumes.

    Args:
        config: the recipe.
        source: where it holds from, if the run has had another recipe.
        world_size: number of ranks.

    Returns:
        None if the run is done.

    Raises:
        ValueError: the recipe cannot be trained, or does not fit its run's folder.
        Failure: on every rank, if any refuses.
    """
    from pretrain.convert.initial_weights import initial_model
    from pretrain.engine.determinism import make_deterministic
    from pretrain.engine.distributed import gather
    from pretrain.engine.engine import deepspeed_json, start

    architecture = recipe_checks.check(config, world_size)
    settings = deepspeed_json(*config.deepspeed_arguments(world_size))
    course = resume_checks.check_run(config, source)
    run = Path(config.folder)
    if config.training.deterministic:
        make_deterministic(run, os.environ)
    process = start()
    group = Group(process.rank, process.world_size, gather)
    environment, peak_flops = _environment(
        config, architecture, settings, process.device.type, group
    )
    backend = environment["attention_backend"]
    lock: list[contextlib.ExitStack] = []
    copy = _copy_of_initial_weights(course, architecture)
    state, token = group.on_rank_0_slowly(lambda: _enter(course, copy, lock))
    supervisor = SupervisorClient(run, token, group.rank, config.training.steps)
    model = initial_model(config, architecture, backend, not state.checkpoints)
    parameters = sum(each.numel() for each in model.parameters())
    supervisor.report_setup()
    if state.is_done(config.training.steps):
        if group.rank == 0:
            sys.stdout.write(f"{run} is done already; nothing to train\n")
        return None
    blocks = ConcatenatedBlocks(
        tuple(open_source(each, "train") for each in course.segments.sources)
    )
    hosts = group.gather(socket.gethostname())
    point = checkpoints.find_resume_point(run, state.checkpoints, group)

    def begin() -> ResumeState:
        records = ledger.read_ledger(run / ledger.FILE_NAME)
        order, sizes = order_of(records)
        size = checkpoints.BYTES_PER_PARAMETER * parameters
        if point.manifest:
            size = checkpoints.size_of(point.manifest)
            before = order.identity(sizes.first_block(point.step))
            resume_checks.check_checkpoint(point.manifest, point.step, architecture, before)
            saved = point.manifest["deepspeed"]
            check_same_state(config.training.deepspeed, settings, saved, point.step)
        launched = control.read_control_file(run)
        number = state.next_attempt
        if launched and launched.token == token:
            number = launched.attempt
        share, corpora = blocks.share_of_tokens, corpora_of(records)
        start = ResumeState(number, token, point.step, state, order, share, size, corpora)
        most_kept = max_checkpoints_kept(config)
        resume.begin(course, settings, start, point, hosts, most_kept, environment)
        return start

    begun = group.on_rank_0(begin)
    supervisor.report_setup()
    return Setup(
        config,
        course.segments,
        architecture,
        course.manifests,
        settings,
        process,
        group,
        hosts,
        backend,
        environment["compiled"],
        peak_flops,
        environment,
        supervisor,
        model,
        parameters,
        blocks,
        begun,
        lock,
    )


def _environment(
    config: RunConfig,
    architecture: ModelConfig,
    settings: Mapping[str, Any],
    device_type: str,
    group: Group,
) -> tuple[dict[str, Any], float | None]:
    """Choose what depends on the devices, after checking that the recipe can be trained on them.

    Returns:
        What the records say of it, and the peak FLOP/s of all devices, if known.
    """
    import torch

    code = versions.check_same_code(group)
    on_gpu = device_type == "cuda"
    accelerator = torch.cuda.get_device_name() if on_gpu else "cpu"
    capability = float("{}.{}".format(*torch.cuda.get_device_capability())) if on_gpu else None
    group.on_rank_0(
        lambda: recipe_checks.check_device(config, group.world_size, device_type, capability)
    )
    backend = choose_backend(architecture, config.training.attention_backend, on_gpu)
    compiled = compiles(config.training.compile, settings, on_gpu)
    kind = devices.kind_of(accelerator) if on_gpu else None
    peak = devices.DEVICES[kind].flops if kind else None
    environment = {
        "versions": code,
        "platform": platform.platform(),
        "accelerator": accelerator,
        "cores": os.cpu_count(),
        "attention_backend": backend,
        "compiled": compiled,
    }
    return environment, group.world_size * peak if peak else None


def _copy_of_initial_weights(
    course: Course, architecture: ModelConfig
) -> Callable[[], dict[str, object]] | None:
    """What copies the model that the run starts from into its folder; None without one."""
    if not course.config.model.init_from:
        return None
    from pretrain.convert import init_from

    manifest = next(iter(course.manifests.values()))
    return lambda: init_from.copy_initial_model(course.config, architecture, manifest)


def _enter(
    course: Course,
    copy: Callable[[], dict[str, object]] | None,
    lock: list[contextlib.ExitStack],
) -> tuple[ledger.RunState, str]:
    """Lock the run and record how it goes on; returns its state and this attempt's token."""
    run, token = Path(course.config.folder), control.token_of(os.environ)
    control.check_not_superseded(run, token)
    lock.append(folder.lock(run))
    folder.check_corpora(course.segments, course.manifests)
    run_segments.begin(course, copy)
    state = ledger.run_state(ledger.read_ledger(run / ledger.FILE_NAME))
    if reason := folder.reject_damaged_result(run, state):
        sys.stdout.write(f"the last checkpoint is damaged, its steps are done again: {reason}\n")
        state = ledger.run_state(ledger.read_ledger(run / ledger.FILE_NAME))
    return state, token or secrets.token_hex(8)

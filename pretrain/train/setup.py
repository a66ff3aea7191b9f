"""What comes before the first step of an attempt: checks, the group of ranks, and the start.

Read `prepare`. Every rank calls it; what it returns does not change any more.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.checks import recipe as recipe_checks
from pretrain.checks import resume as resume_checks
from pretrain.config.deepspeed import compiles
from pretrain.config.run import RunConfig, Segments
from pretrain.config.schedules import learning_rate
from pretrain.data.sources import ConcatenatedBlocks, open_source
from pretrain.model.backends import choose_backend
from pretrain.model.config import ModelConfig
from pretrain.records import checkpoints, versions
from pretrain.records.collective import Group
from pretrain.records.segments import Source
from pretrain.train import resume
from pretrain.train.client import SupervisorClient
from pretrain.train.resume import AttemptInput, ResumeState

if TYPE_CHECKING:
    from pretrain.model.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Setup(AttemptInput):
    """An attempt that the ledger knows, before its engine is built."""

    supervisor: SupervisorClient
    model: LanguageModel
    """With its initial weights."""
    blocks: ConcatenatedBlocks
    """Of the training splits."""
    start: ResumeState

    @property
    def config(self) -> RunConfig:
        """The newest recipe."""
        return self.course.config

    @property
    def segments(self) -> Segments:
        """Of the run."""
        return self.course.segments

    @property
    def run_folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.folder)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, lowered where a rollback asked for it."""
        return learning_rate(self.segments, step) * self.start.state.learning_rate_factor(step)


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
    from pretrain.engine.distributed import broadcast, gather
    from pretrain.engine.engine import deepspeed_json, start

    architecture = recipe_checks.check(config, world_size)
    settings = deepspeed_json(*config.deepspeed_arguments(world_size))
    course = resume_checks.check_run(config, source)
    run = Path(config.folder)
    if config.training.deterministic:
        make_deterministic(run, os.environ)
    process = start()
    group = Group(process.rank, process.world_size, gather, broadcast)
    environment = _environment(config, architecture, settings, process.device.type, group)
    state, token = group.on_rank_0_slowly(lambda: resume.enter(course, architecture))
    supervisor = SupervisorClient(run, token, group.rank, config.training.steps)
    backend, compiled = environment["attention_backend"], environment["compiled"]
    model = initial_model(config, architecture, backend, compiled, not state.checkpoints)
    supervisor.report_setup()
    if state.is_done(config.training.steps):
        if group.rank == 0:
            sys.stdout.write(f"{run} is done already; nothing to train\n")
        return None
    sources = tuple(open_source(each, "train") for each in course.segments.sources)
    hosts = group.gather(socket.gethostname())
    given = AttemptInput(course, architecture, settings, process, group, hosts, environment)
    point = checkpoints.find_resume_point(run, state.checkpoints, group)
    size = checkpoints.BYTES_PER_PARAMETER * sum(each.numel() for each in model.parameters())
    begun = group.on_rank_0(lambda: resume.begin(given, point, token, size))
    supervisor.report_setup()
    blocks = ConcatenatedBlocks(sources, config.data.sequence_length)
    return Setup(**vars(given), supervisor=supervisor, model=model, blocks=blocks, start=begun)


def _environment(
    config: RunConfig,
    architecture: ModelConfig,
    settings: Mapping[str, Any],
    device_type: str,
    group: Group,
) -> dict[str, Any]:
    """Check that the devices can train the recipe, and return `AttemptInput.environment`."""
    import torch

    code, training = versions.check_same_code(group.gather), config.training
    on_gpu = device_type == "cuda"
    group.on_rank_0(lambda: recipe_checks.check_device(config, group.world_size, device_type))
    return {
        "versions": code,
        "platform": platform.platform(),
        "accelerator": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cores": os.cpu_count(),
        "attention_backend": choose_backend(architecture, training.attention_backend, on_gpu),
        "compiled": compiles(training.compile, settings, on_gpu),
    }

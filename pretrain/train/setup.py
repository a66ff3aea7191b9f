"""What comes before the first step of an attempt: checks, the group of ranks, and the start.

Read `prepare`. Every rank calls it; what it returns does not change any more. What concerns the
run's folder rank 0 does: `enter` before the checkpoints are verified, `begin` after all ranks have.
"""

import dataclasses
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import contents
from data_prep import tokenizer as tokenizers
from data_prep.common.files import write_json
from pretrain.checks import recipe as recipe_checks
from pretrain.checks import resume as resume_checks
from pretrain.config.deepspeed import check_same_state, compiles
from pretrain.config.load import RUN_FILE, deciding, dump
from pretrain.config.run import RunConfig, Segments
from pretrain.config.settings import flatten
from pretrain.data.order import Order
from pretrain.data.sources import ConcatenatedBlocks, open_source
from pretrain.model.backends import choose_backend
from pretrain.model.config import ModelConfig
from pretrain.records import checkpoints, control, folder, ledger, versions
from pretrain.records import segments as run_segments
from pretrain.records.checkpoints import ResumePoint
from pretrain.records.collective import Group
from pretrain.records.segments import RECIPES, Course, Source, corpora_of, order_of
from pretrain.spikes.policy import max_checkpoints_kept
from pretrain.train.client import SupervisorClient

if TYPE_CHECKING:
    from pretrain.engine.distributed import Process
    from pretrain.model.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class ResumeState:
    """How an attempt begins."""

    attempt: int
    token: str
    """Distinguishes this attempt from any other, even one that read the same ledger."""
    step: int
    """Its first."""
    state: ledger.RunState
    """The run's, before the attempt."""
    order: Order
    """The order of blocks that `state` leads to."""
    checkpoint_size: int
    """Bytes of a checkpoint; before the first one, an upper bound."""
    corpora: Sequence[Mapping[str, Any]]
    """As `segments.corpora_of` gives them."""
    seed: int
    """Of the order in the first step."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """An attempt before its engine is built."""

    course: Course
    """Of the run: its newest recipe, segments and corpora."""
    architecture: ModelConfig
    settings: dict[str, Any]
    """DeepSpeed's."""
    process: "Process"
    group: Group
    hosts: Sequence[str]
    """Of each rank."""
    environment: Mapping[str, Any]
    """Versions and machine, and what is chosen by them: `attention_backend` and `compiled`."""
    supervisor: SupervisorClient
    model: "LanguageModel"
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
        return self.segments.learning_rate(step) * self.start.state.learning_rate_factor(step)


def prepare(config: RunConfig, source: Source | None, world_size: int) -> Setup | None:
    """Check the recipe, join the other ranks, build the model, choose where the run resumes.

    Args:
        config: the recipe.
        source: where it holds from, if the run has had another recipe.
        world_size: number of ranks.

    Returns:
        None if the run is done.

    Raises:
        ValueError: the recipe cannot be trained here, or does not fit its run's folder.
        Failure: on every rank, if any refuses.
    """
    import torch

    from pretrain.convert.initial_weights import initial_model
    from pretrain.engine.determinism import make_deterministic
    from pretrain.engine.distributed import broadcast, gather, usable_gpus
    from pretrain.engine.engine import deepspeed_json, start

    usable_gpus()
    architecture = recipe_checks.check(config, world_size)
    settings = deepspeed_json(*config.deepspeed_arguments(world_size))
    course = resume_checks.check_run(config, source)
    run = Path(config.folder)
    if config.training.deterministic:
        make_deterministic(run, os.environ)
    compared = _compared(course, settings)
    process = start()
    group = Group(process.rank, process.world_size, gather, broadcast)
    code = versions.check_same(group.gather, compared)
    device, training = process.device.type, config.training
    group.on_rank_0(lambda: recipe_checks.check_device(config, world_size, device))
    on_gpu = device == "cuda"
    backend = choose_backend(architecture, training.attention_backend, on_gpu)
    compiled = compiles(training.compile, settings, on_gpu)
    environment: dict[str, Any] = {
        "versions": code,
        "platform": platform.platform(),
        "accelerator": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cores": os.cpu_count(),
        "attention_backend": backend,
        "compiled": compiled,
    }
    state, token = group.on_rank_0_slowly(lambda: enter(course, architecture))
    supervisor = SupervisorClient(run, token, group.rank, config.training.steps)
    model = initial_model(config, architecture, backend, compiled, not state.checkpoints)
    supervisor.report_setup()
    if state.is_done(config.training.steps):
        if group.rank == 0:
            sys.stdout.write(f"{run} is done already; nothing to train\n")
        return None
    sources = tuple(open_source(each, "train") for each in course.segments.sources)
    hosts = group.gather(socket.gethostname())
    committed = {step: state.manifests[step] for step in state.checkpoints}
    point = checkpoints.find_resume_point(run, committed, group)
    size = checkpoints.BYTES_PER_PARAMETER * sum(each.numel() for each in model.parameters())
    begun = group.on_rank_0(lambda: begin(course, architecture, settings, point, token, size))
    supervisor.report_setup()
    blocks = ConcatenatedBlocks(sources, config.data.sequence_length)
    ranks = process, group, hosts, environment
    setup = Setup(course, architecture, settings, *ranks, supervisor, model, blocks, begun)
    group.on_rank_0(lambda: _record(setup))
    return setup


def _compared(course: Course, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal on all ranks, by name; each host may have its own copies."""
    config = course.config
    files = {"training": dataclasses.asdict(config.training), config.training.deepspeed: settings}
    corpora = {
        f"files of {path}": contents.sample(Path(path), corpus.digest(), [*corpus.hashes])
        for path, corpus in course.manifests.items()
    }
    return deciding(config) | flatten(files) | corpora


def enter(course: Course, architecture: ModelConfig) -> tuple[ledger.RunState, str]:
    """Lock the run and record how it goes on; returns its state and this attempt's token.

    Raises:
        ValueError: another attempt trains it, or was launched since; a file of its corpora differs.
    """

    def copy() -> dict[str, object]:
        from pretrain.convert import initial_weights

        manifest, *_ = course.manifests.values()
        return initial_weights.copy_initial_model(course.config, architecture, manifest)

    run, token = Path(course.config.folder), control.token_of(os.environ)
    control.check_not_superseded(run, token)
    folder.lock(run)
    folder.check_corpora(course.manifests)
    run_segments.begin(course, copy if course.config.model.init_from else None)
    state = ledger.run_state(ledger.read_ledger(run / ledger.FILE_NAME))
    if reason := folder.reject_damaged_result(run, state):
        sys.stdout.write(f"the last checkpoint is damaged, its steps are done again: {reason}\n")
        state = ledger.run_state(ledger.read_ledger(run / ledger.FILE_NAME))
    return state, token or secrets.token_hex(8)


def begin(
    course: Course,
    architecture: ModelConfig,
    settings: Mapping[str, Any],
    point: ResumePoint,
    token: str,
    size: int,
) -> ResumeState:
    """Check what the attempt continues from, and delete what no longer counts.

    Args:
        course: of the run.
        architecture: of the model.
        settings: DeepSpeed's.
        point: the checkpoint that it continues from.
        token: of the attempt.
        size: upper bound on the bytes of a checkpoint.

    Raises:
        ValueError: the checkpoint is of another model, history or arithmetic; the newest attempt
            ended in a spike that was not answered; or the disk has no room for the checkpoints that
            may be kept.
    """
    config, run = course.config, Path(course.config.folder)
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    state, (order, sizes) = ledger.run_state(records), order_of(records)
    if point.manifest:
        size = checkpoints.size_of(point.manifest)
        before = order.identity(sizes.first_block(point.step))
        resume_checks.check_checkpoint(point.manifest, point.step, architecture, before)
        saved = point.manifest["deepspeed"]
        check_same_state(config.training.deepspeed, settings, saved, point.step)
    check_no_open_spike(config, state)
    launched, number = control.read_control_file(run), state.next_attempt
    if launched and launched.token == token:
        number = launched.attempt
    seed = order.seed_at(sizes.first_block(point.step))
    start = ResumeState(number, token, point.step, state, order, size, corpora_of(records), seed)
    _remove_rejected(config, start, point)
    return start


def check_no_open_spike(config: RunConfig, state: ledger.RunState) -> None:
    """Refuse to continue from checkpoints that a loss spike may have spoiled.

    Raises:
        ValueError: a spike was not answered by a rollback.
    """
    spike = state.unanswered_spike
    if spike is not None:
        raise ValueError(
            f"{config.folder}: the loss has spiked since step {spike['onset']} and the run was not "
            "rolled back yet; `zeroclap supervise` rolls it back and continues"
        )


def _remove_rejected(config: RunConfig, start: ResumeState, point: ResumePoint) -> None:
    """Record what was rejected, delete what no longer counts, and check that the rest fits."""
    run = Path(config.folder)
    for step, reason in point.rejected.items():
        sys.stdout.write(f"checkpoint of step {step} rejected: {reason}\n")
        ledger.append(run / ledger.FILE_NAME, "reject", step=step, reason=reason)
    kept = {*start.state.checkpoints} - {*point.rejected}
    # A checkpoint that could not be read may be intact: it stays until the next commit.
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    unproven = {r["step"] for r in records if r["kind"] == "reject"} - point.damaged
    checkpoints.remove(run, kept | unproven, lambda text: sys.stdout.write(f"{text}\n"))
    # Without any, for all that are kept, and one more: the oldest is deleted after a commit.
    missing = 1 if kept else max_checkpoints_kept(config) + 1
    checkpoints.check_disk_space(run, missing, start.checkpoint_size)


def _record(setup: Setup) -> None:
    """Write the recipe, the settings and the environment, and the attempt into the ledger."""
    run, start, hosts, environment = setup.run_folder, setup.start, setup.hosts, setup.environment
    recipe = next(r["recipe"] for r in reversed(start.state.segments) if "recipe" in r)
    for name in (RUN_FILE, f"{RECIPES}/{recipe}.yaml"):
        dump(setup.config, run / name)
    write_json(run / "deepspeed.json", setup.settings)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(run / folder.ENVIRONMENT, {**environment, "started": started})
    tokenizers.load(Path(setup.segments.sources[0].path)).save(run / "tokenizer.json")
    ledger.append(
        run / ledger.FILE_NAME,
        "attempt",
        attempt=start.attempt,
        token=start.token,
        step=start.step,
        ranks=len(hosts),
        micro_batch_size=setup.segments.at(start.step).config.batch.micro_batch_size,
        seed=start.seed,
        lineage=start.order.identity(),
        manifest=checkpoints.manifest_hash(run, start.step) if start.step else "",
        host=hosts[0],
        hosts=hosts,
        pid=os.getpid(),
        versions=environment["versions"],
        kernels=[environment[name] for name in ("accelerator", "attention_backend", "compiled")],
    )

"""Execute planned runs beside each other on this machine's devices, each a process of its own."""

import dataclasses
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import children
from data_prep.common.wording import duration
from finetune.batches import longest_input
from finetune.config import FinetuneConfig
from finetune.graphs import GRAPH_MULTIPLE, can_replay
from finetune.result import RunPlan, read_result
from finetune.runs import is_finished
from pretrain.checks import needs
from pretrain.checks.devices import HEADROOM
from pretrain.config import deepspeed
from pretrain.model.config import ModelConfig
from pretrain.processes.gpus import describe, environment, visible_gpus
from pretrain.processes.launching import describe_exit, free_port, tail

LOG = "log.txt"
_PROGRESS_SECONDS = 60.0
_CUDA_BYTES = 1 << 30
"""Of a process on a GPU: CUDA's context, kernels and workspaces; a guess."""
_CAUSE_LINES = 200
_ERROR = re.compile(r"(?:\[rank\d+\]: )?((?:finetune\.train: error|[\w.]+Error): \S.*)")
"""A line of a log that says why a run failed; torchrun's own error has no message."""


def run_bytes(config: FinetuneConfig, model: ModelConfig, world_size: int) -> int:
    """Estimate the bytes of a GPU that a run takes, those of CUDA included.

    Args:
        config: settings of the run.
        model: the architecture.
        world_size: processes of the run, each with a GPU.
    """
    settings = deepspeed.read_settings(*config.engine(world_size, on_gpu=True))
    width, stage = needs.weight_bytes(settings), deepspeed.stage_of(settings)
    states = needs.states(needs.parameters(model), stage, world_size, settings)
    model = dataclasses.replace(model, dropout=config.dropout)
    rows = settings["train_micro_batch_size_per_gpu"]
    length = longest_input(config.max_tokens, model)
    bias = needs.bias_bytes(model, rows, length, width, packed=False)
    activations = needs.activations(model, rows, length, 0.0, width, False, bias)
    weights, *_ = states
    graphs = -(-length // GRAPH_MULTIPLE) if can_replay(model, stage) else 0
    return _CUDA_BYTES + sum(states) + activations + graphs * weights  # each has gradients


def slots(
    gpus: Sequence[str], cores: int, jobs: int, world_size: int, fitting: int = 1
) -> list[list[str]]:
    """Return the GPUs of each run that may be in progress at once; empty lists for the CPU.

    Args:
        gpus: result of `visible_gpus`; none, or at least `world_size`.
        cores: cores that may be used.
        jobs: runs at once; 0: as many as the cores suffice for; of a GPU at least one, and no more
            than `fitting`, for which each process has two cores.
        world_size: processes per run.
        fitting: runs whose memory a GPU has.
    """
    if not gpus:
        return [[] for _ in range(jobs or max(1, cores // world_size))]
    shares = [
        list(gpus[first : first + world_size])
        for first in range(0, len(gpus) - world_size + 1, world_size)
    ]
    most = min(cores // (2 * world_size), fitting * len(shares))
    return [shares[number % len(shares)] for number in range(jobs or max(len(shares), most))]


def run_all(
    output: Path,
    plans: Sequence[RunPlan],
    model: ModelConfig,
    *,
    planned: int,
    jobs: int = 0,
    world_size: int = 1,
) -> dict[str, str]:
    """Execute runs; a failed run does not stop the others.

    A line is printed for each run that ends and, each minute, for each run in progress.

    Args:
        output: the folder of the runs' folders.
        plans: prepared plans, in the order in which they start.
        model: the architecture.
        planned: `plans` and those finished before; a run has the threads, and so the last digits,
            that it has where none is.
        jobs: runs at once; 0: as the devices allow (`slots`).
        world_size: processes per run, no more than there are GPUs.

    Returns:
        The cause of each failure, by the run's name.
    """
    cores = children.usable_cores()
    needed = max((run_bytes(plan.config, model, world_size) for plan in plans), default=1)
    free = min((gpu.free if gpu.is_shared else 0 for gpu in describe()), default=0)
    fitting = int(HEADROOM * free / needed)
    devices = slots(visible_gpus(), cores, jobs, world_size, fitting)[: max(1, planned)]
    threads = max(1, cores // (len(devices) * world_size))
    failed, done = dict[str, str](), list[RunPlan]()
    began = logged = time.monotonic()

    def start(plan: RunPlan, slot: int) -> subprocess.Popen[bytes]:
        return _start(output, plan, devices[slot], threads, world_size)

    def ended(plan: RunPlan, code: int, left: Sequence[RunPlan]) -> None:
        done.append(plan)
        progress, work = f"{len(done)}/{len(plans)}", sum(each.work for each in done)
        if left and work:
            seconds = (time.monotonic() - began) / work * sum(each.work for each in left)
            progress += f", {duration(seconds)} left"
        # It may have the result of an earlier one.
        if code != 0 or not is_finished(output / plan.name, plan):
            failed[plan.name] = _cause(output, plan, code)
            how = f"failed, {describe_exit(code)}; see {output / plan.name / LOG}"
        else:
            how = _scores(read_result(output / plan.name))
        print(f"[{progress}] {plan.name}: {how}", flush=True)

    def polled(running: Sequence[RunPlan]) -> None:
        nonlocal logged
        if time.monotonic() - logged >= _PROGRESS_SECONDS:
            logged = time.monotonic()
            for plan in running:
                line = tail(output / plan.name / LOG, 1).strip()
                print(f"    {plan.name}: {line}", flush=True)

    children.run_in_slots(plans, len(devices), start, ended, polled)
    return failed


def _start(
    output: Path, plan: RunPlan, gpus: Sequence[str], threads: int, world_size: int
) -> subprocess.Popen[bytes]:
    port = str(free_port())
    environ = environment(gpus, threads) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = ["finetune.train", str(output / plan.name)]
    if world_size > 1:  # torchrun ends all processes when one fails
        torchrun = ["torch.distributed.run", f"--nproc-per-node={world_size}"]
        words = [*torchrun, f"--master-port={port}", "-m", *words]
    with (output / plan.name / LOG).open("wb") as log:
        return children.start(words, environ, log)


def _cause(output: Path, plan: RunPlan, code: int) -> str:
    """Return the last error in a failed run's log, or else how its process ended."""
    lines = tail(output / plan.name / LOG, _CAUSE_LINES).splitlines()
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    return errors[-1] if errors else describe_exit(code)


def _scores(result: Mapping[str, Any]) -> str:
    """Return the scores of a finished run, in words."""
    names = result["plan"].definition.score_names
    best, last = (
        ", ".join(f"{name} {result[epoch][name]:.4f}" for name in names)
        + " (collapsed)" * result[epoch]["collapsed"]
        for epoch in ("best", "last")
    )
    return (
        f"{best} in epoch {result['best']['epoch']}; {last} in the last; "
        f"{result['seconds']:.0f} s, {result['tokens_per_second']:,.0f} tokens/s"
    )

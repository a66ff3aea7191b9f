"""Parallel fine-tuning runs on the devices of this machine: start, watch and report.

A run that collapsed is followed by its retry; a run that fails does not stop the others.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from data_prep.common import children
from data_prep.common.wording import count
from finetune import benchmarks, planning
from finetune.collapse import LEAST_RETRIED, USUAL_RETRIES
from finetune.plan import LOG, RESULT, RunPlan, retry_after
from finetune.planning import is_finished, next_run, result_of
from pretrain.processes.gpus import gpus_of, visible_gpus
from pretrain.processes.launching import describe_exit, free_port, tail

_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 60.0
_TAIL_LINES = 15
_CAUSE_LINES = 200
_ERROR = re.compile(r"(?:\[rank\d+\]: )?((?:finetune\.train: error|[\w.]+Error): \S.*)")
"""A line of a log that says why a run failed; torchrun's own error has no message."""
_LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"}


def slots(gpus: Sequence[str], cores: int, jobs: int, world_size: int) -> list[list[str]]:
    """Return the GPUs of each run that may be in progress at once; empty lists for the CPU.

    Args:
        gpus: result of `visible_gpus`; none, or at least `world_size`.
        cores: cores that may be used.
        jobs: runs at once; 0: as many as the GPUs, or else the cores, suffice for.
        world_size: processes per run.

    """
    if not gpus:
        return [[] for _ in range(jobs or max(1, cores // world_size))]
    shares = [
        list(gpus[first : first + world_size])
        for first in range(0, len(gpus) - world_size + 1, world_size)
    ]
    return [shares[number % len(shares)] for number in range(jobs or len(shares))]


@dataclasses.dataclass
class _Running:
    plan: RunPlan
    process: subprocess.Popen[bytes]


def run_all(
    output: Path,
    plans: Sequence[RunPlan],
    log: Callable[[str], object] = print,
    *,
    jobs: int = 0,
    world_size: int = 1,
    retries: int | None = 0,
) -> dict[str, str]:
    """Do the runs; a run that fails does not stop the others.

    Args:
        output: the folder of the runs' folders.
        plans: prepared plans, in the order in which they start.
        log: receives a line for each run that ends, and each minute one for each in progress.
        jobs: runs at once; 0: as the devices allow.
        world_size: processes per run.
        retries: how often a run that collapsed is repeated; None: see `retry_after`.

    Returns:
        Why each run that failed did so, by the run's name.

    Raises:
        ValueError: a run has more processes than there are GPUs.
    """
    gpus_of(world_size, "--world-size")
    cores = len(os.sched_getaffinity(0))
    devices = _devices(jobs, world_size)[: max(1, len(plans))]
    threads = max(1, cores // (len(devices) * world_size))
    waiting, failed, logged = deque(plans), dict[str, str](), time.monotonic()
    progress = _Progress()
    with children.terminating(_Running) as running:
        while waiting or running:
            for slot, gpus in enumerate(devices):
                if waiting and slot not in running:
                    running[slot] = _start(output, waiting.popleft(), gpus, threads, world_size)
            time.sleep(_POLL_SECONDS)
            for run in _take_ended(running):
                if _has_failed(output, run):
                    failed[run.plan.name] = _cause(output, run)
                elif following := next_run(output, run.plan, retries):
                    following.write(output / following.name)
                    waiting.append(following)
                left = [*waiting, *(other.plan for other in running.values())]
                log(f"[{progress.count(run.plan, left)}] {_outcome(output, run, retries)}")
            if time.monotonic() - logged >= _PROGRESS_SECONDS:
                logged = time.monotonic()
                _log_progress(output, running, log)
    return failed


def run_rounds(
    output: Path,
    plans: Sequence[RunPlan],
    log: Callable[[str], object] = print,
    *,
    jobs: int = 0,
    world_size: int = 1,
    retries: int | None = 0,
) -> dict[str, str]:
    """Do the runs that are not done yet; those that start from another's model come afterwards.

    Arguments and returned value as for `run_all`.

    Raises:
        ValueError: nothing was started, see `planning.check`.
    """
    planning.check(output, plans)
    failed = dict[str, str]()
    if any(plan.searched for plan in plans):
        words, failed = _cost(output, plans, jobs, world_size)
        log(f"{output}: {words}")
        if failed:
            return failed
    for round_ in planning.rounds(plans):
        try:
            waiting = planning.prepare(output, round_, retries)
        except ValueError as error:  # what they were to start from failed
            if not failed:
                raise
            failed |= {plan.name: f"not started: {error}" for plan in round_}
            continue
        finished = len(round_) - len(waiting)
        log(f"{output}: runs to do: {len(waiting)}, finished before: {finished}")
        failed |= run_all(output, waiting, log, jobs=jobs, world_size=world_size, retries=retries)
    return failed


def _cost(
    output: Path, plans: Sequence[RunPlan], jobs: int, world_size: int
) -> tuple[str, dict[str, str]]:
    """Return what a search costs, and why trials failed, as `run_all` does.

    The pace is that of the finished runs, else of a short trial on every device.
    """
    left = [plan for plan in plans if not is_finished(output / plan.name, plan.save_model)]
    if not left:
        return "every run of the search is finished", {}
    devices = min(len(left), len(_devices(jobs, world_size)))
    paths, measured = list(output.glob(f"*/{RESULT}")), "the finished runs"
    with tempfile.TemporaryDirectory() as folder:
        if not paths:
            trial = planning.trial(min(plans, key=lambda plan: plan.work))
            trials = [dataclasses.replace(trial, seed=seed) for seed in range(devices)]
            for each in trials:
                each.write(Path(folder) / each.name)
            failed = run_all(
                Path(folder), trials, lambda line: None, jobs=jobs, world_size=world_size
            )
            if failed:
                return f"a short trial of {trial.task} failed", failed
            paths, measured = list(Path(folder).glob(f"*/{RESULT}")), f"a trial of {trial.task}"
        results = [result_of(path.parent) for path in paths]
    pace = sum(result["training_seconds"] for result in results)
    pace /= sum(result["plan"]["work"] for result in results)
    minutes = pace * sum(plan.work for plan in left) / devices / 60
    time_left = f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:,.0f} h"
    return (
        f"a search of {count(len(left), 'run')}, about {time_left} with {devices} at once, at the "
        f"pace of {measured}; what is finished is kept if you stop it"
    ), {}


def _devices(jobs: int, world_size: int) -> list[list[str]]:
    """Return the GPUs of each run that may be in progress at once on this machine."""
    return slots(visible_gpus(), len(os.sched_getaffinity(0)), jobs, world_size)


def _log_progress(
    output: Path, running: Mapping[int, _Running], log: Callable[[str], object]
) -> None:
    for run in running.values():
        log(f"    {run.plan.name}: {tail(output / run.plan.name / LOG, 1).strip()}")


def _take_ended(running: dict[int, _Running]) -> Iterator[_Running]:
    """Yield the runs that have ended; each is removed from `running` only when it is yielded."""
    for slot in [slot for slot, run in running.items() if run.process.poll() is not None]:
        yield running.pop(slot)


class _Progress:
    """Number of finished runs, and an estimate of the time that the others take."""

    def __init__(self) -> None:
        self._started, self._ended, self._work = time.monotonic(), 0, 0

    def count(self, ended: RunPlan, left: Sequence[RunPlan]) -> str:
        """Count a run that has ended; returns text such as "2/9, about 5 min left"."""
        self._ended += 1
        self._work += ended.work
        count = f"{self._ended}/{self._ended + len(left)}"
        if not left or not self._work:
            return count
        rate = (time.monotonic() - self._started) / self._work
        minutes = rate * sum(plan.work for plan in left) / 60
        return f"{count}, {f'about {minutes:.0f} min' if minutes >= 1 else 'under a minute'} left"


def _start(
    output: Path, plan: RunPlan, gpus: Sequence[str], threads: int, world_size: int
) -> _Running:
    # Each run is a process group of its own, even if a launcher started this process.
    environment = children.environment()
    for name in _LAUNCHER_VARIABLES & environment.keys():
        del environment[name]
    port = str(free_port())
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment.setdefault("OMP_NUM_THREADS", str(threads))  # a study has runs of its own at once
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    command = [sys.executable, "-m"]
    if world_size > 1:  # torchrun ends all processes when one fails
        command += ["torch.distributed.run", f"--nproc-per-node={world_size}"]
        command += [f"--master-port={port}", "-m"]
    folder = output / plan.name
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [*command, "finetune.train", str(folder)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=children.end_with_parent,
        )
    return _Running(plan, process)


def _has_failed(output: Path, run: _Running) -> bool:
    """Return whether a run that has ended failed; it may have the result of an earlier one."""
    finished = is_finished(output / run.plan.name, run.plan.save_model)
    return run.process.returncode != 0 or not finished


def _cause(output: Path, run: _Running) -> str:
    """Return the last error in the log of a run that failed, or else how its process ended."""
    lines = tail(output / run.plan.name / LOG, _CAUSE_LINES).splitlines()
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    return errors[-1] if errors else describe_exit(run.process.returncode)


def _outcome(output: Path, run: _Running, retries: int | None) -> str:
    name, folder = run.plan.name, output / run.plan.name
    if _has_failed(output, run):
        end = textwrap.indent(tail(folder / LOG, _TAIL_LINES), "    ").rstrip()
        exit_code = describe_exit(run.process.returncode)
        return f"{name}: failed, {exit_code}; {folder / LOG} ends:\n{end}"
    result = result_of(folder)
    scores = benchmarks.of_result(result).score_names
    best, last = (
        ", ".join(f"{score} {result[epoch][score]:.4f}" for score in scores)
        for epoch in ("best", "last")
    )
    collapsed = f"; collapsed: {result['collapsed']}" if result["collapsed"] else ""
    if retry_after(run.plan, result, retries):
        collapsed += ", and is repeated (not with --retries 0)"
    elif retries is None and retry_after(run.plan, result, USUAL_RETRIES):
        why = "part of a search"
        if not run.plan.searched:
            why = f"fewer than {LEAST_RETRIED:,} training examples"
        collapsed += f", not repeated: {why} (with --retries {USUAL_RETRIES} it is)"
    return (
        f"{name}: {best} in epoch {result['best']['epoch']}; {last} in the last; "
        f"{result['seconds']:.0f} s, {result['tokens_per_second']:,.0f} tokens/s{collapsed}"
    )

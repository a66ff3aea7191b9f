"""Many runs from one command: a process each, side by side on the devices there are.

`plan_runs` lists them, `prepare` refuses what does not fit and skips what is done, `run_all` starts
processes and waits. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from data_prep.files import sha256_of
from finetune import config as settings
from finetune import glue
from finetune.config import LOG, MODEL, RESULT, RunPlan, read_plan
from pretrain.supervisor import free_port

_POLL_SECONDS = 0.1
_TAIL_LINES = 15


def plan_runs(
    model: Path,
    data: Path,
    tasks: Sequence[str],
    weights: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str],
    save_models: bool = False,
) -> list[RunPlan]:
    """Every run of a call, seed by seed, so that whole comparisons are done first.

    Reads the data once, so that a bad line is found before anything starts.

    Raises:
        ValueError: no such model folder, task or data, a bad line, or a bad setting.
    """
    model_sha256 = _model_digest(model)
    plans = []
    for task in (glue.find(name) for name in tasks):
        config = settings.override(task.defaults, overrides)
        for split in glue.SPLITS:
            task.read(data, split)
        data_sha256 = task.digest(data)
        for seed, kind in itertools.product(seeds, weights):
            plans.append(
                RunPlan(
                    task=task.name,
                    weights=kind,
                    seed=seed,
                    model=str(model.resolve()),
                    data=str(data.resolve()),
                    model_sha256=model_sha256,
                    data_sha256=data_sha256,
                    config=config,
                    save_model=save_models,
                )
            )
    return plans


def _model_digest(model: Path) -> str:
    names = ("model.json", "model.safetensors")
    for name in names:
        if not (model / name).is_file():
            raise ValueError(
                f"{model}: is no model folder, it has no {name} "
                "(`python -m pretrain export RUN --output FOLDER` makes one)"
            )
    return "".join(sha256_of(model / name)[:32] for name in names)


def prepare(output: Path, plans: Sequence[RunPlan]) -> list[str]:
    """Write the plans of the runs that are not done, and name those.

    Raises:
        ValueError: the folder has results of the same task that could not be compared with these.
    """
    present = [read_plan(path.parent) for path in sorted(output.glob(f"*/{RESULT}"))]
    for old, new in itertools.product(present, plans):
        changed = old.differences(new) if old.task == new.task else []
        if changed:
            raise ValueError(
                f"{output / old.name}: is of another kind than the runs asked for; accepted: the "
                f"same settings, or a new --output ({'; '.join(changed)})"
            )
    waiting = [plan for plan in plans if not _is_done(output / plan.name, plan.save_model)]
    for plan in waiting:
        plan.write(output / plan.name)
    return [plan.name for plan in waiting]


def _is_done(folder: Path, with_model: bool) -> bool:
    return (folder / RESULT).is_file() and ((folder / MODEL).is_dir() or not with_model)


def visible_gpus() -> list[str]:
    """The GPUs that processes may use, as CUDA_VISIBLE_DEVICES names them."""
    present = [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None or not present:
        return present
    return [device.strip() for device in allowed.split(",") if device.strip()]


@dataclasses.dataclass
class _Running:
    name: str
    process: subprocess.Popen[bytes]


def run_all(
    output: Path, names: Sequence[str], jobs: int, say: Callable[[str], object]
) -> list[str]:
    """Do the runs, `jobs` at once; a run that fails does not keep others from being done.

    Args:
        output: the folder of the runs' folders.
        names: of the runs, all prepared.
        jobs: processes at once; 0: one a GPU, or one a core where there is none.
        say: takes a line for the user.

    Returns:
        The names of the runs that failed.
    """
    gpus, cores = visible_gpus(), len(os.sched_getaffinity(0))
    jobs = min(jobs or len(gpus) or cores, len(names))
    waiting = deque(names)
    with _all_ended() as running:
        while waiting or running:
            for slot in range(jobs):
                if waiting and slot not in running:
                    gpu = gpus[slot % len(gpus)] if gpus else None
                    running[slot] = _start(output, waiting.popleft(), gpu, max(1, cores // jobs))
            time.sleep(_POLL_SECONDS)
            for slot, run in list(running.items()):
                if run.process.poll() is not None:
                    del running[slot]
                    done = len(names) - len(waiting) - len(running)
                    say(f"[{done}/{len(names)}] {_outcome(output, run)}")
    return [name for name in names if not (output / name / RESULT).is_file()]


@contextmanager
def _all_ended() -> Iterator[dict[int, _Running]]:
    """Runs by slot; whatever happens to us, even SIGTERM, those still there are ended."""
    running: dict[int, _Running] = {}
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield running
    finally:
        for run in running.values():
            run.process.terminate()
        for run in running.values():
            run.process.wait()
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _start(output: Path, name: str, gpu: str | None, threads: int) -> _Running:
    # Whatever launcher started us, each run is a group of one.
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in foreign}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(threads),
    }
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    folder = output / name
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune.train", str(folder)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return _Running(name, process)


def _outcome(output: Path, run: _Running) -> str:
    folder = output / run.name
    if not (folder / RESULT).is_file():
        lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
        code = run.process.returncode
        return f"{run.name}: failed with exit code {code}; {folder / LOG} ends:\n{tail}"
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    metrics = glue.find(result["task"]).metrics
    best = ", ".join(f"{name} {result['best'][name]:.4f}" for name in metrics)
    last = ", ".join(f"{name} {result['last'][name]:.4f}" for name in metrics)
    return (
        f"{run.name}: {best} in epoch {result['best']['epoch']}; {last} in the last; "
        f"{result['seconds']:.0f} s"
    )

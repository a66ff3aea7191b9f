"""Fine-tune checkpoints on tasks while a run goes on (`evaluation.tasks`).

The supervisor calls `look` now and then. Export and fine-tuning are processes of their own, one at
a time, so that training neither waits nor changes. A checkpoint that comes while another one is
evaluated has its turn afterwards, unless a newer one has come by then. What fails is said and stops
nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import children, files
from pretrain.config.run import RunConfig
from pretrain.config.sections import EvaluationConfig
from pretrain.processes import gpus, processes
from pretrain.processes.launching import describe_exit, tail
from pretrain.records import ledger, metrics
from pretrain.records.tasks import FOLDER, described, surviving_scores

_NICENESS = 10
"""Training comes first where both use the same cores."""


def check_tasks(config: EvaluationConfig) -> None:
    """Refuse unknown tasks, and data and settings that cannot be used.

    Raises:
        ValueError: what the fine-tuning commands say of them.
    """
    environment = _environment(config)
    if config.tasks and config.device != "cpu" and not environment[gpus.VARIABLE]:
        raise ValueError(f"evaluation.device: {config.device} is not there; accepted here: cpu")
    for command in _finetuning(config, Path("model"), Path("scores")):
        done = subprocess.run(
            [*command, "--check"], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2] or describe_exit(done.returncode)
            raise ValueError(f"evaluation: {last.partition('error: ')[2] or last}")


def _finetuning(config: EvaluationConfig, model: Path, output: Path) -> list[list[str]]:
    """Return the commands that score a model, each into a folder of its own below `output`."""
    python, common = [sys.executable, "-m", "finetune"], ["--jobs=1", "--retries=0", "--no-models"]
    found = []
    if config.named:
        tasks = [f"--data={config.data}", f"--tasks={','.join(config.named)}"]
        found.append([*python, "glue", str(model), *tasks, f"--output={output / 'named'}"])
    for file in config.own:
        name = Path(file).stem
        own = [f"--train={file}", f"--name={name}", f"--output={output / f'own-{name}'}"]
        found.append([*python, "finetune", str(model), *own])
    return [[*command, *common, *config.settings] for command in found]


def _export(run: Path, step: int, model: Path) -> list[str]:
    """Return the command that makes a model folder from a checkpoint."""
    python = [sys.executable, "-m", "pretrain", "export"]
    return [*python, str(run), f"--step={step}", f"--output={model}"]


def _environment(config: EvaluationConfig) -> dict[str, str]:
    """Return the variables of processes that see the device of the evaluations alone."""
    number = int(config.device.partition(":")[2] or 0)
    shown = gpus.visible_gpus()[number : number + 1] if config.device != "cpu" else []
    return {
        **children.environment(),
        gpus.VARIABLE: ",".join(shown),
        **({} if shown else {"DS_ACCELERATOR": "cpu"}),
    }


def _begin_child() -> None:
    children.end_with_parent()
    os.nice(_NICENESS)


class Evaluations:
    """Evaluates the checkpoints of a run, one after the other."""

    def __init__(self, config: RunConfig, say: Callable[[str], object]) -> None:
        """Prepare; nothing is started before `look`.

        Args:
            config: the recipe.
            say: receives messages.
        """
        self._config, self._settings, self._say = config, config.evaluation, say
        self._run = Path(config.folder)
        self._ledger = self._run / ledger.FILE_NAME
        self._size = -1
        self._child: subprocess.Popen[bytes] | None = None
        self._commands: deque[list[str]] = deque()
        self._commit: dict[str, Any] = {}
        """The ledger's record of the checkpoint that is evaluated; {} if none is."""
        self._failed: set[str] = set()
        """Hashes of checkpoints that are not tried again by this supervisor."""

    def look(self) -> bool:
        """Start or go on with what is due; returns whether an evaluation is in progress."""
        if not self._settings.tasks:
            return False
        try:
            if self._child and (code := self._child.poll()) is not None:
                self._child = None
                self._go_on(code)
            if self._child is None:
                self._begin_newest()
        except Exception as error:  # whatever it is, training goes on
            self._fail(str(error) or type(error).__name__)
        return self._child is not None

    def finish(self, is_stopped: Callable[[], bool], poll_seconds: float) -> None:
        """Wait for the evaluation in progress and that of the last checkpoint, unless stopped."""
        if self.look():
            self._say(
                f"waiting for the evaluation of step {self._commit['step']:,} (Ctrl-C stops the "
                f"wait, the same command continues it); its log: {self._folder / 'log.txt'}"
            )
        while not is_stopped() and self.look():
            time.sleep(poll_seconds)

    def close(self) -> None:
        """End the process in progress; the next supervisor goes on with its evaluation."""
        if self._child is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(processes.GRACE_SECONDS)
        self._child = None

    @property
    def _folder(self) -> Path:
        name = f"step-{self._commit['step']:08d}-{self._commit['manifest'][:8]}"
        return self._run / FOLDER / name

    def _begin_newest(self) -> None:
        """Begin with the newest checkpoint that is due, unless it was evaluated."""
        size = self._ledger.stat().st_size if self._ledger.exists() else 0
        if size == self._size:
            return
        self._size = size
        records = ledger.read_ledger(self._ledger)
        kept = ledger.run_state(records, self._config.training.seed).checkpoints
        steps, interval = self._config.training.steps, self._settings.interval
        due = [step for step in kept if step % interval == 0 or step == steps]
        if not due:
            return
        commits = [r for r in records if r["kind"] == "commit" and r["step"] == due[-1]]
        done = {line["manifest"] for line in surviving_scores(self._run, records)}
        if commits[-1]["manifest"] in done | self._failed:
            return
        self._commit = commits[-1]
        model = self._folder / "model"
        exports = [] if model.exists() else [_export(self._run, due[-1], model)]
        commands = _finetuning(self._settings, model, self._folder)
        self._commands = deque([*exports, *commands])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start()

    def _start(self) -> None:
        with (self._folder / "log.txt").open("ab") as log:
            self._child = subprocess.Popen(
                self._commands.popleft(),
                env=_environment(self._settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_begin_child,
            )

    def _go_on(self, code: int) -> None:
        """Start the next command after one that has ended, or record the scores."""
        self._size = -1  # the ledger may have grown meanwhile
        if code:
            last = tail(self._folder / "log.txt", 1).strip()
            self._fail(f"{describe_exit(code)}{': ' if last else ''}{last}")
        elif self._commands:
            self._start()
        else:
            self._record(sorted(self._folder.glob("*/*/result.json")))
            self._end()

    def _end(self) -> None:
        """Forget the checkpoint and its model."""
        shutil.rmtree(self._folder / "model", ignore_errors=True)
        self._commit = {}

    def _record(self, paths: Sequence[Path]) -> None:
        """Write the scores of each task's best epoch, all or none."""
        lines = []
        for path in paths:
            result = json.loads(path.read_text(encoding="utf-8"))
            scores = {name: value for name, value in result["best"].items() if name != "epoch"}
            line = {"step": self._commit["step"], "manifest": self._commit["manifest"]}
            lines.append({**line, "task": result["task"], "scores": scores})
        known = self._run / metrics.TASKS
        before = known.read_bytes() if known.exists() else b""
        text = "".join(f"{files.strict_json(line)}\n" for line in lines)
        files.write_atomically(known, before + text.encode())
        self._say(described(lines))

    def _fail(self, reason: str) -> None:
        if not self._commit:  # none was begun
            self._say(f"WARNING: no evaluation: {reason}")
            return
        self._failed.add(self._commit["manifest"])
        step, log = self._commit["step"], self._folder / "log.txt"
        self._say(f"WARNING: no evaluation of step {step:,}: {reason} (log: {log})")
        self._end()

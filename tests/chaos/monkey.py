"""Random faults strike a supervised run, which must end as if nothing had happened.

usage: python -m tests.chaos.monkey --config zero1-fp32 --faults 200 --seed 1 --output DIR

A tiny model is trained twice through `zeroclap supervise`: undisturbed, and while faults
strike. A supervisor that has ended is started again, as a person would. At the end the weights, the
losses that survive and the validation losses must be those of the undisturbed run, and `audit` must
be sound. The faults are a pure function of the seed and of what the monkey sees when each strikes:
the step, the processes, the files. Timing decides what it sees, so a seed repeats the kinds of the
faults and not every victim. DIR/faults.jsonl says what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from data_prep.common.exit_codes import EXIT_DONE, EXIT_USAGE
from pretrain.processes import processes
from pretrain.records import audit, checkpoints, control, ledger, metrics
from tests.fixtures import RECIPE, make_corpus
from tests.pretrain.builders import weights_of

ROOT = Path(__file__).parents[2]
STEPS_PER_FAULT, LAST_STEPS = 8, 10
"""A run that is finished before the last fault ends the game early; the summary counts them."""
PATIENCE = 600.0
"""Seconds without a new step, a new attempt or an end of the supervisor that fail the run."""
HANG_SECONDS = 20.0
COMMON = (
    "batch.global_batch_size=16",
    "training.checkpoint_interval=3",
    "training.evaluation_interval=6",
    "training.checkpoints_kept=4",
    # Nothing is judged: a tiny corpus that is read twenty times has odd losses of its own.
    "spike.window=100000",
    "spike.validation_nats=100",
    "supervision.max_retries=100000",
    f"supervision.hang_seconds={HANG_SECONDS}",
    # On a busy machine a start-up may take minutes.
    "supervision.init_seconds=500",
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What is trained, and how close to the undisturbed run it has to end."""

    settings: tuple[str, ...]
    later: tuple[str, ...] = ()
    """Settings from the middle of the faults on."""
    tolerance: float = 0.0
    """Largest difference of a weight or a loss; 0: equal bit for bit."""


CONFIGURATIONS = {
    "zero1-fp32": Configuration(("training.deepspeed=zero1_fp32",)),
    "zero3-bf16-workers": Configuration(
        ("training.deepspeed=zero3_bf16", "training.data_workers=1")
    ),
    # One rank adds the gradients of a batch in another order than two: rounding, of which 1.2e-7
    # and 3.5e-7 were seen after some twenty steps, and which grows with the steps.
    "zero2-shrinking": Configuration(
        ("training.deepspeed=zero2_fp32",),
        later=("supervision.processes_per_node=1",),
        tolerance=1e-5,
    ),
}


class Trouble(AssertionError):
    """The run did not end as it should; the message is for a person."""


class NoProcess(Exception):
    """A fault finds no process to strike."""


class Run:
    """A run in a folder, and the supervisor that a person keeps alive."""

    def __init__(self, output: Path, name: str, recipe: Path, settings: tuple[str, ...]) -> None:
        self.folder, self.settings, self._recipe = output / name, list(settings), recipe
        self._log = output / f"{name}.log"
        self.supervisor: subprocess.Popen[bytes] | None = None
        self._refused = 0  # times in a row

    def start(self) -> None:
        """Start a supervisor."""
        module = [sys.executable, "-m", "finetune.zeroclap", "supervise", str(self._recipe)]
        with self._log.open("ab") as log:
            self.supervisor = subprocess.Popen(
                [*module, f"folder={self.folder}", *COMMON, *self.settings],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finished(self) -> bool:
        """Start a supervisor that has ended again; return whether the run is finished."""
        assert self.supervisor
        code = self.supervisor.poll()
        if code is None or code == EXIT_DONE:
            return code is not None
        self._refused = self._refused + 1 if code == EXIT_USAGE else 0
        if self._refused > 5:
            raise Trouble(f"the supervisor refuses to start; see {self._log}")
        self.start()
        return False

    def roles(self) -> dict[str, psutil.Process]:
        """Return the living processes of the tree, in an order that does not depend on their ids.

        A data worker and a rank have the same environment; the rank is the parent.
        """
        found: dict[str, psutil.Process] = {}
        if self.supervisor and self.supervisor.poll() is None:
            found["supervisor"] = psutil.Process(self.supervisor.pid)
        for member in sorted(processes.members(self.folder), key=lambda member: member.pid):
            kind = "launcher" if member.rank is None else f"rank {member.rank}"
            number = sum(name.startswith(kind) for name in found)
            found[f"{kind}, process {number}"] = member.process
        return dict(sorted(found.items()))

    def signal(self, process: psutil.Process, number: int) -> None:
        """Send a signal to a process that may have ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        if self.supervisor and process.pid == self.supervisor.pid and number == signal.SIGKILL:
            self.supervisor.wait()

    def cut_power(self) -> None:
        """Kill every process at once, as far as a signal each is at once."""
        while everyone := self.roles():
            for process in everyone.values():
                self.signal(process, signal.SIGKILL)

    def step(self) -> int:
        """Return the number of steps on the surviving lineage."""
        lines = metrics.read_metrics(self.folder / metrics.METRICS)
        return int(lines[-1]["step"]) + 1 if lines else 0

    def committed(self) -> list[Path]:
        """Return the folders of the committed checkpoints, oldest first."""
        folders = sorted((self.folder / "checkpoints").glob("step-*"))
        return [folder for folder in folders if (folder / checkpoints.MANIFEST).is_file()]

    def sign_of_life(self) -> object:
        """Return something that changes while the run makes progress."""
        return self.step(), len(list(self.folder.glob("logs/*"))), self.supervisor

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if the run finishes before."""
        known, changed = self.sign_of_life(), time.monotonic()
        while not condition():
            if self.finished():
                return False
            if (newest := self.sign_of_life()) != known:
                known, changed = newest, time.monotonic()
            if time.monotonic() - changed > PATIENCE:
                raise Trouble(f"nothing has happened for {PATIENCE:.0f} s; {self._log}")
            time.sleep(0.05)
        return True


class Monkey:
    """Strikes a run with faults that its dice choose."""

    def __init__(self, run: Run, seed: int, output: Path) -> None:
        self.run, self._dice, self._seed = run, random.Random(seed), seed
        self._journal = output / "faults.jsonl"
        self._old_control = output / "old-control"
        self.faults: list[str] = []
        self._kinds: dict[str, Callable[[], str]] = {
            "kill": lambda: self._signal(signal.SIGKILL),
            "terminate": lambda: self._signal(signal.SIGTERM),
            "freeze": self._freeze,
            "freeze-until-killed": self._freeze_until_killed,
            "power-cut": self._cut_power,
            "damage": self._damage,
            "torn-lines": self._tear,
            "stale-control-files": self._make_control_stale,
            "full-disk": self._fill_disk,
        }

    def strike(self) -> bool:
        """Wait for the moment of the next fault and do it; return False if the run has finished."""
        # What the dice say does not depend on what is seen, so that a seed repeats its kinds.
        self._dice = random.Random(f"{self._seed} {len(self.faults)}")
        what = self._dice.choice(list(self._kinds))
        when = self._dice.choice(["soon", "step", "step", "save"])
        if not self._wait(when):
            return False
        self._keep_control()
        step = self.run.step()
        try:
            done = self._kinds[what]()
        except NoProcess:
            done = "no process"
        sentence = f"step {step}, {when}: {what}: {done}"
        self.faults.append(sentence)
        with self._journal.open("a") as file:
            file.write(json.dumps({"time": time.time(), "fault": sentence}) + "\n")
        print(f"[{len(self.faults)}] {sentence}", flush=True)
        return True

    def _wait(self, when: str) -> bool:
        if when == "soon":  # often during a start-up
            until = time.monotonic() + self._dice.uniform(0.0, 10.0)
            return self.run.wait_for(lambda: time.monotonic() >= until)
        target = self.run.step() + self._dice.randint(1, 3)
        before = set(self.run.folder.glob("checkpoints/*.partial"))
        if when == "step":
            return self.run.wait_for(lambda: self.run.step() >= target)
        # A save takes some tens of milliseconds; a missed one is followed by another.
        return self.run.wait_for(
            lambda: (
                bool({*self.run.folder.glob("checkpoints/*.partial")} - before)
                or self.run.step() >= target + 3
            )
        )

    def _victim(self) -> tuple[str, psutil.Process]:
        if not (roles := self.run.roles()):
            raise NoProcess
        return self._dice.choice(list(roles.items()))

    def _signal(self, number: signal.Signals) -> str:
        name, process = self._victim()
        self.run.signal(process, number)
        return f"{number.name} to {name}"

    def _freeze(self) -> str:
        victim, seconds = self._victim(), self._dice.uniform(0.5, 3.0)
        self.run.signal(victim[1], signal.SIGSTOP)
        time.sleep(seconds)
        self.run.signal(victim[1], signal.SIGCONT)
        return f"{victim[0]} for {seconds:.1f} s"

    def _freeze_until_killed(self) -> str:
        """Freeze a process until it is gone; nobody but a person kills a supervisor."""
        name, process = self._victim()
        self.run.signal(process, signal.SIGSTOP)
        if name == "supervisor":
            time.sleep(3.0)
            self.run.signal(process, signal.SIGKILL)
            return f"{name}, then SIGKILL"
        started = time.monotonic()
        self.run.wait_for(lambda: not processes.is_alive(process))
        return f"{name}, gone after {time.monotonic() - started:.0f} s"

    def _cut_power(self) -> str:
        self.run.cut_power()
        return "all processes killed"

    def _damage(self) -> str:
        """Damage a file of the newest checkpoint; one that is intact must be left."""
        self.run.cut_power()
        found = self.run.committed()
        if len(found) < 2:
            return "all processes killed; too few checkpoints to damage one"
        path = self._dice.choice(sorted(found[-1].iterdir()))
        how, data = self._dice.choice(["flip", "truncate", "delete"]), path.read_bytes()
        place = self._dice.randrange(len(data) or 1)
        if how == "delete":
            path.unlink()
        elif how == "truncate" or not data:
            path.write_bytes(data[:place])
        else:
            flipped = data[place] ^ (1 << self._dice.randrange(8))
            path.write_bytes(data[:place] + bytes([flipped]) + data[place + 1 :])
        return f"all processes killed, {how} {path.parent.name}/{path.name} at byte {place}"

    def _tear(self) -> str:
        """Cut off what no checkpoint made durable, and leave incomplete last lines."""
        self.run.cut_power()
        records = ledger.read_ledger(self.run.folder / ledger.FILE_NAME)
        durable = max((r["step"] for r in records if r["kind"] == "commit"), default=0)
        done = []
        for name in (ledger.FILE_NAME, metrics.METRICS, metrics.VALIDATION):
            path = self.run.folder / name
            if not path.exists():
                continue
            lines = path.read_bytes().splitlines(keepends=True)
            if name == metrics.METRICS:
                lost = [n for n, line in enumerate(lines) if self._is_after(line, durable)]
                if lost and lost[-1] == len(lines) - 1 and self._dice.random() < 0.5:
                    lines.pop()
            last = lines[-1] if lines else b'{"step": 1}\n'
            cut = self._dice.randrange(1, len(last))
            path.write_bytes(b"".join(lines) + last[:cut])
            done.append(f"{cut} bytes of a line added to {name}")
        return f"all processes killed, {'; '.join(done) or 'no lines yet'}"

    @staticmethod
    def _is_after(line: bytes, step: int) -> bool:
        return line.endswith(b"\n") and json.loads(line)["step"] >= step

    def _keep_control(self) -> None:
        """Keep the first control files of the run, to bring them back much later."""
        folder = control.folder_of(self.run.folder)
        if (folder / control.FILE_NAME).exists() and not self._old_control.exists():
            with contextlib.suppress(OSError, shutil.Error):  # they change meanwhile
                shutil.copytree(folder, self._old_control)

    def _make_control_stale(self) -> str:
        """Bring back the files of a former attempt, and requests and errors that nobody deleted."""
        self.run.cut_power()
        folder = control.folder_of(self.run.folder)
        newest = control.read_control_file(self.run.folder)
        if newest is None:
            return "all processes killed; no control files yet"
        (folder / f"stop-{newest.token}").touch()
        stale = {"rank": 0, "host": "gone", "time": 1.0, "code": 1, "message": "an old error"}
        (folder / f"failure-{newest.token}-0.json").write_text(json.dumps(stale))
        choice = self._dice.choice(["leave", "former", "torn", "delete"])
        order = folder / control.FILE_NAME
        if choice == "former" and self._old_control.exists():
            shutil.copytree(self._old_control, folder, dirs_exist_ok=True)
        elif choice == "torn":
            order.write_bytes(order.read_bytes()[:20])
        elif choice == "delete":
            order.unlink()
        return f"all processes killed, old requests, {order.name}: {choice}"

    def _fill_disk(self) -> str:
        """Limit the size of the files that one process may write, for a while.

        What it writes beyond fails with EFBIG, as with ENOSPC or EDQUOT on a full disk. Children
        inherit the limit, so it is lifted for all.
        """
        victim, seconds = self._victim(), self._dice.uniform(0.5, 3.0)
        size = self._dice.choice([0, 1024, 20_000])
        try:
            _, hard = victim[1].rlimit(resource.RLIMIT_FSIZE)
            victim[1].rlimit(resource.RLIMIT_FSIZE, (size, hard))
        except (psutil.Error, PermissionError) as error:
            return f"skipped: {error}"
        time.sleep(seconds)
        for process in [victim[1], *self.run.roles().values()]:
            with contextlib.suppress(psutil.Error):
                process.rlimit(resource.RLIMIT_FSIZE, (hard, hard))
        return f"files of {victim[0]} end at {size} bytes for {seconds:.1f} s"


def play(output: Path, name: str, faults: int, seed: int) -> str:
    """Train undisturbed and with faults, and compare; return a summary.

    Raises:
        Trouble: the runs differ, or something was left behind.
    """
    configuration = CONFIGURATIONS[name]
    output.mkdir(parents=True)
    recipe = output / "tiny.yaml"
    recipe.write_text(RECIPE.format(corpus=make_corpus(output / "corpus")))
    steps = STEPS_PER_FAULT * faults + LAST_STEPS
    settings = (*configuration.settings, f"training.steps={steps}")
    started = time.monotonic()
    reference = Run(output, "undisturbed", recipe, settings)
    run = Run(output, "run", recipe, settings)
    monkey = Monkey(run, seed, output)
    try:
        reference.start()
        reference.wait_for(lambda: False)
        begun = time.monotonic()
        run.start()
        for number in range(faults):
            if configuration.later and number == faults // 2:
                run.cut_power()
                run.settings += configuration.later
            if not monkey.strike():
                break
        run.wait_for(lambda: False)
        difference = compare(run.folder, reference.folder, steps, configuration.tolerance)
    except BaseException:
        words = f"--config {name} --faults {faults} --seed {seed} --output DIR"
        print(f"failed: python -m tests.chaos.monkey {words}; the faults:")
        print(*monkey.faults, sep="\n")
        raise
    finally:
        reference.cut_power()
        run.cut_power()
    records = ledger.read_ledger(run.folder / ledger.FILE_NAME)
    attempts = [record for record in records if record["kind"] == "attempt"]
    return (
        f"{name}, seed {seed}: {len(monkey.faults)} of {faults} faults, {len(attempts)} attempts, "
        f"{steps} steps; weights differ by at most {difference:.1e}; "
        f"undisturbed {begun - started:.0f} s, with faults {time.monotonic() - begun:.0f} s"
    )


def compare(run: Path, reference: Path, steps: int, tolerance: float = 0.0) -> float:
    """Compare a finished run with the undisturbed one; return the largest difference.

    Raises:
        Trouble: they differ by more than `tolerance`, or the run is not sound.
    """
    import torch

    found, expected = weights_of(run, steps), weights_of(reference, steps)
    if found.keys() != expected.keys():
        raise Trouble("other weights than those of the undisturbed run")
    far_off = [(found[name].double() - expected[name].double()).abs().max() for name in expected]
    difference = float(torch.stack(far_off).max())  # NaN if one is
    losses, expected_losses = (surviving_losses(folder) for folder in (run, reference))
    if losses.keys() != expected_losses.keys():
        missing = sorted(expected_losses.keys() ^ losses.keys())
        raise Trouble(f"losses of other steps than those of the undisturbed run: {missing}")
    far = [
        f"{name}: {losses[name]} and {value}"
        for name, value in expected_losses.items()
        if not math.isclose(losses[name], value, rel_tol=0.0, abs_tol=tolerance)
    ]
    if not difference <= tolerance or far:
        raise Trouble(f"weights differ by {difference}; losses that differ: {far}")
    proof = audit.audit(run)
    left = [str(member.pid) for member in processes.members(run)]
    left += map(str, run.glob("checkpoints/*.partial"))
    if proof.problems or proof.unchecked or left:
        raise Trouble(f"audit: {proof.problems + proof.unchecked}; left behind: {left}")
    return difference


def surviving_losses(run: Path) -> dict[tuple[str, int], float]:
    """Return the losses of a run's surviving lineage, by file and step."""
    lines = metrics.surviving(metrics.read_metrics(run / metrics.METRICS))
    measured = metrics.surviving_validation(metrics.read_metrics(run / metrics.VALIDATION), lines)
    return {
        (name, line["step"]): line["loss"]
        for name, found in ((metrics.METRICS, lines), (metrics.VALIDATION, measured))
        for line in found
    }


def main() -> int:
    """Run the monkey from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=CONFIGURATIONS, default="zero1-fp32")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="folder that does not exist")
    options = parser.parse_args()
    print(play(options.output, options.config, options.faults, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())

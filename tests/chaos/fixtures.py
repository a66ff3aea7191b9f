"""A tiny run with a real supervisor and real DeepSpeed processes, and an undisturbed run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.processes import processes
from pretrain.records import control, ledger
from tests.chaos import monkey
from tests.chaos.fault import PLAN, plan
from tests.running import wait_until

ROOT = Path(__file__).parents[2]
STEPS = 16
SHORT = (
    f"training.steps={STEPS}",
    "training.checkpoint_interval=4",
    "training.evaluation_interval=8",
    "training.checkpoints_kept=4",
    "spike.margin_steps=1",
    "spike.confirm_steps=4",
    "supervision.max_retries=20",
    "supervision.hang_seconds=60",
)
PATIENCE = 300.0
"""Seconds to wait for what takes ten seconds on an idle machine."""


@pytest.fixture(scope="session")
def undisturbed(train_ranks, tmp_path_factory):
    """A run without faults."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert [code for code, *_ in train_ranks(folder, *SHORT)] == [0, 0]
    return folder


class Chaos:
    """A run in a folder, and the supervisors that a test starts for it."""

    def __init__(self, folder, recipe_path):
        self.run, self.recipe = folder / "run", recipe_path
        self.plan, self.log = folder / "plan.json", folder / "supervisor.log"
        self.started = []
        self.schedule({})

    def schedule(self, faults):
        """Plan the faults of each attempt, as tuples (what, rank, step)."""
        named = {
            attempt: [dict(zip(("what", "rank", "step"), f, strict=True)) for f in fs]
            for attempt, fs in faults.items()
        }
        self.plan.write_text(json.dumps(named))

    def command(self, *overrides):
        module = "tests.chaos.supervise"
        settings = [f"folder={self.run}", *SHORT, *overrides]
        return [sys.executable, "-m", module, str(self.recipe), *settings]

    def start(self, *overrides, before=(), **variables):
        environment = {**os.environ, PLAN: str(self.plan), "PYTHONPATH": str(ROOT), **variables}
        with self.log.open("ab") as file:
            child = subprocess.Popen(
                [*before, *self.command(*overrides)],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.started.append(child)
        return child

    def supervise(self, *overrides, **keywords):
        """Start a supervisor and wait for its end; return its exit code."""
        return self.start(*overrides, **keywords).wait(PATIENCE)

    def records(self, *kinds):
        records = ledger.read_ledger(self.run / ledger.FILE_NAME)
        return [record for record in records if not kinds or record["kind"] in kinds]

    def kinds(self, *kinds):
        return [record["kind"] for record in self.records(*kinds)]

    def start_steps(self):
        return [record["step"] for record in self.records("attempt")]

    def wait_for(self, condition):
        wait_until(condition, self.output)

    def wait_for_pause(self):
        """Wait until the attempt pauses, as planned."""
        self.wait_for((self.run / "paused").exists)

    def go_on(self):
        (self.run / "paused").unlink()

    def launchers(self):
        """Return the process ids of the launcher: one, or none after its end."""
        return [member.pid for member in processes.members(self.run) if member.rank is None]

    def signal_launcher(self, number):
        (launcher,) = self.launchers()
        os.kill(launcher, number)

    def output(self):
        logs = sorted((self.run / "logs").glob("*.log"))
        return "\n".join(path.read_text(errors="replace") for path in [self.log, *logs])

    def assert_same_as(self, undisturbed):
        """Assert that the run ended as one without faults, and that nothing was left behind."""
        assert self.kinds()[-1] == "done", self.output()
        assert not self.kinds("discontinuity")
        monkey.compare(self.run, undisturbed, STEPS)

    def clean_up(self):
        for child in self.started:
            if child.poll() is None:
                child.kill()
                child.wait()
        for node in (0, 1):
            processes.end_all(self.run, 0.0, node)


@pytest.fixture
def chaos(tmp_path, recipe):
    chaos = Chaos(tmp_path, recipe.path)
    yield chaos
    chaos.clean_up()


@pytest.fixture
def attempt(train_ranks, chaos):
    """`attempt(token, *faults)`: one attempt of two ranks with this token, without a launcher."""
    chaos.run.mkdir()  # as a supervisor does

    def run(token, *faults):
        def sabotage(rank):
            os.environ[control.TOKEN_VARIABLE] = token
            for fault in faults:
                plan(fault, chaos.run)

        return train_ranks(chaos.run, *SHORT, sabotage=sabotage)

    return run

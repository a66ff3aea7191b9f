"""A rank with faults, which the launcher starts in place of pretrain.train.

The plan is a JSON file: attempt number -> faults, each with `what`, `rank` and `step`. Each fault
patches one place of the product before the real training starts. The product knows nothing of it.
"""

import contextlib
import io
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

PLAN = "CHAOS_PLAN"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise KeyError("a fault of this rank alone")


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def let_the_clock_jump():
    """Make the wall clock jump forwards and back by up to a month."""
    real, jumps = time.time, random.Random(os.getpid())
    time.time = lambda: real() + jumps.uniform(-3e6, 3e6)


def at_step(step, action):
    """Act before an update."""
    from pretrain.engine.engine import Engine

    original = Engine.backward

    def call(self, *arguments, **keywords):
        if arguments[-1] == step:
            action(self)
        return original(self, *arguments, **keywords)

    Engine.backward = call


def before_engine(action):
    """Act during the start-up, after the attempt was recorded in the ledger."""
    from pretrain.engine.engine import Engine

    original = Engine.__init__

    def call(self, *arguments, **keywords):
        action()
        original(self, *arguments, **keywords)

    Engine.__init__ = call


def before_save(step, action):
    from pretrain.records import checkpoints

    original = checkpoints.save

    def call(run, number, facts, **keywords):
        if number == step:
            action()
        original(run, number, facts, **keywords)

    checkpoints.save = call


def in_writing(step, action):
    """Act before torch writes a file of a checkpoint; the action gets its path and its bytes."""
    import torch

    original = torch.save

    def call(value, path, *arguments, **keywords):
        if f"step-{step:08d}" not in str(path):
            return original(value, path, *arguments, **keywords)
        data = io.BytesIO()
        original(value, data, *arguments, **keywords)
        action(Path(path), data.getvalue())
        return original(value, path, *arguments, **keywords)

    torch.save = call


def before_record(step, action):
    """Act when the checkpoint is committed and the ledger does not have it yet."""
    from pretrain.train.saver import Saver

    original = Saver._commit

    def call(self, number):
        if number == step:
            action()
        original(self, number)

    Saver._commit = call


def before_check(step, action):
    """Act when all files are written, before the attempt checks whether it was superseded."""
    from pretrain.records import checkpoints

    original = checkpoints.save

    def call(run, number, facts, *, before_commit, **keywords):
        def check():
            if number == step:
                action()
            before_commit()

        original(run, number, facts, before_commit=check, **keywords)

    checkpoints.save = call


def half_written(path, data):
    path.write_bytes(data[: len(data) // 2])
    die()


def fill_run(run):
    """Fill the disk that holds the run to the last byte."""
    with (run / "filler").open("ab", buffering=0) as file:
        for size in (65536, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


def make_gradients_nan(engine):
    """Make a gradient NaN from now on, but not the loss."""
    parameter = next(p for p in engine.module.parameters() if p.requires_grad)
    handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
    engine._chaos = handle  # kept until the process ends


def plan(fault, run):
    """Patch the product for one fault."""
    what, step = fault["what"], fault["step"]

    def pause(engine):
        """Wait until the test continues."""
        (run / "paused").touch()
        while (run / "paused").exists():
            time.sleep(0.05)

    arrange = {
        "die": lambda: at_step(step, lambda engine: die()),
        "freeze-at-start": lambda: before_engine(freeze),
        "raise": lambda: at_step(step, lambda engine: fail()),
        "freeze": lambda: at_step(step, lambda engine: freeze()),
        "exit-0": lambda: at_step(step, lambda engine: os._exit(0)),
        "pause": lambda: at_step(step, pause),
        "die-before-save": lambda: before_save(step, die),
        "die-while-writing": lambda: in_writing(step, half_written),
        "die-when-committed": lambda: before_record(step, die),
        "freeze-before-commit": lambda: before_check(step, freeze),
        "nan-gradients": lambda: at_step(step, make_gradients_nan),
        "fill-run": lambda: at_step(step, lambda engine: fill_run(run)),
        "clock": let_the_clock_jump,
    }
    arrange[what]()


def launch_with_faults():
    """Let this process launch ranks that run this module, in place of pretrain.train.

    A machine counts as silent after 30 s, in place of 60.
    """
    from pretrain.supervision import launch, nodes

    nodes.SILENCE_SECONDS, nodes.QUIET_SECONDS = 30.0, 3.0
    real = launch.command

    def command(*words):
        return ["tests.chaos.fault" if word == "pretrain.train" else word for word in real(*words)]

    launch.command = command


def main():
    from pretrain.records import control
    from pretrain.train.__main__ import main as train

    run = Path(sys.argv[-1]).parent
    control_file = control.read_control_file(run)
    faults = json.loads(Path(os.environ[PLAN]).read_text()) if os.environ.get(PLAN) else {}
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    for fault in faults.get(str(control_file.attempt), []):
        if fault.get("rank", 0) in (rank, "all"):
            plan(fault, run)
    return train(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

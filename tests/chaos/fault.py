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


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_):
    raise KeyError("a fault of this rank alone")


def freeze(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def let_the_clock_jump():
    """Make the wall clock jump forwards and back by up to a month."""
    real, jumps = time.time, random.Random(os.getpid())
    time.time = lambda: real() + jumps.uniform(-3e6, 3e6)


def before(owner, name, action, when=lambda *arguments: True):
    """Act before each call of a function for which `when` holds; both get its arguments."""
    original = getattr(owner, name)

    def call(*arguments, **keywords):
        if when(*arguments):
            action(*arguments)
        return original(*arguments, **keywords)

    setattr(owner, name, call)


def write_half(value, path, *_):
    import torch

    data = io.BytesIO()
    torch.save(value, data)
    Path(path).write_bytes(data.getvalue()[: len(data.getvalue()) // 2])
    die()


def fill_run(run):
    """Fill the disk that holds the run to the last byte."""
    with (run / "filler").open("ab", buffering=0) as file:
        for size in (65536, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


def make_gradients_nan(engine, *_):
    """Make a gradient NaN from now on, but not the loss."""
    parameter = next(p for p in engine.module.parameters() if p.requires_grad)
    handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
    engine._chaos = handle  # kept until the process ends


def plan(fault, run):
    """Patch the product for one fault."""
    import torch

    from pretrain.engine.engine import Engine
    from pretrain.train.attempt import Attempt
    from pretrain.train.log import RunLog

    what, step = fault["what"], fault["step"]

    def at_step(action):
        """Act before an update."""
        before(Engine, "backward", action, lambda engine, given: given.step == step)

    def is_step(attempt, number):
        return number == step

    def is_written(log):
        return [*(run / "checkpoints").glob(f"step-{step:08d}.*.partial")]

    def pause(*_):
        """Wait until the test continues."""
        (run / "paused").touch()
        while (run / "paused").exists():
            time.sleep(0.05)

    def is_of_checkpoint(value, path, *_):
        return f"step-{step:08d}" in str(path)

    arrange = {
        "die": lambda: at_step(die),
        # During the start-up, after the attempt was recorded in the ledger.
        "freeze-at-start": lambda: before(Engine, "__init__", freeze),
        "raise": lambda: at_step(fail),
        "exit-0": lambda: at_step(lambda *_: os._exit(0)),
        "pause": lambda: at_step(pause),
        "die-while-writing": lambda: before(torch, "save", write_half, is_of_checkpoint),
        # When the checkpoint is committed and the ledger does not have it yet.
        "die-when-committed": lambda: before(Attempt, "_commit", die, is_step),
        # When all files are written, before the attempt checks whether it was superseded.
        "freeze-before-commit": lambda: before(RunLog, "check_not_superseded", freeze, is_written),
        "nan-gradients": lambda: at_step(make_gradients_nan),
        "fill-run": lambda: at_step(lambda *_: fill_run(run)),
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

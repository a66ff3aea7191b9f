"""A rank to which something happens: started by the launcher in place of pretrain.train.

The plan is a JSON file: attempt number -> faults, each with `what`, `rank` and `step`. Each patches
one place of the product at import and goes on to the true trainer. Nothing here is known to the
product.
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
    """Wall-clock time that goes forwards and back by up to a month."""
    true, jumps = time.time, random.Random(os.getpid())
    time.time = lambda: true() + jumps.uniform(-3e6, 3e6)


def at_step(step, action):
    """Before an update."""
    from pretrain.engine.engine import Engine

    original = Engine.step

    def call(self, micro_batches, objective, learning_rate, seed, number):
        if number == step:
            action(self)
        return original(self, micro_batches, objective, learning_rate, seed, number)

    Engine.step = call


def slow_steps(seconds):
    """Time to be killed in."""
    from pretrain.engine.engine import Engine

    original = Engine.step

    def call(*arguments):
        time.sleep(seconds)
        return original(*arguments)

    Engine.step = call


def before_engine(action):
    """In the start-up, when the run is opened and the ledger knows of the attempt."""
    from pretrain.engine.engine import Engine

    original = Engine.__init__

    def call(self, *arguments, **keywords):
        action()
        original(self, *arguments, **keywords)

    Engine.__init__ = call


def before_save(step, action):
    from pretrain.run import checkpoints

    original = checkpoints.save

    def call(run, number, *arguments, **keywords):
        if number == step:
            action()
        original(run, number, *arguments, **keywords)

    checkpoints.save = call


def in_writing(step, action):
    """In place of torch's writing of a file of a checkpoint: gets its path and its bytes."""
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


def before_manifest(step, action):
    """All is written and hashed, nothing committed."""
    from pretrain.run import checkpoints

    original = checkpoints.write_json

    def call(path, value):
        if path.name == checkpoints.MANIFEST and value["step"] == step:
            action()
        original(path, value)

    checkpoints.write_json = call


def before_telling(step, action):
    """Committed, and the ledger does not know."""
    from pretrain.run.saver import Saver

    original = Saver._commit

    def call(self, number):
        if number == step:
            action()
        original(self, number)

    Saver._commit = call


def before_fence(step, action):
    """All is written, and before it is committed the attempt asks whether it still counts."""
    from pretrain.run import checkpoints

    original = checkpoints.save

    def call(run, number, facts, *, before_commit, **keywords):
        def ask():
            if number == step:
                action()
            before_commit()

        original(run, number, facts, before_commit=ask, **keywords)

    checkpoints.save = call


def half_written(path, data):
    path.write_bytes(data[: len(data) // 2])
    die()


def fill_disk(folder):
    """Take all that is left of the disk until the next step."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb") as file:
        while True:
            file.write(b"\0" * 65536)
            file.flush()


def fill_run(run):
    """Take all that is left of the disk that holds the run, to the last byte."""
    with (run / "filler").open("ab", buffering=0) as file:
        for size in (65536, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


def damage(run, step, how):
    """Do something to a checkpoint's second file, as a disk might."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    path = sorted(folder.glob("*_optim_states.pt"))[-1]
    data = path.read_bytes()
    if how == "flip":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    (run / "checkpoints" / "latest").write_text("")


def tear_ledger(run):
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(b'{"number": 99, "time": 1.0, "ki')


def spoil_losses(engine):
    """A loss that is NaN from now on."""
    from pretrain.objectives.masked import MaskedLM

    original = MaskedLM.loss
    MaskedLM.loss = lambda *arguments: original(*arguments) * float("nan")


def spoil_gradients(engine):
    """NaN where a gradient should be, from now on; the loss is none."""
    parameter = next(p for p in engine.module.parameters() if p.requires_grad)
    handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
    engine._chaos = handle  # kept: goes with the process


def plan(fault, run):
    """Arrange for one fault."""
    what, step = fault["what"], fault["step"]
    checkpoint = fault.get("checkpoint", 0)

    def hurt_and_die(how):
        return lambda engine: (damage(run, checkpoint, how), die())

    def pause(engine):
        """Until the test goes on."""
        (run / "paused").touch()
        while (run / "paused").exists():
            time.sleep(0.05)

    arrange = {
        "die-at-start": die,
        "die": lambda: at_step(step, lambda engine: die()),
        "freeze-at-start": lambda: before_engine(freeze),
        "raise": lambda: at_step(step, lambda engine: fail()),
        "freeze": lambda: at_step(step, lambda engine: freeze()),
        "exit-0": lambda: at_step(step, lambda engine: os._exit(0)),
        "pause": lambda: at_step(step, pause),
        "die-before-save": lambda: before_save(step, die),
        "die-while-writing": lambda: in_writing(step, half_written),
        "die-when-hashed": lambda: before_manifest(step, die),
        "die-when-committed": lambda: before_telling(step, die),
        "freeze-before-commit": lambda: before_fence(step, freeze),
        "flip": lambda: at_step(step, hurt_and_die("flip")),
        "cut": lambda: at_step(step, hurt_and_die("cut")),
        "remove": lambda: at_step(step, hurt_and_die("remove")),
        "tear-ledger": lambda: at_step(step, lambda engine: (tear_ledger(run), die())),
        "nan-losses": lambda: at_step(step, spoil_losses),
        "nan-gradients": lambda: at_step(step, spoil_gradients),
        "fill-disk": lambda: in_writing(step, lambda path, data: fill_disk(path.parents[1])),
        "free-disk": lambda: at_step(
            step, lambda engine: (run / "checkpoints" / "filler").unlink(missing_ok=True)
        ),
        "fill-run": lambda: at_step(step, lambda engine: fill_run(run)),
        "clock": let_the_clock_jump,
        "slow": lambda: slow_steps(0.7),
    }
    arrange[what]()


def main():
    from pretrain.supervision import control as orders
    from pretrain.train import main as train

    run = Path(sys.argv[-1]).parent
    order = orders.read(run)
    faults = json.loads(Path(os.environ[PLAN]).read_text()) if os.environ.get(PLAN) else {}
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    for fault in faults.get(str(order.attempt), []):
        if fault.get("rank", 0) in (rank, "all"):
            plan(fault, run)
    return train(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

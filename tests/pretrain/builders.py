"""Small objects that many tests need."""

import contextlib
import dataclasses
import io
import itertools
import json
import os

import pytest

from data_prep.common.files import read_bytes
from pretrain.config.run import Sizes
from pretrain.config.sections import FaultConfig
from pretrain.data.batches import PretrainingBatches
from pretrain.data.mixture import Mixture
from pretrain.data.order import Order
from pretrain.loop.loop import exchange
from pretrain.loop.protocols import StepInput, StepRecord, StepResult
from pretrain.records import checkpoints
from pretrain.records.collective import Group

ONE = Mixture(((0, (1,)),))
"""The mixture of a single corpus."""
ALONE = Group(0, 1, lambda value: [value], lambda value: value)
"""The group of a single rank."""


def pairwise(*axes):
    """Cases of the product of the axes that hold every pair of two values, in its order."""
    cases = [*itertools.product(*axes)]
    pairs = {case: {*itertools.combinations(enumerate(map(str, case)), 2)} for case in cases}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return [case for case in cases if case in chosen]


def slow(*cases):
    """Cases that are left to the slow tests."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def short(steps, evaluation_interval, confirm_steps=3):
    """Settings of a run of so few steps, with a checkpoint after every second."""
    return [
        *(f"training.steps={steps}", f"training.evaluation_interval={evaluation_interval}"),
        *("training.checkpoint_interval=2", "schedule.warmup_steps=1"),
        *("spike.margin_steps=1", f"spike.confirm_steps={confirm_steps}"),
    ]


def main(*words):
    """The exit code and the output of a command of pretrain."""
    from finetune.zeroclap import main as pretrain

    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        code = pretrain([str(word) for word in words])
    return code, written.getvalue()


def weights_of(run, step):
    """The fp32 weights of a checkpoint, which must be complete."""
    from pretrain.engine.consolidated import consolidated_weights

    folder = checkpoints.folder_of(run, step)
    checkpoints.read_manifest(folder)
    return consolidated_weights(folder)


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def failing(action, left, name=""):
    """An action on a path that fails while there are errors left, the last one first.

    With a name it fails for files of that name only.
    """

    def act(path, *arguments, **keywords):
        if left and name in ("", path.name):
            number = left.pop()
            raise OSError(number, os.strerror(number), str(path))
        return action(path, *arguments, **keywords)

    return act


def order_of(total, seed=1):
    """The order of a run of one corpus with so many blocks."""
    return Order.begin(ONE, [total], seed)


def batches_of(source, objective, batch, order=None, seed=1, **more):
    """The batches of a run without phases that reads one source."""
    order = order or order_of(len(source), seed)
    sizes = Sizes(((0, batch.global_batch_size),))
    return PretrainingBatches(
        source, objective, order, batch, more.pop("fault", FaultConfig()), seed, sizes, **more
    )


def step_record(step, loss=5.0, gradient_norm=1.0, seed=1, **more):
    """A finished step with usual numbers; fields of its result by name, as the others."""
    usual = {"tokens": 1200, "targets": 180, "learning_rate": 1e-3, "epoch": 0.5, "seconds": 2.0}
    fields = {"data_seconds": 0.1, "seed": seed, **usual, **more}
    of_result = {field.name for field in dataclasses.fields(StepResult)} & fields.keys()
    result = StepResult(
        loss, gradient_norm=gradient_norm, **{name: fields.pop(name) for name in of_result}
    )
    return StepRecord(step, result, **fields)


def lines_of(path):
    """Every line of metrics.jsonl or validation.jsonl, with the keys that nothing reads."""
    return [*map(json.loads, read_bytes(path).splitlines())]


def one_update(built, micro_batches, objective, learning_rate, step):
    """One update of an engine, as the loop does it; every rank calls this."""
    counts, *_ = exchange(built, micro_batches)
    given = StepInput(step, micro_batches, objective, counts)
    return built.update(given, built.backward(given), learning_rate)


def commit_checkpoint(run, step, save, group=ALONE, facts=dict):
    """Write and commit a checkpoint; `save` takes the folder, as `Engine.save`."""
    checkpoints.save(run, step, facts, write=save, group=group, token="t")


def save_engine(built, run, step):
    """Commit a checkpoint of an engine; every rank calls this."""
    from pretrain.engine.distributed import broadcast, gather

    group = Group(built.rank, built.world_size, gather, broadcast)
    commit_checkpoint(run, step, built.save, group)

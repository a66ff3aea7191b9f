"""The input of the detector, live and after a restart, leads to the same events."""

import dataclasses
import math
import random

import pytest

from pretrain.config.run import RunConfig
from pretrain.config.sections import DataConfig, PhaseConfig, SpikeConfig
from pretrain.records import metrics
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.live import SpikeWatch, declared_changes, history_before, observation
from pretrain.spikes.observations import Observation
from tests.pretrain.builders import step_record

CONFIG = SpikeConfig(window=32, deviations=4.0, patience=3, confirm_steps=12)
EVERY = 10
"""Steps between two evaluations."""


def curve(seed, steps=160):
    """Records with noise, for some seeds with a rise or with values that are not finite."""
    draw = random.Random(seed)
    onset, rise = draw.randrange(40, steps), draw.choice([0.0, 0.6, 4.0])
    records = []
    for step in range(steps):
        loss = 5.0 + draw.gauss(0.0, 0.05) + (rise if step >= onset else 0.0)
        if draw.random() < 0.002:
            loss = float("nan")
        norm = None if draw.random() < 0.02 else draw.lognormvariate(0.0, 0.2)
        scale = {"loss_scale": 2.0 ** draw.randrange(9), "skipped": norm is None}
        scale["scale_exhausted"] = norm is None and draw.random() < 0.1
        records.append(step_record(step, loss, norm, **scale))
    return records


def test_the_detector_sees_a_step_as_its_line_has_it():
    record = step_record(7, 2.5, None, loss_scale=8.0, skipped=True, scale_exhausted=True)
    seen = Observation(7, 2.5, math.nan, 8.0, skipped=True, scale_exhausted=True)
    assert repr(observation(metrics.line_of(record))) == repr(seen)


def validation_after(step):
    return 5.0 + 0.3 * (step > 100)


class Run:
    """The spike watch of an attempt, and the files that it writes."""

    def __init__(self, folder):
        self.metrics = metrics.JsonLines(folder / metrics.METRICS)
        self.validation = metrics.JsonLines(folder / metrics.VALIDATION)
        self.folder, self.events = folder, []

    def begin(self, step):
        lines = metrics.read_metrics(self.folder / metrics.METRICS)
        validation = metrics.read_metrics(self.folder / metrics.VALIDATION)
        history = history_before(step, lines, validation)
        self.watch = SpikeWatch(SpikeDetector(CONFIG), history, self.events.append)

    def step(self, record):
        self.metrics.write(metrics.line_of(record))
        verdict = self.watch(record)
        done = record.step + 1
        if done % EVERY == 0:
            loss = validation_after(done)
            line = {"attempt": 1, "step": done, "loss": loss, "validation_id": "a"}
            self.validation.write({**line, "perplexity": 1.0, "targets": 1, "subsets": {}})
            return verdict or self.watch.evaluated(done, loss, "a")
        return verdict


def verdicts(folder, records, restarts):
    """Events, and the verdict of each step, of a run that is restarted at some steps."""
    folder.mkdir()
    run = Run(folder)
    run.begin(0)
    found = []
    for record in records:
        if record.step in restarts:
            run.begin(record.step)
        found.append(run.step(record))
    return [dataclasses.astuple(event) for event in run.events], found


@pytest.mark.parametrize("seed", range(30))
def test_restarts_change_no_event_and_no_verdict(tmp_path, seed):
    records = curve(seed)
    plain = verdicts(tmp_path / "plain", records, ())
    draw = random.Random(seed)
    restarts = draw.sample(range(1, len(records)), 4)
    again = verdicts(tmp_path / "again", records, restarts)
    assert repr(again) == repr(plain)  # NaN is not equal to itself


def test_steps_undone_by_a_crash_do_not_count(tmp_path):
    records = curve(3)
    plain = verdicts(tmp_path / "plain", records, ())
    (tmp_path / "again").mkdir()
    run = Run(tmp_path / "again")
    run.begin(0)
    for record in records[:90]:
        run.step(record)
    run.events.clear()
    run.begin(45)
    assert [run.watch.has_evaluated(step, "a") for step in (40, 50)] == [True, False]
    found = [run.step(record) for record in records[45:]]
    assert found == plain[1][45:]


@pytest.mark.parametrize(
    ("change", "declared"),
    [
        ({"data": {"sequence_length": 128}}, True),
        ({"objective": {"probability": 0.3}}, True),
        ({"optimizer": {"learning_rate": 1e-3}}, True),
        ({"schedule": {"name": "overestimated-cosine"}}, True),  # the same one, from its start
        ({"batch": {"global_batch_size": 128}}, True),
        ({"batch": {"global_batch_size": 512}}, False),
        ({"training": {"checkpoint_interval": 250}}, False),
        ({}, False),
    ],
)
def test_what_may_raise_the_loss_is_declared(change, declared):
    phases = [PhaseConfig(steps=30000), PhaseConfig(**change)]
    config = RunConfig(data=DataConfig("corpora/a"), phases=phases)
    assert declared_changes(config.segments) == [30000] * declared

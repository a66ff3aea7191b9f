"""Traces of chosen steps."""

import contextlib
import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from pretrain.config.run import RunConfig
from pretrain.config.sections import ProfileConfig
from pretrain.train import profile
from pretrain.train.profile import Profiler

# Of torch 2.10 to 2.12, whose advice makes it read every event once more.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")


def traced(tmp_path, window, steps=range(8)):
    """Files after steps with a matrix product each, and what was said."""
    said = []
    setup = SimpleNamespace(
        group=SimpleNamespace(rank=0),
        config=RunConfig(profile=ProfileConfig(window)),
        supervisor=SimpleNamespace(stage=lambda *_: contextlib.nullcontext()),
        run_folder=tmp_path,
        start=SimpleNamespace(attempt=1),
    )
    one = Profiler(setup, said.append)
    for step in steps:
        one.advance(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
    one.advance(steps.stop)
    one.close()
    return sorted((tmp_path / profile.FOLDER).glob("*")), said


def test_the_window_is_traced_and_nothing_else(tmp_path):
    (path,), said = traced(tmp_path, [2, 4])
    assert path.name == "attempt-001-steps-2-4.pt.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert any("mm" in name for name in names)
    assert sorted(n for n in names if n.startswith("step ")) == ["step 2", "step 3"]
    assert said == [f"trace of steps 2 to 3: {path}"]


@pytest.mark.parametrize(("window", "steps"), [([], range(8)), ([2, 6], range(3, 8))])
def test_nothing_is_traced_without_a_window_or_from_within_it(window, steps, tmp_path):
    assert traced(tmp_path, window, steps) == ([], [])


def test_a_loop_that_stops_within_the_window_leaves_what_was_traced(tmp_path):
    (path,), _ = traced(tmp_path, [2, 6], range(4))
    assert path.name.startswith("attempt-001-steps-2-4.")


def test_a_trace_that_cannot_be_written_is_said_and_ends_nothing(tmp_path):
    (tmp_path / profile.FOLDER).write_text("a file in its place")
    _, said = traced(tmp_path, [2, 4])
    assert said[0].startswith("WARNING: ")


@pytest.mark.parametrize("steps", [[3], [5, 5], [5, 2], [0, 21], [1, 2, 3]])
def test_what_is_no_window_is_refused(steps):
    with pytest.raises(ValueError, match="profile.steps: .* a step and a later one, at most 20 "):
        ProfileConfig(steps)

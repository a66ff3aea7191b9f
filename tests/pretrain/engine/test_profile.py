"""Traces of chosen steps and ranks."""

import gzip
import json

import pytest
import torch

from pretrain.config.sections import ProfileConfig
from pretrain.engine import profile
from pretrain.engine.profile import Profiler


def traced(tmp_path, config, requests=(), rank=0, steps=range(8)):
    """Files after steps with a matrix product each; `requests` gives what is asked, by step."""
    said, now = [], {}
    one = Profiler(config, tmp_path, 1, rank, lambda: now.get("request"), said.append)
    for step in steps:
        now["request"] = dict(requests).get(step, now.get("request"))
        one.begin_if_due(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        if one.ends(step + 1):
            one.end(step + 1)
    one.begin_if_due(steps.stop)
    if one.is_on:
        one.end(steps.stop)
    files = sorted((tmp_path / profile.FOLDER).glob("*"))
    return {path.name: path for path in files}, said


def steps_in(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert any("mm" in name for name in names)
    return sorted(name for name in names if name.startswith("step "))


def name_of(first, end, rank=0):
    return f"attempt-001-steps-{first}-{end}-rank-{rank}.pt.trace.json.gz"


@pytest.fixture(autouse=True)
def always_polled(monkeypatch):
    monkeypatch.setattr(profile, "_POLL_SECONDS", 0.0)


def test_the_recipe_s_window_is_traced_and_nothing_else(tmp_path):
    files, said = traced(tmp_path, ProfileConfig([2, 4]))
    assert list(files) == [name_of(2, 4)]
    assert steps_in(files[name_of(2, 4)]) == ["step 2", "step 3"]
    assert said == [f"trace of steps 2 to 3: {files[name_of(2, 4)]}"]


@pytest.mark.parametrize(
    ("config", "rank"), [(ProfileConfig(), 0), (ProfileConfig([2, 4]), 1)], ids=["off", "rank 1"]
)
def test_nothing_is_traced_unless_it_is_asked_for_on_this_rank(config, rank, tmp_path):
    assert traced(tmp_path, config, rank=rank) == ({}, [])


def test_every_rank_knows_where_the_recipe_s_window_ends_and_that_the_next_step_waits(tmp_path):
    config = ProfileConfig([2, 4], ranks=[3])
    ended = []
    for rank in (0, 3):
        one = Profiler(config, tmp_path, 1, rank, lambda: None, lambda text: None)
        for steps in range(8):
            if one.ends(steps):
                one.end(steps)
            one.begin_if_due(steps)
            ended.append((rank, steps, one.ended(steps)))
    assert [(rank, steps) for rank, steps, waits in ended if waits] == [(0, 4), (3, 4)]


def test_each_request_is_traced_once(tmp_path):
    files, _ = traced(tmp_path, ProfileConfig(), {1: ("a", 2), 5: ("b", 1)})
    assert list(files) == [name_of(1, 3), name_of(5, 6)]
    assert steps_in(files[name_of(1, 3)]) == ["step 1", "step 2"]


def test_a_loop_that_stops_within_the_window_leaves_what_was_traced(tmp_path):
    files, _ = traced(tmp_path, ProfileConfig([2, 6]), steps=range(4))
    assert list(files) == [name_of(2, 4)]


def test_an_attempt_that_begins_within_the_window_traces_nothing(tmp_path):
    assert traced(tmp_path, ProfileConfig([2, 6]), steps=range(3, 8))[0] == {}


def test_a_trace_that_is_too_large_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "MOST_BYTES", 100)
    files, said = traced(tmp_path, ProfileConfig([2, 4]))
    assert files == {}
    assert said[0].endswith("0 MiB, above 0 MiB; trace fewer steps")


def test_a_trace_that_cannot_be_written_is_said_and_ends_nothing(tmp_path):
    (tmp_path / profile.FOLDER).write_text("a file in its place")
    _, said = traced(tmp_path, ProfileConfig([2, 4]))
    assert said[0].startswith("WARNING: ")


@pytest.mark.parametrize("steps", [[3], [5, 5], [5, 2], [0, 21], [1, 2, 3]])
def test_what_is_no_window_is_refused(steps):
    with pytest.raises(ValueError, match="profile.steps .*accepted: the first step"):
        ProfileConfig(steps)

"""Weights & Biases, in its offline mode: what it wrote is read back."""

import contextlib
import dataclasses
import io
import json
import struct
import sys
from types import SimpleNamespace

import pytest

from pretrain.records.figures import curves
from pretrain.train import __main__ as train
from pretrain.train.trackers.table import Shown
from pretrain.train.trackers.wandb_run import STATE, WandbRun
from tests.pretrain.builders import step_record

NO_WANDB = "the extra wandb is not installed"


def record(step, loss=2.0):
    return step_record(step, loss)


def show(tracker, record):
    tracker.scalars(record.step, curves(record))


def records_of(path):
    """The protobuf records in a .wandb file, which has LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # a block's end holds no header
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found = wandb_internal_pb2.Record()
            found.ParseFromString(parts)
            parts = b""
            yield found


def history(run):
    """Rows of the only offline run below a folder, and its description."""
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    rows, begun = [], None
    for found in records_of(path):
        if found.HasField("history"):
            items = found.history.item
            rows.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
            )
        elif found.HasField("run"):
            begun = begun or found.run
    return rows, begun


@pytest.fixture
def offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason=NO_WANDB)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    return tmp_path


def test_numbers_of_an_earlier_step_stand_beside_the_newest_one(tmp_path, monkeypatch):
    """W&B refuses to go back."""
    rows = []
    run = SimpleNamespace(log=lambda values, step: rows.append((step, values)))
    monkeypatch.setattr(WandbRun, "_begin", lambda *_: run)
    one = WandbRun(Shown(tmp_path, {}, 1, 0, print))
    one.scalars(7, {"loss": 2.0})
    one.scalars(5, {"tasks/CoLA/matthews": 0.5})
    one.scalars(8, {"loss": 1.0})
    late = {"tasks/CoLA/matthews": 0.5, "evaluated step": 5}
    assert rows == [(7, {"loss": 2.0}), (7, late), (8, {"loss": 1.0})]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_curves_of_an_attempt_are_written_offline_with_steps_as_their_axis(offline):
    said, run = [], offline / "mine"
    run.mkdir()
    one = WandbRun(Shown(run, {"training": {"steps": 9}}, 3, 5, said.append))
    for step in (5, 6):
        show(one, dataclasses.replace(record(step, loss=step / 2), figures={"beta": 1.5}))
    one.scalars(7, {"validation/loss": 1.25})
    one.close()
    rows, begun = history(run)
    assert said == []
    assert [(row["_step"], row.get("train/loss")) for row in rows] == [
        (5, 2.5),
        (6, 3.0),
        (7, None),
    ]
    assert rows[0]["model/beta"] == 1.5
    assert rows[2]["validation/loss"] == 1.25
    assert (begun.run_group, begun.display_name) == ("mine", "mine, attempt 3")
    assert begun.project == "zeroclap"
    state = json.loads((run / STATE).read_bytes())
    assert state == {"id": begun.run_id, "online": False}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_attempt_shows_every_step_and_its_validation(offline, recipe, run_ranks):
    run = offline / "run"

    def work():
        words = ["training.steps=4", "training.evaluation_interval=4", "schedule.warmup_steps=1"]
        words += ["training.checkpoint_interval=4", "spike.margin_steps=0", "spike.confirm_steps=3"]
        with contextlib.redirect_stdout(io.StringIO()):
            return train.main([str(recipe.path), f"folder={run}", "tracker=wandb", *words])

    assert run_ranks(2, work) == [0, 0]
    rows, begun = history(run)
    assert [(row["_step"], "train/loss" in row, "validation/loss" in row) for row in rows] == [
        *((step, True, False) for step in range(4)),
        (4, False, True),
    ]
    assert all(0.9 < row["model/beta"] < 1.1 for row in rows[:4])
    recorded = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert recorded["training"]["steps"] == 4


class Wandb:
    """Stands in for the package online, which no test can reach; refuses what it is told to."""

    def __init__(self, mode="online", refused=(), logged_in=True):
        self.mode, self.refused, self.logged_in, self.begun = mode, refused, logged_in, []
        self.settings, self.id = self, "abc"

    def setup(self):
        return self

    def Settings(self, **settings):  # noqa: N802
        return settings

    def login(self, prompt, verify):
        assert not prompt
        return self.logged_in

    def init(self, **way):
        kind = "rewind" if "resume_from" in way else way["mode"]
        self.begun.append(way.get("resume_from", kind))
        if kind in self.refused:
            raise RuntimeError(f"no {kind}\nand more")
        return self

    def log(self, values, step):
        if "log" in self.refused:
            raise RuntimeError("gone")


def attempts(tmp_path, monkeypatch, wandb, *first_steps):
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    said = []
    for number, step in enumerate(first_steps, start=1):
        show(WandbRun(Shown(tmp_path, {}, number, step, said.append)), record(step))
    return said


def test_online_a_later_attempt_rewinds_the_run_to_its_first_step(tmp_path, monkeypatch):
    wandb = Wandb()
    assert attempts(tmp_path, monkeypatch, wandb, 0, 300, 0) == []
    assert wandb.begun == ["online", "abc?_step=299", "online"]


def test_where_a_rewind_is_refused_the_attempt_is_a_run_of_its_own(tmp_path, monkeypatch):
    wandb = Wandb(refused=("rewind",))
    said = attempts(tmp_path, monkeypatch, wandb, 0, 300)
    assert wandb.begun == ["online", "abc?_step=299", "online"]
    assert said == ["WARNING: W&B: no rewind; trying a new run there"]


def test_offline_nothing_is_rewound(tmp_path, monkeypatch):
    wandb = Wandb("offline")
    assert attempts(tmp_path, monkeypatch, wandb, 0, 300) == []
    assert wandb.begun == ["offline", "offline"]


@pytest.mark.parametrize(
    ("wandb", "said"),
    [
        (Wandb(refused=("online",)), "WARNING: W&B: no online; trying offline"),
        (Wandb(logged_in=False), "WARNING: W&B shows no curves of this attempt: not logged in"),
        (Wandb(refused=("log",)), "WARNING: W&B shows no curves of this attempt: gone"),
    ],
    ids=["no network", "no login", "it ends"],
)
def test_what_fails_is_said_once_and_ends_nothing(wandb, said, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    texts = []
    one = WandbRun(Shown(tmp_path, {}, 1, 0, texts.append))
    for step in range(3):
        show(one, record(step))
    one.close()
    assert len(texts) == 1
    assert texts[0].startswith(said)

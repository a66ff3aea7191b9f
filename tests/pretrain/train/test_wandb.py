"""Weights & Biases: a stand-in for the package, and where it is installed its offline mode."""

import sys

import pytest

from pretrain.train.trackers import WandbRun


class Wandb:
    """Stands in for the package, whose service no test can reach; fails where it is told to."""

    def __init__(self, failing="", logged_in=True):
        self.failing, self.logged_in = failing, logged_in
        self.settings, self.mode, self.begun, self.logged = self, "online", {}, []

    def setup(self):
        return self

    def Settings(self, **settings):  # noqa: N802
        return settings

    def login(self, prompt, verify):
        assert not prompt
        return self.logged_in

    def init(self, **begun):
        self.begun = begun
        if self.failing == "init":
            raise RuntimeError("no network\nand more")
        return self

    def log(self, values, step):
        if self.failing == "log":
            raise RuntimeError("gone")
        self.logged.append((step, values))

    def finish(self):
        self.logged.append("finish")

    def teardown(self):
        self.logged.append("teardown")


def shown(folder, said):
    one = WandbRun(folder, {"training": {"steps": 9}}, 3, said.append)
    for step in (5, 6):
        one.scalars(step, {"train/loss": step / 2})
    one.close()


def test_an_attempt_is_a_run_in_the_group_of_its_folder(tmp_path, monkeypatch):
    wandb, said = Wandb(), []
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    shown(tmp_path / "mine", said)
    assert said == []
    assert (wandb.begun["group"], wandb.begun["name"]) == ("mine", "mine, attempt 3")
    assert wandb.begun["config"] == {"training": {"steps": 9}, "attempt": 3}
    steps = [(5, {"train/loss": 2.5}), (6, {"train/loss": 3.0})]
    assert wandb.logged == [*steps, "finish", "teardown"]


@pytest.mark.parametrize(
    ("wandb", "said"),
    [
        (Wandb(failing="init"), "no network"),
        (Wandb(logged_in=False), "not logged in; `wandb login`, or set WANDB_MODE=offline"),
        (Wandb(failing="log"), "gone"),
    ],
    ids=["no network", "no login", "it ends"],
)
def test_what_fails_is_said_once_and_ends_nothing(wandb, said, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    texts = []
    shown(tmp_path, texts)
    assert texts == [f"WARNING: W&B shows no curves of this attempt: {said}"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_package_takes_what_it_is_given(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    said = []
    (tmp_path / "mine").mkdir()
    shown(tmp_path / "mine", said)
    assert said == []
    assert [*tmp_path.glob("mine/wandb/offline-run-*/*.wandb")]

"""A run with an objective and a tracker of an installed package."""

import subprocess
import sys

import pytest

from pretrain.records import ledger, metrics
from pretrain.train.trackers.table import Shown, open_tracker

pytestmark = pytest.mark.usefixtures("example_package")
MINE = ["objective.name=every-nth", "tracker=lines"]


def test_a_recipe_names_what_a_package_registers(recipe, tmp_path):
    words = [*MINE, "objective.n=5", "tracker_settings.every=2"]
    config = recipe.load(tmp_path, *words)
    assert type(config.objective).__module__ == "zeroclap_example.objectives"
    assert (config.objective.n, config.tracker_record.every) == (5, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.name=every"], "one of masked-lm, .*sentence-pairs, every-nth, not-settings"),
        ([*MINE, "objective.n=1"], "objective.n: 1 is not accepted; it must be 2 or above"),
        ([*MINE, "objective.probability=0.3"], "unknown key 'objective.probability'"),
        (["tracker=line"], "tracker: 'line' is not .*tensorboard, wandb, mlflow, fails or lines"),
        ([*MINE, "tracker_settings.every=0"], "tracker_settings.every: 0 is not .* above 0"),
        ([*MINE, "tracker_settings.evry=2"], "'tracker_settings.evry'; did you mean"),
        (["tracker_settings.every=2"], "tracker_settings: has every; tracker tensorboard has none"),
    ],
)
def test_settings_of_a_package_are_checked_like_ours(words, message, recipe, tmp_path):
    with pytest.raises(ValueError, match=message):
        recipe.load(tmp_path, *words)


def test_a_tracker_of_a_package_that_fails_ends_nothing_and_says_so_once(tmp_path):
    said = []
    one = open_tracker("fails", Shown(tmp_path, {}, 1, 0, said.append))
    for step in range(3):
        one.scalars(step, {"train/loss": 1.0})
    one.sync(3)
    one.close()
    reason = "RuntimeError: no such server"
    assert said == [f"WARNING: tracker fails shows no more of this attempt: {reason}"]


@pytest.mark.slow
def test_a_supervised_run_trains_with_them(recipe, tmp_path):
    """On two ranks; the folder of the launch has files of the package's name."""
    run, here = tmp_path / "run", tmp_path / "here"
    here.mkdir()
    (here / "zeroclap_example.py").write_text("raise SystemExit('of the working directory')")
    steps = ["training.steps=6", "training.checkpoint_interval=3", "training.evaluation_interval=3"]
    steps += ["spike.margin_steps=0", "spike.confirm_steps=2", "spike.patience=1"]
    words = [*MINE, "objective.n=5", "tracker_settings.every=2", *steps, f"folder={run}"]
    code = "import sys; from finetune.zeroclap import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "supervise", str(recipe.path), *words]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in metrics.read_metrics(run / metrics.METRICS)] == [*range(6)]
    lines = (run / "lines.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["0", "2", "4"]
    (attempt,) = (r for r in ledger.read_ledger(run / ledger.FILE_NAME) if r["kind"] == "attempt")
    assert attempt["versions"]["zeroclap-example"] == "1.0"

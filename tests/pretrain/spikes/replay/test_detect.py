"""The detector on recorded curves, from files to a table, JSON and a figure."""

import json
import math
import os
from pathlib import Path

import pytest

from pretrain import __main__ as command_line
from pretrain.config.sections import SpikeConfig
from pretrain.spikes.observations import Observation
from pretrain.spikes.policy import Rollback
from pretrain.spikes.replay.curves import Curve, read_curves
from pretrain.spikes.replay.detect import detect, settings
from tests.benchmarks.published_rules import RULES, incidents
from tests.benchmarks.spikes import SPIKES, curve


def recorded(losses, name="made", every=1):
    return Curve(name, tuple(Observation(every * i, loss) for i, loss in enumerate(losses)))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A CSV of every kind of curve."""
    folder = tmp_path_factory.mktemp("curves")
    for kind in ("clean", "blip", "fast", "non-finite"):
        labelled = curve(kind, 5)
        lines = "".join(f"{step},{loss:.6f}\n" for step, loss in enumerate(labelled.losses))
        (folder / f"{kind}.csv").write_text(f"step,loss\n{lines}")
    return folder


def replay(capsys, *words):
    code = command_line.main(["replay", *map(str, words)])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_command_prints_a_table_and_writes_json_and_a_figure(files, tmp_path, capsys):
    curves = sorted(files.glob("*.csv"))
    options = ["--json", tmp_path / "found.json", "--plot", tmp_path / "sheet.png"]
    code, out, err = replay(capsys, *curves, *options)
    assert (code, err) == (0, "")
    assert "24,000 records, 2 confirmed spikes" in out
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["clean"]["spikes"] == found["blip"]["spikes"] == []
    (spike,) = found["fast"]["spikes"]
    onset = curve("fast", 5).onset
    assert abs(spike["onset"] - onset) <= 2
    assert spike["onset"] < spike["alarm"] <= onset + 8 < spike["confirmed"]
    assert spike["kind"] == "fast"
    assert spike["plan"]["step"] % 500 == 0
    assert spike["plan"]["step"] <= onset - 100


def test_thresholds_can_be_overridden(files, capsys):
    _, out, _ = replay(capsys, files / "fast.csv", "spike.deviations=9e9")
    assert "0 confirmed spikes" in out


def test_a_run_is_judged_by_its_own_recipe(tmp_path, capsys):
    recipe = {"spike": {"deviations": 9e9}, "training": {"checkpoint_interval": 77}}
    (tmp_path / "run.yaml").write_text(json.dumps(recipe))
    losses = curve("fast", 5).losses
    lines = ({"attempt": 1, "step": step, "loss": loss} for step, loss in enumerate(losses))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "0 confirmed spikes" in replay(capsys, tmp_path)[1]
    replay(capsys, tmp_path, "spike.deviations=6", "--json", tmp_path / "found.json")
    ((spike,),) = [f["spikes"] for f in json.loads((tmp_path / "found.json").read_text()).values()]
    assert spike["plan"]["step"] % 77 == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["spike.deviatons=3"], "unknown key 'spike.deviatons'; did you mean 'spike.deviations'"),
        (["spike.deviations=-1"], "spike.deviations: -1 is not accepted"),
        (["optimizer.beta2=0.9"], "unknown key 'optimizer'"),
        (["--checkpoint-interval", "0"], "--checkpoint-interval 0: must be above 0"),
        (["nowhere.csv"], "nowhere.csv: no such file or folder"),
    ],
)
def test_user_errors_are_described_and_exit_with_code_2(words, message, files, capsys):
    code, out, err = replay(capsys, files / "clean.csv", *words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("kind", SPIKES)
def test_spikes_are_found_in_records_whatever_their_steps(kind, every):
    labelled = curve(kind, 3)
    found = detect(recorded(labelled.losses.tolist(), every=every), SpikeConfig(), 500).spikes
    near = [spike for spike in found if abs(spike.onset - labelled.onset) <= 100]
    assert len(near) == 1
    assert near[0].event.onset == every * near[0].onset
    assert near[0].alarm <= near[0].confirmed


def test_nearby_spikes_climb_the_ladder_of_the_policy():
    losses = curve("clean", 2).losses.copy()
    for first in (2000, 2500, 5000):
        losses[first:] += 0.8
    plans = [found.plan for found in detect(recorded(losses.tolist()), SpikeConfig(), 500).spikes]
    assert [plan.rung for plan in plans if isinstance(plan, Rollback)] == [1, 2, 1]
    assert [plan.seed for plan in plans] == [2, 3, 4]


def test_the_published_rules_raise_alarms_as_defined():
    flat = [3.0 + (i % 7) / 100 for i in range(1000)]
    tenfold = [*flat[:600], 40.0, *flat[601:]]
    doubled = [*flat[:600], *[7.0] * 6, *flat[606:]]
    deviating = [*flat[:600], 3.5, *flat[601:]]
    broken = [*flat[:600], math.nan, *flat[601:]]
    assert {name: rule(flat) for name, rule in RULES.items()} == dict.fromkeys(RULES, [])
    alarms = {
        name: [bool(rule(losses)) for losses in (tenfold, doubled, deviating, broken)]
        for name, rule in RULES.items()
    }
    assert alarms == {
        "Megatron": [True, False, False, True],
        "llm-foundry": [False, True, False, True],
        "Lightning": [True, False, False, True],
        "OLMo": [True, True, True, True],
        "FlagScale": [True, True, False, False],
    }
    assert RULES["llm-foundry"](doubled) == [604]


def test_nearby_alarms_are_one_incident():
    assert incidents([5, 6, 40, 95, 200]) == [5, 95, 200]
    assert incidents([]) == []


def test_overrides_make_a_spike_config():
    assert settings([]) == (SpikeConfig(), 500)
    assert settings(["spike.patience=4"])[0].patience == 4


def test_real_curves_without_labelled_spikes_give_no_spike():
    shared = os.environ.get("ZEROCLAP_SHARED")
    if not shared:
        pytest.skip("ZEROCLAP_SHARED is not set: no recorded curves")
    for name in ("clean/megatron_bert_release_a100", "spiky/megatron_mixtral8x7b_dev_h100"):
        (recorded_curve,) = read_curves(Path(shared) / "data" / "curves" / f"{name}.csv")
        assert detect(recorded_curve, SpikeConfig(), 500).spikes == ()

"""`replay`: recorded curves are read, judged by the detector, and shown."""

import gzip
import json
import math
import re
from pathlib import Path

import pytest

from finetune import zeroclap as command_line
from pretrain.config.sections import SpikeConfig
from pretrain.records import metrics
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.live import observation
from pretrain.spikes.observations import Evaluation, Observation
from pretrain.spikes.replay import detect, read_curve
from tests.benchmarks.spikes import curve
from tests.pretrain.builders import step_record


@pytest.fixture
def write(tmp_path):
    def write(text, name="curve.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def metrics_line(step, attempt=1, **values):
    """A line of metrics.jsonl, with other values than the usual ones."""
    return {"attempt": attempt, **metrics.line_of(step_record(step)), **values}


def pairs(seen):
    return [(observation.step, observation.loss) for observation in seen]


@pytest.mark.parametrize(
    "header",
    [
        *("step,loss", "iteration,lm loss", "Step,train/loss", "_step,train_loss", "Step,Value"),
        '"Step","apt-sun-3 - train/loss"',
        '"train/global_step","apt - sun - 3 - train/loss"',
    ],
)
def test_columns_of_a_csv_are_found_by_common_names(header, write):
    assert read_curve(write(f"{header}\n0,3.5\n5,3.25\n")) == [
        Observation(0, 3.5),
        Observation(5, 3.25),
    ]


def test_gradient_norms_are_read_unless_they_are_not_finite(write):
    """In fp16 such an update may have been skipped, which these logs do not say."""
    seen = read_curve(write("step,loss,grad_norm\n3,2.5,0.75\n4,2,\n5,2,inf\n6,nan,1\n"))
    assert [o.gradient_norm for o in seen] == [0.75, None, None, 1.0]
    assert math.isnan(seen[3].loss)


FAIRSEQ = """2026-11-27 08:00:00 | INFO | fairseq.trainer | begin training epoch 1
2026-11-27 08:00:09 | INFO | train_inner | {"epoch": 1, "update": 0.034, "loss": "9.5", "ppl": \
"724.08", "num_updates": "100", "lr": "1e-05", "gnorm": "4.5"}
2026-11-27 08:01:00 | INFO | train | {"epoch": 1, "train_loss": "9", "train_num_updates": "150"}
"""
TRAINER = """{"best_metric": null,
 "log_history": [
  {"epoch": 0.1, "grad_norm": 4.5, "learning_rate": 1e-05, "loss": 9.5, "step": 100},
  {"epoch": 0.1, "eval_loss": 9.0, "step": 100},
  {"epoch": 1.0, "step": 100, "total_flos": 1.0, "train_loss": 20.0, "train_runtime": 7.0}
 ],
 "max_steps": 100}
"""


@pytest.mark.parametrize(
    ("text", "name"), [(FAIRSEQ, "train.log"), (FAIRSEQ, "a.json"), (TRAINER, "trainer_state.json")]
)
def test_logs_of_other_trainers_are_read_in_nats(text, name, write):
    unit = math.log(2) if text == FAIRSEQ else 1.0
    assert read_curve(write(text, name)) == [Observation(100, 9.5 * unit, 4.5)]


def test_records_after_a_repeated_step_replace_earlier_ones(write, capsys):
    text = "step,loss\n1,9\n2,8\n3,7\n4,6\n3,5\n4,4\n4,3\n"
    assert pairs(read_curve(write(text))) == [(1, 9), (2, 8), (3, 5), (4, 3)]
    assert ": 4 of 7 records are used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("step,loss,lr\n1,3.0,1\n2,2.5,1\n3,2.", "a.csv"),
        ("step,loss,lr\r1,3.0,1\r\r5,,1\r2,2.5,1\r", "a.csv"),
        ('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n{"step": 3, "lo', "a.jsonl"),
        ('{"step": 1, "loss": 3.0}\n{"eval": 2}\n{"step": 2, "loss": 2.5}', "a.jsonl"),
    ],
)
def test_a_last_line_that_was_cut_off_and_lines_without_a_loss_are_left_out(text, name, write):
    assert pairs(read_curve(write(text, name))) == [(1, 3.0), (2, 2.5)]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "a.csv", "has no record with a step and a loss"),
        ("step,accuracy\n1,2\n", "a.csv", "has no record with a step and a loss"),
        ("step,loss\n1,2\n2\n3,4\n", "a.csv", "line 3 is malformed"),
        ("step,loss\n1,2\n2,two\n", "a.csv", "line 3: .*'two'"),
        ("step,loss\n1.5,2\n", "a.csv", "line 2: step '1.5' is not a whole number"),
        ('{"step": 1, "loss": 2}\n{"st\n{}\n', "a.jsonl", "line 2 is malformed"),
        ('{"step": 1, "loss": [2]}\n', "a.jsonl", "line 1: "),
        ('{"step": 1%s, "loss": 2}\n' % ("0" * 400), "a.jsonl", "line 1: "),
        ('{"log_history": 3}', "a.json", "is not a trainer_state.json of transformers"),
        ('{"log_history": ["loss"]}', "a.json", "is not a trainer_state.json of transformers"),
        (
            "Step,a - loss,b - loss\n1,2,3\n",
            "a.csv",
            "has columns of several runs .a - loss, b - l",
        ),
    ],
)
def test_errors_name_the_file_and_the_line(text, name, message, write):
    path = write(text, name)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {message}"):
        read_curve(path)


def test_a_compressed_curve_is_read_and_other_bytes_are_refused_by_name(write, tmp_path):
    curve = tmp_path / "a.csv.gz"
    curve.write_bytes(gzip.compress(b"step,loss\n1,3.0\n2,2.5\n"))
    assert pairs(read_curve(curve)) == [(1, 3.0), (2, 2.5)]
    latin = write("", "latin.csv")
    latin.write_bytes("step,loss\n1,3.0,Verlustgröße\n".encode("latin-1"))
    with pytest.raises(ValueError, match=f"{re.escape(str(latin))}: is not UTF-8 text"):
        read_curve(latin)


def test_a_run_folder_gives_what_its_surviving_attempts_judged_live(write):
    """Law 6, also where updates are not finite, for which metrics.jsonl has null."""
    odd = {"gradient_norm": None, "skipped": True}
    lines = [
        metrics_line(0, attempt=1, loss=9.0),
        metrics_line(1, attempt=1, loss=8.0),
        metrics_line(1, attempt=2, loss=None, **odd),
        metrics_line(2, attempt=2, loss=5.0, **odd, scale_exhausted=True),
    ]
    path = write("".join(json.dumps(line) + "\n" for line in lines), f"run/{metrics.METRICS}")
    made = {"perplexity": 1.0, "targets": 9, "subsets": {}, "validation_id": "a"}
    measured = [(1, 2, 7.5), (2, 2, 6.5), (2, 3, None)]
    found = [{"attempt": a, "step": s, "loss": x, **made} for a, s, x in measured]
    write("".join(json.dumps(line) + "\n" for line in found), f"run/{metrics.VALIDATION}")
    first, second, evaluated, third, last = read_curve(path.parent)
    kept = [lines[0], *lines[2:]]
    assert repr([first, second, third]) == repr([*map(observation, kept)])
    assert repr([evaluated, last]) == repr([Evaluation(2, 6.5, "a"), Evaluation(3, math.nan, "a")])


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
    options = ["--json", tmp_path / "found.json", "--plot", tmp_path / "sheet.png"]
    code, out, err = replay(capsys, *sorted(files.glob("*.csv")), *options)
    assert (code, err) == (0, "")
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "found.json").read_text())
    found = {Path(name).stem: events for name, events in written.items()}
    assert all(event["kind"] in ("suspect", "healed") for event in found["clean"] + found["blip"])
    *_, suspect, spike, rollback = found["fast"]
    onset = curve("fast", 5).onset
    assert (spike["kind"], spike["channel"], suspect["kind"]) == ("spike", "fast", "suspect")
    assert abs(spike["onset"] - onset) <= 2
    assert spike["onset"] < suspect["step"] <= onset + 8 < spike["step"]
    assert (rollback["why"], rollback["step"] % 500) == ("spike", 0)
    assert rollback["step"] <= onset - 100
    counts = {Path(line.split()[0]).stem: line.split()[1:] for line in out.splitlines()[1:5]}
    assert (counts["fast"][0], counts["fast"][-1], counts["clean"][-1]) == ("6,000", "1", "0")
    assert f"fast.csv: would be rolled back to the checkpoint of step {rollback['step']:,}" in out


def test_a_run_is_judged_by_its_own_recipe_unless_a_threshold_is_named(tmp_path, capsys):
    recipe = {"spike": {"deviations": 9e9}, "training": {"checkpoint_interval": 77}}
    (tmp_path / "run.yaml").write_text(json.dumps(recipe))
    lines = (metrics_line(step, loss=loss) for step, loss in enumerate(curve("fast", 5).losses))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "SPIKE" not in replay(capsys, tmp_path)[1]
    replay(capsys, tmp_path, "spike.deviations=6", "--json", tmp_path / "found.json")
    (events,) = json.loads((tmp_path / "found.json").read_text()).values()
    assert [e["step"] % 77 for e in events if e["kind"] == "segment"] == [0]


def test_a_phase_is_a_declared_change_as_it_was_live(tmp_path, capsys):
    """Law 6: the loss rises where another masking probability holds from step 3000 on."""
    phases = [{"steps": 3000}, {"objective": {"probability": 0.4}}]
    (tmp_path / "run.yaml").write_text(json.dumps({"phases": phases}))
    losses = curve("clean", 5).losses.copy()
    losses[3000:] += 0.8
    lines = (metrics_line(step, loss=loss) for step, loss in enumerate(losses))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "SPIKE" not in replay(capsys, tmp_path)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["spike.deviatons=3"], "unknown key 'spike.deviatons'; did you mean 'spike.deviations'"),
        (["spike.deviations=-1"], "spike.deviations: -1 is not accepted"),
        (["optimizer.beta2=0.9"], "unknown key 'optimizer'"),
        (["nowhere.csv"], "nowhere.csv: no such file"),
    ],
)
def test_user_errors_are_described_and_exit_with_code_2(words, message, files, capsys):
    code, out, err = replay(capsys, files / "clean.csv", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert replay(capsys, "spike.deviations=5")[0] == 2  # no curve


def test_nearby_spikes_climb_the_ladder_of_the_policy():
    losses = curve("clean", 2).losses.copy()
    for first in (2000, 2500, 5000):
        losses[first:] += 0.8
    seen = [Observation(step, loss) for step, loss in enumerate(losses.tolist())]
    events = detect("made", seen, SpikeConfig(), 500).events
    plans = [event for event in events if event["kind"] == "segment"]
    assert [(plan["rung"], plan["seed"]) for plan in plans] == [(1, 2), (2, 3), (1, 4)]


def test_real_curves_without_labelled_spikes_give_no_spike(shared):
    for name in ("clean/megatron_bert_release_a100", "spiky/megatron_mixtral8x7b_dev_h100"):
        seen = read_curve(shared / "data" / "curves" / f"{name}.csv")
        detector = SpikeDetector(SpikeConfig())
        events = [event for each in seen for event in detector.update(each)]
        assert "spike" not in {event.kind for event in events}

"""Reading recorded curves: formats, records that are left out with a note, and errors."""

import json
import math
import re

import pytest

from pretrain.config.sections import SpikeConfig
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.live import observations
from pretrain.spikes.observations import Evaluation, Observation
from pretrain.spikes.replay.curves import read_all, read_curves


@pytest.fixture
def write(tmp_path):
    def write(text, name="curve.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def steps_and_losses(curve):
    return [(observation.step, observation.loss) for observation in curve.observations]


@pytest.mark.parametrize(
    "header",
    ["step,loss", "iteration,lm loss", "Step,train/loss", "_step,train_loss", "Step,Value"],
)
def test_columns_of_a_csv_are_found_by_common_names(header, write):
    (curve,) = read_curves(write(f"{header}\n0,3.5\n5,3.25\n"))
    assert curve.name == "curve"
    assert steps_and_losses(curve) == [(0, 3.5), (5, 3.25)]
    assert curve.notes == ()


def test_other_measurements_are_read_as_well(write):
    (curve,) = read_curves(
        write("step,loss,grad_norm,loss_scale,skipped\n3,2.5,0.75,1024,1\n4,2,,,\n")
    )
    assert curve.observations == (
        Observation(3, 2.5, gradient_norm=0.75, loss_scale=1024.0, skipped=True),
        Observation(4, 2.0),
    )


def test_a_non_finite_loss_is_kept(write):
    (curve,) = read_curves(write("step,loss\n1,nan\n2,inf\n"))
    assert math.isnan(curve.observations[0].loss)
    assert curve.observations[1].loss == math.inf


def test_records_after_a_repeated_step_replace_earlier_ones(write):
    text = "step,loss\n1,9\n2,8\n3,7\n4,6\n3,5\n4,4\n4,3\n"
    (curve,) = read_curves(write(text))
    assert steps_and_losses(curve) == [(1, 9), (2, 8), (3, 5), (4, 3)]
    assert curve.notes == ("starts over 2 times, first at step 3: the later records count",)


def test_every_attempt_is_a_curve_with_the_records_it_continues(write):
    path = write("step,loss\n1,9\n2,8\n3,7\n2,5\n3,4\n")
    first, second = read_curves(path, every_attempt=True)
    assert (first.name, second.name) == ("curve#1", "curve#2")
    assert steps_and_losses(first) == [(1, 9), (2, 8), (3, 7)]
    assert steps_and_losses(second) == [(1, 9), (2, 5), (3, 4)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("step,loss,lr\n1,3.0,1\n2,2.5,1\n3,2.", "a.csv"),
        ('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n{"step": 3, "lo', "a.jsonl"),
    ],
)
def test_a_last_line_that_was_cut_off_is_left_out(text, name, write):
    (curve,) = read_curves(write(text, name))
    assert steps_and_losses(curve) == [(1, 3.0), (2, 2.5)]
    assert re.fullmatch("line [34] was cut off and is left out", *curve.notes)


def test_lines_without_a_loss_are_left_out_and_counted(write):
    (curve,) = read_curves(write("step,loss,accuracy\n1,3.0,\n2,,0.5\n\n3,2.0,\n"))
    assert steps_and_losses(curve) == [(1, 3.0), (3, 2.0)]
    assert curve.notes == ("2 lines without a step or a loss are left out",)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "a.csv", "is empty; a curve has a line of names"),
        ("", "a.jsonl", "is empty; a curve has a JSON object per line"),
        ("step,accuracy\n1,2\n", "a.csv", "has no column loss, lm_loss or .*step, accuracy"),
        ("loss,lr\n1,2\n", "a.csv", "has no column step or iteration, only loss, lr"),
        ("step,loss\n1,2\n2\n3,4\n", "a.csv", "line 3 has 1 columns where the first has 2"),
        ("step,loss\n1,2\n2,two\n", "a.csv", "line 3: loss 'two' is not a number"),
        ("step,loss\n1.5,2\n", "a.csv", "line 2: step '1.5' is not a whole number"),
        ("step,loss\nnan,2\n", "a.csv", "line 2: step 'nan' is not a whole number"),
        ("step,loss\n", "a.csv", "holds no record with a step and a loss"),
        ('{"step": 1, "loss": 2}\n{"st\n{}\n', "a.jsonl", "line 2 is not a JSON object"),
        ('{"step": 1}\n', "a.jsonl", "holds no record with a step and a loss"),
        ('{"step": 1, "loss": [2]}\n', "a.jsonl", r"line 1: loss \[2\] is not a number"),
    ],
)
def test_errors_name_the_file_and_the_line(text, name, message, write):
    path = write(text, name)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {message}"):
        read_curves(path)


def test_a_run_folder_gives_its_surviving_steps_with_their_evaluations(write):
    lines = [(1, 0, 9.0), (1, 1, 8.0), (1, 2, 7.0), (2, 1, 6.0), (2, 2, 5.0)]
    text = "".join(json.dumps({"attempt": a, "step": s, "loss": x}) + "\n" for a, s, x in lines)
    path = write(text, "run/metrics.jsonl")
    made = {"perplexity": 1.0, "subsets": {}, "measure": "a"}
    measured = [(1, 2, 7.5), (2, 2, 6.5), (2, 3, None)]
    text = "".join(
        json.dumps({"attempt": a, "step": s, "loss": x, **made}) + "\n" for a, s, x in measured
    )
    write(text, "run/validation.jsonl")
    (curve,) = read_curves(path.parent)
    assert curve.name == "run"
    assert steps_and_losses(curve) == [(0, 9.0), (1, 6.0), (2, 5.0)]
    assert repr(curve.evaluations) == repr((Evaluation(2, 6.5, "a"), Evaluation(3, math.nan, "a")))
    assert [type(seen).__name__[0] for seen in curve.seen] == ["O", "O", "E", "O", "E"]
    # An attempt that was rolled back is replayed with its own evaluations.
    abandoned, _ = read_curves(path.parent, every_attempt=True)
    assert abandoned.evaluations == (Evaluation(2, 7.5, "a"),)


def test_a_run_folder_gives_the_observations_of_the_live_detector(write):
    """Law 6, for non-finite updates; earlier versions did not write scale_exhausted."""
    line = {"attempt": 1, "loss": 5.0, "gradient_norm": 1.0, "loss_scale": 1.0, "skipped": False}
    lines = [
        {"step": 0, **line},
        {"step": 1, **line, "loss": None, "gradient_norm": None, "skipped": True},
        {"step": 2, **line, "gradient_norm": None, "skipped": True, "scale_exhausted": True},
        {"step": 3, **line, "gradient_norm": None, "scale_exhausted": False},
    ]
    path = write("".join(json.dumps(line) + "\n" for line in lines), "run/metrics.jsonl")
    (curve,) = read_curves(path.parent)
    assert repr(curve.observations) == repr(tuple(observations(lines)))
    assert [o.scale_exhausted for o in curve.observations] == [False, False, True, False]
    assert [o.corrupts_weights for o in curve.observations] == [False, False, False, True]


def test_a_non_finite_gradient_norm_counts_where_skips_are_recorded(write):
    """Without that record, fp16 may have skipped the update."""
    (curve,) = read_curves(write("step,loss,gnorm\n1,2,inf\n2,2,nan\n3,2,1\n"))
    assert [o.gradient_norm for o in curve.observations] == [None, None, 1.0]
    (curve,) = read_curves(write("step,loss,gnorm,skipped\n1,2,inf,1\n2,2,inf,0\n"))
    assert [o.corrupts_weights for o in curve.observations] == [False, True]


def test_tensorboard_files_are_read_by_tag(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    for step, loss in [(1, 4.0), (2, 3.0), (3, 2.0), (2, 2.5)]:
        values = {"train/loss": loss, "optimizer/gradient_norm": loss / 2}
        summary = Summary(value=[Summary.Value(tag=t, simple_value=v) for t, v in values.items()])
        writer.add_event(Event(step=step, summary=summary))
    writer.close()
    (curve,) = read_curves(tmp_path)
    assert steps_and_losses(curve) == [(1, 4.0), (2, 2.5)]
    with pytest.raises(ValueError, match="no scalar 'loss'; name one with --tag: .*train/loss"):
        read_curves(tmp_path, tag="loss")


def test_curves_of_equal_names_are_named_by_their_paths(write):
    paths = [write("step,loss\n1,2\n", f"{folder}/log.csv") for folder in ("a", "b")]
    assert [curve.name for curve in read_all(paths)] == [str(path) for path in paths]
    with pytest.raises(ValueError, match="is named twice"):
        read_all([paths[0], paths[0]])
    with pytest.raises(ValueError, match="no curve is named"):
        read_all([])


def test_a_non_finite_loss_of_a_run_is_replayed_as_it_was_judged_live(write):
    """metrics.jsonl has null there; without the record, a run that ended in NaN looks clean."""
    path = write('{"step": 0, "loss": 9.0}\n{"step": 1, "loss": null}\n', "run/metrics.jsonl")
    (curve,) = read_curves(path.parent)
    assert [observation.step for observation in curve.observations] == [0, 1]
    detector = SpikeDetector(SpikeConfig())
    events = [event for o in curve.observations for event in detector.update(o)]
    assert [(event.kind, event.channel) for event in events] == [("spike", "non-finite")]

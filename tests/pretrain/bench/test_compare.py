"""Both sides of a comparison do the same work on the same batches."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from pretrain.__main__ import main
from pretrain.bench import compare as bench
from pretrain.bench.contenders import PLAIN, Case, collate
from pretrain.objectives.masked import IGNORED, labels_by_position

TINY = Case(PLAIN, "tiny", "zero-clap", 32, 3, "padded", 97, attention_dropout=True)


def test_a_batch_is_a_function_of_its_step_and_as_long_as_drawn():
    first, again, other = (collate(TINY, step).arrays for step in (4, 4, 5))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["input_ids"], other["input_ids"])
    lengths = first["document_ids"].sum(axis=1)
    assert first["input_ids"].shape == (3, 32)
    assert ((lengths >= 16) & (lengths <= 32)).all()


def test_both_sides_predict_the_same_tokens_at_the_same_places():
    batch = collate(TINY, 0)
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    labels = labels_by_position(arrays)
    used = arrays["labels"] != IGNORED
    assert used.sum() == (labels != IGNORED).sum() == batch.targets[0] > 0
    assert torch.equal(labels.flatten()[arrays["target_positions"][used]], arrays["labels"][used])


def test_dropout_is_the_variant_s_where_it_is_asked_for():
    assert TINY.architecture().attention_dropout == 0.1
    assert dataclasses.replace(TINY, attention_dropout=False).architecture().attention_dropout == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "huge"], "'huge' is not one of base, large"),
        (["--variant", "clip"], "'clip' is not one of baseline"),
        (["--sequence-length", "4"], "length 4: accepted: 8 or more"),
        (["--micro-batch-size", "0"], "rows 0: accepted: 1 or more"),
        (["--steps", "0"], "steps 0: accepted: 1 or more"),
    ],
)
def test_a_setting_that_cannot_be_measured_is_refused(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_library_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert main(["bench", "--against", "transformers"]) == 2
    assert "transformers: it is not installed" in capsys.readouterr().err


def test_the_table_says_how_much_faster_ours_is():
    results = [
        bench.Result("zeroclap", 3000.0, 2_000_000_000, 1.0),
        bench.Result("transformers sdpa", 2000.0, 3_000_000_000, 1.5),
    ]
    assert bench.table(TINY, results).splitlines()[2:] == [
        "zeroclap                  3,000      2.00 GB               ",
        "transformers sdpa         2,000      3.00 GB 1.50 x as fast",
    ]


@pytest.mark.slow
def test_the_command_measures_every_contender_and_writes_what_it_prints(tmp_path, capfd):
    figures = tmp_path / "figures.json"
    shape = ["--size", "tiny", "--sequence-length", "32", "--vocab-size", "97", "--steps", "2"]
    assert main(["bench", "--against", "transformers", *shape, "--json", str(figures)]) == 0
    written = json.loads(figures.read_text())
    names = ["zeroclap", "transformers sdpa", "transformers eager"]
    assert [result["name"] for result in written["results"]] == names
    assert written["setting"]["vocab_size"] == 97
    printed, told = capfd.readouterr()
    shape = "tiny baseline, 4 x 32, padded"
    assert [line for line in told.splitlines() if line.startswith("bench: ")] == [
        "bench: warming up, 3 contenders in turn",
        f"bench: zeroclap, plain loop: {shape}: building the model",
        f"bench: transformers sdpa: {shape}: building the model",
        f"bench: transformers eager: {shape}: building the model",
        "bench: warming up, 3 contenders in turn",
        "bench: measuring, update 1 of 2, 3 contenders in turn",
        "bench: measuring, update 2 of 2, 3 contenders in turn",
    ]
    for result in written["results"]:
        assert result["name"] in printed
        assert result["tokens_per_second"] > 0
        assert result["peak_bytes"] > 50_000_000
        assert result["advantage"] > 0

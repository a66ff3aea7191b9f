"""Both sides of a comparison do the same work on the same batches."""

import json

import pytest
import torch

from pretrain import bench
from pretrain.__main__ import main
from pretrain.objectives.masked import IGNORED

TINY = bench.Setting("tiny", "zero-clap", 32, 3, 97)


def test_a_batch_is_a_function_of_its_step_and_as_long_as_drawn():
    first, again, other = (bench.collate(TINY, step) for step in (4, 4, 5))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["input_ids"], other["input_ids"])
    lengths = first["attention_mask"].sum(dim=1)
    assert first["input_ids"].shape == (3, 32)
    assert ((lengths >= 16) & (lengths <= 32)).all()


def test_both_sides_predict_the_same_tokens_at_the_same_places():
    batch = bench.collate(TINY, 0)
    labels = bench.standard(batch)["labels"]
    used = batch["labels"] != IGNORED
    assert used.sum() == (labels != IGNORED).sum() > 0
    assert torch.equal(labels.flatten()[batch["positions"][used]], batch["labels"][used])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "huge"], "'huge' is not one of base, large"),
        (["--variant", "clip"], "'clip' is not one of baseline"),
        (["--sequence-length", "4"], "sequence_length 4: accepted: 8 or more"),
        (["--micro-batch-size", "0"], "micro_batch_size 0: accepted: 1 or more"),
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
def test_the_command_measures_every_contender_and_writes_what_it_prints(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    shape = ["--size", "tiny", "--sequence-length", "32", "--vocab-size", "97", "--steps", "2"]
    assert main(["bench", "--against", "transformers", *shape, "--json", str(figures)]) == 0
    written = json.loads(figures.read_text())
    names = ["zeroclap", "transformers sdpa", "transformers eager"]
    assert [result["name"] for result in written["results"]] == names
    assert written["setting"]["vocab_size"] == 97
    printed = capsys.readouterr().out
    for result in written["results"]:
        assert result["name"] in printed
        assert result["tokens_per_second"] > 0
        assert result["peak_bytes"] > 50_000_000
        assert result["advantage"] > 0

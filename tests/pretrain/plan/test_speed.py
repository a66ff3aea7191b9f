"""`bench` measures a recipe on this machine; `plan --bench` reads what it writes."""

import contextlib
import dataclasses
import io
import json
import math

import pytest
import torch

from pretrain.__main__ import main
from pretrain.config import load as recipes
from pretrain.objectives.base import Vocabulary
from pretrain.plan import measured_speed, plan, speed

TINY = ["model.size=tiny", "data.sequence_length=32"]
TINY += ["batch.global_batch_size=4", "batch.micro_batch_size=2", "training.deepspeed=zero1_fp32"]
ROW = "model.overrides.mask_embedding=row"


def test_a_recipe_is_measured_and_the_file_holds_what_is_printed(tmp_path, run_ranks):
    path = tmp_path / "bench.json"

    def measure():
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["bench", "small", *TINY, "--seconds", "0", "--json", str(path)]) == 0
        assert not torch.distributed.is_initialized()
        return printed.getvalue()

    (printed,) = run_ranks(1, measure)
    found = measured_speed.Speed(**json.loads(path.read_text()))
    assert measured_speed.table(found) in printed
    assert found.tokens_per_second == pytest.approx(4 * 32 / found.seconds)
    assert list(found.parts) == ["attention", "matrices", "head", "optimizer", "data"]
    figures = [found.flops, found.matmul_flops, found.start_seconds, *found.parts.values()]
    assert all(0 < figure < math.inf for figure in figures)
    assert found.peak_bytes > 50_000_000


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["objective.name=causal-lm", "data.packing=contiguous", "model.variant=causal-alibi"],
        ["objective.name=span-corruption", "data.packing=complete", ROW],
        ["objective.name=sentence-pairs", "data.packing=sentence-pairs", "model.variant=albert"],
        ["data.packing=best-fit"],
    ],
)
def test_every_objective_gets_full_rows_that_depend_on_the_place_alone(settings):
    config = recipes.load("small", [*TINY, *settings])
    architecture = config.architecture(97)
    objective = config.objective.build(Vocabulary(97, architecture.vocab_size, None))
    batches = speed.RandomBatches(config, objective, 97, count=2)
    first, second = batches.micro_batches(0, 1, 2)
    assert batches.micro_batches(7, 1, 2) == [first, second]
    assert (first.index, second.index, first.tokens) == (1, 3, 2 * 32)
    assert all(count > 0 for count in first.targets)
    assert (first.arrays["document_ids"] > 0).mean() > 0.8
    apart = config.data.packing in ("chunked", "best-fit")
    assert (first.arrays["document_ids"].max() > 1) == apart
    assert first.arrays["input_ids"].tolist() != second.arrays["input_ids"].tolist()


def test_too_large_a_micro_batch_is_refused_by_name(monkeypatch):
    def exhausted(*_):
        raise speed.torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(speed, "start", lambda: None)
    monkeypatch.setattr(speed, "_measure", exhausted)
    with pytest.raises(ValueError, match="batch.micro_batch_size 2: does not fit.*2 GiB"):
        speed.measure(recipes.load("small", TINY), 0.0)


MEASURED = measured_speed.Speed(
    device="NVIDIA H200",
    torch="2.13",
    world_size=2,
    size="base",
    variant="zero-clap",
    backend="flex",
    length=2048,
    micro_batch_size=8,
    global_batch_size=512,
    seconds=1.07,
    tokens_per_second=980_000.0,
    flops=0.35 * 989e12,
    matmul_flops=7e14,
    peak_bytes=60_000_000_000,
    start_seconds=60.0,
    expected_seconds=0.856,
    parts={"head": 0.1},
)


def written(path, **changes):
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(MEASURED, **changes))))
    return path


def test_what_supervise_refuses_is_refused(capsys):
    longer = ["model.variant=baseline", "model.overrides.max_positions=16"]
    assert main(["bench", "small", *TINY, *longer, "--seconds", "0"]) == 2
    assert (
        "data.sequence_length 32 is above the model's max_positions 16" in capsys.readouterr().err
    )


def test_the_table_names_both_shares_of_the_peak():
    text = measured_speed.table(MEASURED)
    assert "base zero-clap, 8 x 2048, 2 x NVIDIA H200" in text
    assert "980,000 tokens/s" in text
    assert "35.0% MFU (of the data sheet of h200)" in text
    assert "49.5% of a matrix product's" in text
    assert "1.25 of the time that `plan` expects on h200" in text
    unknown = dataclasses.replace(MEASURED, device="CPU", expected_seconds=None)
    assert "that `plan` expects" not in measured_speed.table(unknown)


def test_a_measured_speed_gives_the_time(tmp_path, capsys):
    path = written(tmp_path / "bench.json")
    assert main(["plan", "pile-base", "--gpus", "1", *kind(), "--bench", str(path)]) == 0
    days = plan.plan(recipes.load("pile-base"), 1, "h200").seconds * 1.25 / 86_400
    printed = capsys.readouterr().out
    between = f"{days / 1.1:,.1f} days to {days / 0.9:,.1f} days"
    assert f"{days:,.1f} days ({between}) on 1 h200" in printed
    assert "measured: base zero-clap, 8 x 2048, 2 x NVIDIA H200" in printed


def kind():
    return ["--kind", "h200"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "large"}, "measured model.size large, the recipe has base"),
        ({"device": "NVIDIA A100-SXM4-80GB"}, "measured on 'NVIDIA A100-SXM4-80GB'"),
        ({"seconds": 0.0}, "seconds: 0.0 is not accepted; it must be above 0; measure with"),
        ({"expected_seconds": -1.0}, "expected_seconds.* -1.0 is not accepted"),
        ({"expected_seconds": None}, "measured on 'NVIDIA H200'"),
        (None, "measure with `bench --json` and this recipe on h200"),
    ],
)
def test_figures_of_another_gpu_or_size_and_other_files_are_refused(changes, message, tmp_path):
    path = tmp_path / "bench.json"
    if changes:
        written(path, **changes)
    config = recipes.load("pile-base")
    for content in [path.read_text()] if changes else ["{}", "[1]", "nothing"]:
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            measured_speed.correction(path, "h200", config)


def test_a_missing_file_is_named(tmp_path, capsys):
    missing = str(tmp_path / "none.json")
    assert main(["plan", "pile-base", *kind(), "--bench", missing]) == 2
    assert missing in capsys.readouterr().err

"""`bench` measures a recipe on this machine, and `plan --kind here` its hours."""

import contextlib
import dataclasses
import io
import json
import math
import os
import signal
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune.zeroclap import main
from pretrain.checks import recipe as recipe_checks
from pretrain.config import load as recipes
from pretrain.engine import distributed
from pretrain.objectives.base import Vocabulary
from pretrain.plan import command, speed

TINY = ["model.size=tiny", "data.sequence_length=32"]
TINY += ["batch.global_batch_size=4", "batch.micro_batch_size=2", "training.deepspeed=zero1_fp32"]
ROW = "model.overrides.mask_embedding=row"


@pytest.mark.parametrize("proc", ["Linux", "gVisor"])
def test_a_recipe_is_measured_and_the_file_holds_what_is_printed(
    tmp_path, run_ranks, monkeypatch, proc
):
    path, status = tmp_path / "bench.json", tmp_path / "status"
    if proc == "gVisor":  # has no peak in a process's status, and no file to reset it
        status.write_text("VmSize:\t9 kB\nVmRSS:\t4 kB\n")
        monkeypatch.setattr(distributed, "Path", lambda _: status)
        monkeypatch.setattr(speed, "Path", lambda path: tmp_path if "proc" in path else Path(path))

    def measure():
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["bench", "small", *TINY, "--seconds", "0", "--json", str(path)]) == 0
        assert not torch.distributed.is_initialized()
        return printed.getvalue()

    (printed,) = run_ranks(1, measure)
    found = speed.Speed(**json.loads(path.read_text()))
    assert speed.table(found) in printed
    assert found.tokens_per_second == pytest.approx(4 * 32 / found.seconds)
    assert found.computed_flops == pytest.approx(found.flops)  # dense computes all
    figures = [found.flops, found.matmul_flops]
    assert all(0 < figure < math.inf for figure in figures)
    assert found.memory_bytes > found.peak_bytes > 50_000_000


def test_the_hours_on_this_machine_are_those_of_a_launch(tmp_path, run_ranks, monkeypatch):
    """With as many ranks as `supervise` starts: on two cores, one rank is not as fast as two."""
    path = tmp_path / "plan.json"
    words = ["small", *TINY, "batch.global_batch_size=64", "training.steps=1000"]
    monkeypatch.setattr(command, "_SECONDS", 0.0)
    measured, used = speed.measure, tmp_path / "used.json"

    def recorded(*arguments):
        found = measured(*arguments)
        if found:
            used.write_text(json.dumps(dataclasses.asdict(found)))
        return found

    def plan():
        speed.measure = recorded
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["plan", *words, "--kind", "here", "--json", str(path)]) == 0
        return printed.getvalue()

    (printed,) = run_ranks(1, plan)
    here = speed.Speed(**json.loads(used.read_text()))
    assert here.world_size == 2
    assert here.global_batch_size == 4 * 2 * 2  # not a whole update
    planned = json.loads(path.read_text())
    assert planned["tokens"] == 1000 * 64 * 32
    assert planned["seconds"] == pytest.approx(planned["tokens"] / here.tokens_per_second)
    assert (planned["backend"], planned["device_memory"]) == ("dense", here.memory_bytes)
    assert "on this machine's CPU" in printed
    assert "measured now with 2 ranks; validation and checkpoints come" in printed


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        (ValueError("model.size: too large"), "^model.size: too large$"),
        (None, "^a rank was killed by signal 9 .SIGKILL; .*. while it was measured; if memory"),
    ],
)
def test_why_a_rank_cannot_be_measured_is_one_message(exception, message, run_ranks, monkeypatch):
    def end(*_):
        if exception:
            raise exception
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(speed, "measure", end)

    def plan():
        with pytest.raises(ValueError, match=message):
            speed.measure_launch(recipes.load("small", TINY), 2, 0.0, 1)

    run_ranks(1, plan)


def test_what_the_device_cannot_compute_is_refused_by_name(run_ranks, monkeypatch):
    monkeypatch.setattr(recipe_checks, "cpu_has_fp16", lambda: False)

    def measure():
        with pytest.raises(ValueError, match="^training.deepspeed: zero1_fp16 computes in fp16"):
            speed.measure(recipes.load("small", [*TINY, "training.deepspeed=zero1_fp16"]), 0.0)

    run_ranks(1, measure)
    monkeypatch.setattr(recipe_checks.gpus, "least_capability", lambda: 7.5)
    process = types.SimpleNamespace(world_size=1, device=torch.device("cuda"))
    monkeypatch.setattr(speed, "start", lambda: process)
    with pytest.raises(ValueError, match=r"^training.deepspeed: zero1_bf16 computes .* has 7.5;"):
        speed.measure(recipes.load("small", [*TINY, "training.deepspeed=zero1_bf16"]), 0.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench small --json .", ".: is a folder, a link or a device; name a file"),
        ("plan small --kind here --json .", ".: is a folder, a link or a device; name a file"),
        ("bench small --seconds inf", "argument --seconds: inf is not a finite number (see "),
    ],
)
def test_what_would_be_lost_or_never_end_is_refused_at_once(words, message, monkeypatch, capsys):
    monkeypatch.setattr(speed, "start", None)
    with contextlib.suppress(SystemExit):  # by the parser
        assert main([*words.split(), *TINY]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_the_share_of_a_peak_is_printed_for_all_pairs_and_for_those_computed():
    text = speed.table(MEASURED)
    assert "base zero-clap, 8 x 2048, 2 x NVIDIA H200, torch 2.13, attention flex" in text
    assert "35.0% MFU (of the data sheet of h200); 30.0% by the pairs" in text
    assert "49.5% of a matrix product's FLOP/s (measured); 42.4% by the pairs" in text


MEASURED = speed.Speed(
    **{"device": "NVIDIA H200", "memory_bytes": 141_000_000_000, "torch": "2.13", "world_size": 2},
    **{"size": "base", "variant": "zero-clap", "backend": "flex", "length": 2048},
    **{"micro_batch_size": 8, "global_batch_size": 512, "seconds": 1.07},
    **{"tokens_per_second": 980_000.0, "peak_bytes": 60_000_000_000},
    **{"flops": 0.35 * 989e12, "computed_flops": 0.3 * 989e12, "matmul_flops": 7e14},
)


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
    config = recipes.load("small", [*TINY, "batch.global_batch_size=8", *settings])
    architecture = config.architecture(97)
    objective = config.objective.build(Vocabulary(97, architecture.vocab_size, None))
    first, second, again = (speed.random_batch(config, objective, 97, n) for n in (1, 3, 1))
    assert all(np.array_equal(first.arrays[name], again.arrays[name]) for name in first.arrays)
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


def test_what_supervise_refuses_is_refused(capsys):
    longer = ["model.variant=baseline", "model.overrides.max_positions=16"]
    assert main(["bench", "small", *TINY, *longer, "--seconds", "0"]) == 2
    said = "data.sequence_length 32 is above the model's max_positions 16"
    assert said in capsys.readouterr().err

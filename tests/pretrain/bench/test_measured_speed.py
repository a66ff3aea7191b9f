"""A plan can use a measured speed, and names the measurement."""

import json

import pytest

from pretrain.__main__ import main
from pretrain.bench import measured_speed, plan
from pretrain.bench.contenders import FLASH, OURS, PLAIN, TRANSFORMERS, Case
from pretrain.bench.suite import Outcome, Suite
from pretrain.bench.worker import Measured
from pretrain.config import load as recipes

PILE = ["data.vocab_size=50265"]


def bench_file(path, *cases, device="NVIDIA H200"):
    """Write what `bench --json` writes for (contender, size, variant, length, layout, speed)."""
    outcomes = [
        Outcome(
            Case(contender, size, variant, length, 8, layout),
            Measured(8 * length / speed, 8 * length, 0, 0.0, {}) if speed else None,
            "" if speed else "out of memory",
        )
        for contender, size, variant, length, layout, speed in cases
    ]
    path.write_text(json.dumps(Suite(device, "2.13", 7.9e14, outcomes).figures()))
    return path


FULL = [
    (PLAIN, "base", "zero-clap", 2048, "full", 500_000),
    (OURS, "base", "baseline", 2048, "full", 480_000),
    (OURS, "base", "zero-clap", 2048, "full", 490_000),
    (OURS, "base", "zero-clap", 512, "full", 700_000),
    (OURS, "base", "zero-clap", 4096, "full", None),
    (OURS, "base", "zero-clap", 1024, "packed", 900_000),
    (FLASH, "base", "alibi", 2048, "full", 999_000),
    (TRANSFORMERS, "large", "baseline", 2048, "full", 100_000),
]


def test_a_measured_speed_gives_the_time(tmp_path, capsys):
    path = bench_file(tmp_path / "bench.json", *FULL)
    arguments = ["pile-base", *PILE, "model.variant=zero-clap", "--gpus", "1", "--kind", "h200"]
    assert main(["plan", *arguments, "--bench", str(path)]) == 0
    days = 133_082 * 512 * 2048 / 490_000 / 86_400
    share = (
        490_000
        * plan.plan(recipes.load("pile-base", PILE), 1, "h200", 0.5).flops_per_token
        / 989e12
    )
    printed = capsys.readouterr().out
    assert f"{days:,.1f} days" in printed
    assert (
        f"at {share:.0%} of their peak "
        "(measured: zeroclap, zero-clap, 8 x 2048, NVIDIA H200)" in printed
    )


def test_the_nearest_case_is_used(tmp_path):
    path = bench_file(tmp_path / "bench.json", *FULL)

    def source(*overrides):
        config = recipes.load("pile-base", [*PILE, *overrides])
        return measured_speed.utilization(path, "h200", config)[1]

    assert "zeroclap, zero-clap, 8 x 512" in source(
        "model.variant=zero-clap", "data.sequence_length=640"
    )
    assert "zeroclap, baseline, 8 x 2048" in source("data.sequence_length=512")
    assert "zeroclap, baseline, 8 x 2048" in source("model.variant=alibi")


@pytest.mark.parametrize(
    ("recipe_name", "kind", "content", "message"),
    [
        ("pile-large", "h200", None, r"no figure for model.size large \(it has: base\)"),
        ("pile-base", "a100", None, "measured on 'NVIDIA H200', not on a100"),
        ("pile-base", "h200", "{}", "'device'; accepted: what `bench --json` wrote"),
        ("pile-base", "h200", "[1]", "accepted: what `bench --json` wrote"),
        ("pile-base", "h200", "nothing", "accepted: what `bench --json` wrote"),
    ],
)
def test_a_benchmark_without_a_figure_for_the_recipe_is_refused(
    recipe_name, kind, content, message, tmp_path
):
    path = bench_file(tmp_path / "bench.json", *FULL)
    if content:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        measured_speed.utilization(path, kind, recipes.load(recipe_name, PILE))


def test_a_missing_file_is_named(tmp_path, capsys):
    missing = str(tmp_path / "none.json")
    assert main(["plan", "pile-base", *PILE, "--bench", missing]) == 2
    assert missing in capsys.readouterr().err

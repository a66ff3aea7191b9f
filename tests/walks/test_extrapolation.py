"""The reproduction of the ALiBi paper's question, as its user runs it, with fewer steps."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FEW_STEPS = ["training.steps=12", "schedule.warmup_steps=4", "training.evaluation_interval=12"]
ONE_RANK = "supervision.processes_per_node=1"  # two take twice as long beside another walk


@pytest.mark.parametrize(
    ("kind", "methods", "tables"),
    [
        ("causal", ["rotary", "t5-bias", "alibi", "sinusoidal"], ["lengths", "sliding"]),
        ("masked", ["baseline", "sinusoidal", "alibi"], ["lengths"]),
    ],
)
def test_one_command_ends_in_tables_and_figures(kind, methods, tables, tmp_path):
    """Twice for masked models: the second time finds the runs done, and measures again."""
    pages = [text for _, text in sorted(topics.items())]
    for name, chosen in {"train": pages[:40], "valid": pages[40:42]}.items():
        (tmp_path / name).mkdir()
        for number, text in enumerate(chosen):
            (tmp_path / name / f"{number}.txt").write_text(text)
    words = [
        kind,
        str(tmp_path / "train/*.txt"),
        str(tmp_path / "valid/*.txt"),
        str(tmp_path / "o"),
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for _ in range(2 if kind == "masked" else 1):
        done = subprocess.run(
            ["bash", str(ROOT / "pretrain/recipes/extrapolation.sh"), *words, *FEW_STEPS, ONE_RANK],
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
    for table in tables:
        assert (tmp_path / "o" / f"{table}.png").read_bytes()[:4] == b"\x89PNG"
        rows = list(csv.DictReader((tmp_path / "o" / f"{table}.csv").read_text().splitlines()))
        assert {row["model"].removeprefix("causal-") for row in rows} == set(methods)
        assert max(int(row["length"]) for row in rows) == (1024 if kind == "causal" else 512)
    if kind == "causal":
        model = str(tmp_path / "o/models/causal-alibi")
        command = [sys.executable, "-m", "pretrain", "generate", model, "The", "--max-tokens", "4"]
        assert subprocess.check_output(command, text=True).startswith("The")


def test_another_text_in_the_same_folder_is_refused(tmp_path):
    script = str(ROOT / "pretrain/recipes/extrapolation.sh")
    (tmp_path / "words").write_text(f"causal a.txt b.txt {tmp_path}")
    words = ["bash", script, "causal", "other.txt", "b.txt", str(tmp_path)]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert f"or: causal a.txt b.txt {tmp_path}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["words"]


def test_a_wrong_kind_is_refused():
    script = str(ROOT / "pretrain/recipes/extrapolation.sh")
    done = subprocess.run(
        ["bash", script, "both", "a", "b", "c"], stderr=-1, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "both: accepted: causal or masked\n")

"""The built wheel, installed into an empty environment, does the whole work."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("data_prep", "pretrain", "finetune", "ds_configs")
RECIPE = """
extends: demo
model: {size: tiny}
data: {sequence_length: 64}
schedule: {warmup_steps: 2}
training: {steps: 6, evaluation_interval: 3, evaluation_blocks: 16}
"""
COMMANDS = (
    "--version",
    "recipes",
    "show demo",
    "sample --output text",
    "train-tokenizer --input text/*.zst --vocab-size 400 --output vocabulary",
    "prepare --input text/sample-00000.jsonl.zst --tokenizer vocabulary --output corpus"
    " --max-tokens 128 --long split --valid-fraction 0.05",
    "supervise tiny.yaml",
    "export runs/tiny --output model",
    "convert model --to huggingface --output exported",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy: a build leaves files in its source folder."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(output), str(source)], check=True)
    (built,) = output.iterdir()
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages_and_no_tests(wheel):
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix not in (".md", ".png")  # documentation
    }
    assert {"pretrain/recipes/demo.yaml", "ds_configs/zero1_fp32.json"} <= files
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == files


@pytest.mark.slow
def test_the_installed_wheel_goes_from_text_to_a_model_of_transformers(wheel, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin/pip"), "install", "--quiet", "--no-compile"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *constraints, str(wheel)], check=True)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    # Without PYTHONPATH, and with nothing of the environment on PATH: it is not activated.
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    bare |= {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    program = str(environment / "bin/zeroclap")
    for command in COMMANDS:
        done = subprocess.run(
            [program, *command.split()],
            cwd=tmp_path,
            env=bare,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert (tmp_path / "exported/model.safetensors").is_file()
    assert (tmp_path / "exported/modeling_zeroclap.py").is_file()

"""Every command of the pages that a newcomer reads first, run as it stands there by a built wheel.

Blocks marked `sh` are run page by page in one folder, as a reader would; a block of YAML whose
first line names a file is written to that file first. The recipe's guide comes first: it makes the
corpus, the recipe and the run that the others use. What the other guides name is looked up by
tests/test_guides.py.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("data_prep", "pretrain", "finetune", "ds_configs")
GUIDES = ROOT / "pretrain" / "guides"
PAGES = [GUIDES / "writing-a-recipe.md", GUIDES / "using-a-model.md", ROOT / "README.md"]
SMALLER = {
    "--vocab-size 8000": "--vocab-size 2000",
    "--valid-fraction 0.06": "--valid-fraction 0.004",
    "  steps: 120\n": "  steps: 12\n  evaluation_blocks: 8\n",
    "_interval: 40\n": "_interval: 6\n",
    "_interval: 30\n": "_interval: 6\n",
    "_steps: 40\n": "_steps: 4\n",
    "supervise small data": "supervise small training.steps=8 schedule.warmup_steps=2 "
    "training.evaluation_blocks=8 data",
    "--tasks all --seeds 1-3": "--tasks RTE --seeds 1 epochs=1",
    "--train reviews.csv": "--train reviews.csv --seeds 1 epochs=1",
}
"""What pages say for real data, and what takes its place on a small machine."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The wheel's packages in a folder of their own."""
    folder = wheel.parent / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, str(wheel)], check=True)
    return folder


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a reader is told to bring: GLUE's files, reviews, sentences."""
    folder = tmp_path_factory.mktemp("reader")
    rows = [(f"The result number {n} is returned.", n % 2) for n in range(24)]
    (folder / "GLUE" / "RTE").mkdir(parents=True)
    for split, part in {"train": rows, "dev": rows[:8], "test": rows[:8]}.items():
        rte = [f"{n}\t{a}\tIt is.\t{('not_', '')[b]}entailment" for n, (a, b) in enumerate(part)]
        if split == "test":
            rte = [line.rpartition("\t")[0] for line in rte]
        header = "index\tsentence1\tsentence2" + ("" if split == "test" else "\tlabel")
        (folder / "GLUE" / "RTE" / f"{split}.tsv").write_text("\n".join([header, *rte]) + "\n")
    reviews = [f"{text},{('bad', 'good')[label]}" for text, label in rows]
    (folder / "reviews.csv").write_text("\n".join(["text,label", *reviews]) + "\n")
    (folder / "new.txt").write_text("The file is returned.\nFile the is returned.\n")
    return folder


def run(script: str, folder: Path, installed: Path) -> str:
    """Run a script with the installed packages; show its output if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(installed)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-6000:]}"
    return done.stdout


def test_the_wheel_holds_every_file_of_the_packages_and_no_tests(wheel: Path) -> None:
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


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_the_commands_of_a_page_work(page: Path, workspace: Path, installed: Path) -> None:
    folder = workspace
    where = "python -c 'import finetune, pretrain; print(finetune.__path__, pretrain.__path__)'"
    assert run(where, folder, installed).count(str(installed)) == 2
    if page.name == "README.md":
        folder = workspace / "own-text"
        shutil.copytree(workspace / "text", folder / "text")
        shutil.copytree(workspace / "GLUE", folder / "GLUE")
        for name in ("reviews.csv", "new.txt"):
            shutil.copy(workspace / name, folder)
    text = page.read_text()
    for published, small in SMALLER.items():
        text = text.replace(published, small)
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        if language == "yaml" and (named := re.match(r"# (\S+\.yaml)", block)):
            (folder / named[1]).write_text(block)
        elif language == "python":
            run(f"python - <<'EOF'\n{block}\nEOF\n", folder, installed)
        elif language == "sh":
            run(block, folder, installed)

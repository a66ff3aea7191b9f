"""What the rehearsal needs, and processes that believe they have a GPU.

It needs the CPU build of torch that the tests use, g++ for the guard library, and the wheel of
Triton that torch's GPU builds require: 0.7 GB, which pip fetches once into a folder of the cache.
Where something is missing all tests of the folder skip, and say what.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
TRITON = {"2.13": "3.7.1"}
"""By version of torch, the Triton that its GPU builds on PyPI require."""
TABLE: list[str] = []
"""Lines that are printed after the tests."""


@pytest.fixture(scope="session", autouse=True)
def device():
    """In place of the fixture of the tests that need a GPU."""


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """The variables of a process that pretends to have a GPU."""
    if (Path(torch.__file__).parent / "lib" / "libtorch_cuda.so").exists():
        pytest.skip("this torch is built for GPUs, and wants a true one; the rehearsal needs +cpu")
    version = torch.__version__.partition("+")[0]
    triton = TRITON.get(version.rpartition(".")[0])
    if triton is None:
        pytest.skip(f"torch {version}: the Triton that fits is known for {', '.join(TRITON)}")
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing, which compiles the guard library")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "zeroclap-rehearsal" / f"torch-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    _make(folder / f"triton-{triton}", _install, triton)
    source = Path(__file__).with_name("guard.cpp")
    guard = folder / f"guard-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}.so"
    _make(guard, _compile, source)
    return {
        **os.environ,
        "GUARD": str(guard),
        "PYTHONPATH": os.pathsep.join([str(folder / f"triton-{triton}"), str(ROOT)]),
        "DS_ACCELERATOR": "cuda",
        # What was compiled for a GPU before is not compiled again; what is generated is.
        "TRITON_CACHE_DIR": str(folder / "kernels"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        "OMP_NUM_THREADS": "1",
    }


def _make(target, action, *arguments):
    """Make a file or folder of the cache unless it is there; skip where that fails."""
    if target.exists():
        return
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    command = action(partial, *arguments)
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["nothing was printed"]
        pytest.skip(f"{' '.join(map(str, command[:4]))} ... failed: {lines[-1]}")
    partial.rename(target)


def _install(folder, version):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    return [*command, f"triton=={version}"]


def _compile(library, source):
    home = Path(torch.__file__).parent
    paths = [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    return ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", source, "-o", library, *paths]


@pytest.fixture(scope="session")
def rehearse(environment):
    """`rehearse(commands)`: what `python -m tests.gpu.rehearsal.COMMAND` print, all at a time.

    Returns a list for each command: its lines of JSON.
    """

    def rehearse(*commands):
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", f"tests.gpu.rehearsal.{words[0]}", *map(str, words[1:])],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for words in commands
        ]
        return [_lines(process) for process in processes]

    return rehearse


def _lines(process):
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, f"{process.args}\n{errors[-5000:]}"
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="session")
def table():
    """`table(heading, lines)`: print lines after the tests."""
    return lambda heading, lines: TABLE.extend(["", heading, *lines])


def pytest_terminal_summary(terminalreporter):
    for line in TABLE:
        terminalreporter.write_line(line)

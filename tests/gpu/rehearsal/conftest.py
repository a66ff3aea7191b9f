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
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    _make(folder / f"triton-{triton}", *pip, f"triton=={triton}", "--target")
    source, home = Path(__file__).with_name("guard.cpp"), Path(torch.__file__).parent
    guard = folder / f"guard-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}.so"
    compiler = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", source, f"-I{home / 'include'}"]
    _make(guard, *compiler, f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-o")
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


def _make(target, *command):
    """Make a file or folder of the cache, the command's last word, unless it is there."""
    if target.exists():
        return
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    result = subprocess.run([*command, partial], capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["nothing was printed"]
        pytest.skip(f"{' '.join(map(str, command[:4]))} ... failed: {lines[-1]}")
    partial.rename(target)


@pytest.fixture(scope="session")
def rehearse(environment):
    """`rehearse(program, *words)`: the lines of JSON that a program of this folder prints."""

    def rehearse(program, *words):
        command = [sys.executable, "-m", f"tests.gpu.rehearsal.{program}", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return rehearse

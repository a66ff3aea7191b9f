"""What all tests share: golden files, and ranks forked from one warm process.

Everything but tests/gpu runs on the CPU with one thread a process: the ranks are forks of pytest
itself, and a fork inherits neither OpenMP's threads nor a CUDA context. The variables are set
before anybody imports torch.
"""

import functools
import gc
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.update(
    OMP_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)
# `make test-gpu` sets this variable, and runs tests/gpu alone.
if os.environ.get("ZEROCLAP_TEST_DEVICE") != "cuda":
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")

# A shell starts what it puts into the background with Ctrl-C ignored; children would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.fixtures", "tests.chaos.fixtures"]
RunRanks = Callable[..., list[Any]]

FIRST = ["/test_hostfile.py", "/test_demo.py", "::test_faults_of_launchers", "/test_slurm.py"]
FIRST += ["/test_guides.py", "/test_study_run.py", "/test_engine.py", "/rehearsal/", "/chaos/"]
FIRST += ["/pretrain/model/", "/finetune/test_runs.py", "/machines/", "/test_real_glue"]
FIRST += ["/studies/", "/engine/", "/train/", "/supervision/", "/pretrain/test_", "/finetune/"]
FIRST += ["/convert/"]
"""Parts of the names of tests that take long: one that begins last would keep workers waiting. The
hostfile's and Slurm's wait more than they compute, so others compute beside them."""
ALONE = "chaos", "gpu"
"""Folders whose tests share little: each test may go to another worker."""


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a folder of compiled code, which its workers inherit.

    A process that is killed while it compiles leaves a file cut short there.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="zeroclap-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest."""

    def order(item: pytest.Item) -> int:
        places = (place for place, part in enumerate(FIRST) if part in f"/{item.nodeid}")
        return next(places, len(FIRST))

    items.sort(key=order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:  # noqa: ANN401
    """Keep a file on one worker, as its tests share what is costly to set up."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # xdist's loadgroup does not group with pytest 9.2
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if Path(file).parent.name in ALONE else file

        def _reschedule(self, node: Any) -> None:  # noqa: ANN401
            # xdist would bind three tests to a worker; it has to know the next one, no more.
            if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Keep modules and tests out of every collection of garbage from here on, here and in ranks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _environment():
    """Undo what a test, or the code that it calls, changes in this process's environment.

    A command that runs in this process may take the place of a launched rank: RANK and its like.
    """
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of small files that EIFY/fairseq made; its README.md says how."""
    return Path(__file__).parent / "fairseq"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data sets and checkpoints that are too large to be committed."""
    if not (folder := os.environ.get("ZEROCLAP_SHARED")):
        pytest.skip("needs data sets that are too large to be committed (ZEROCLAP_SHARED)")
    return Path(folder)


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """`run_ranks(count, function, *arguments)`: what each of `count` ranks returns, rank 0 first.

    The function runs in forked processes that know each other as a launcher's ranks do; it may be
    a closure, what it returns is pickled. An exception in a rank is raised here with its traceback.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # DeepSpeed, and what a rank imports and makes when it first trains: once, before the forks.
        import distutils.ccompiler
        import distutils.sysconfig  # noqa: F401

        import deepspeed.module_inject.auto_ep_layer
        import deepspeed.ops.adam
        import deepspeed.ops.op_builder.all_ops
        import deepspeed.runtime.superoffload.superoffload_stage3
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
        import numpy.ma  # noqa: F401
        import torch._inductor.compile_fx
        import torch.profiler
        import torch.utils.cpp_extension  # noqa: F401

        import pretrain.engine.engine
        import pretrain.train.__main__  # noqa: F401
        from pretrain.config import load
    import torch

    load.load("demo", ["folder=run", "data.corpus=corpus"])

    torch.set_num_threads(1)

    def run(
        count: int, function: Callable[..., Any], *arguments: object, timeout: float = 500.0
    ) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        running: dict[int, int] = {}
        # ZeRO 3 collects garbage at its start: in a rank, that would copy all memory of pytest.
        gc.collect()
        gc.freeze()
        for rank in range(count):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork
                pid = os.fork()
            if pid == 0:
                _be_rank(rank, count, port, folder, function, arguments)
            running[pid] = rank
        try:
            _wait(running, folder, time.monotonic() + timeout)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(count)]

    return run


def _wait(running: dict[int, int], folder: Path, deadline: float) -> None:
    while running:
        if time.monotonic() > deadline:
            pytest.fail(f"ranks {sorted(running.values())} did not end in time")
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            rank = running.pop(pid)
            if status:
                time.sleep(0.5)  # the others may have the better story to tell
                stories = [path.read_text() for path in sorted(folder.glob("*.error"))]
                pytest.fail(
                    f"rank {rank} ended with status {status}\n" + "\n".join(stories), pytrace=False
                )
        time.sleep(0.02)


def _be_rank(
    rank: int,
    count: int,
    port: int,
    folder: Path,
    function: Callable[..., Any],
    arguments: tuple[object, ...],
) -> None:
    """Never returns: pytest itself must not go on in a fork."""
    code = 1
    try:
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="pretrain")
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(count),
            LOCAL_WORLD_SIZE=str(count),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        import torch._dynamo.utils

        torch._dynamo.utils.counters.clear()  # those of what pytest itself has compiled
        result = function(*arguments)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        _leave_together()
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave_together() -> None:
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.barrier()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """matplotlib's figures, as far as they were written in this process, oldest first."""
    from matplotlib.figure import Figure

    written: list[Any] = []
    save = Figure.savefig

    def keep(figure: Any, *arguments: Any, **keywords: Any) -> None:
        written.append(figure)
        save(figure, *arguments, **keywords)

    monkeypatch.setattr(Figure, "savefig", keep)
    return written

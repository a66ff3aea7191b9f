"""`training.deterministic`: settings of a process, and compiled kernels that a relaunch finds."""

import os
import re

import pytest
import torch

from pretrain.engine.determinism import FOLDER, cache_use, make_deterministic


def compiled_step(run):
    """Compile a function as a new process does; return a gradient and the use of the caches."""
    make_deterministic(run, os.environ)
    compiled = torch.compile(lambda x: (2 * x).sin().sum(), dynamic=False)
    x = torch.linspace(0, 1, 32, requires_grad=True)
    compiled(x).backward()
    return x.grad.tolist(), cache_use()


def test_a_process_is_deterministic_and_keeps_the_user_s_cublas_workspace(run_ranks, tmp_path):
    """In a process of its own: the settings hold until its end."""

    def work(given):
        if given:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = given
        make_deterministic(tmp_path, os.environ)
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch._inductor.config.deterministic,
            os.environ["TORCHINDUCTOR_CACHE_DIR"],
            os.environ["CUBLAS_WORKSPACE_CONFIG"],
        )

    folder = str(tmp_path / FOLDER)
    assert run_ranks(1, work, "") == [(True, False, True, folder, ":4096:8")]
    assert run_ranks(1, work, ":16:8") == [(True, False, True, folder, ":16:8")]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_a_relaunch_compiles_nothing_and_computes_the_same(run_ranks, tmp_path):
    first, again = (run_ranks(1, compiled_step, tmp_path)[0] for _ in range(2))
    assert first[0] == again[0]
    assert re.fullmatch(r"compile caches: 0 hits, [1-9]\d* misses", first[1])
    assert re.fullmatch(r"compile caches: [1-9]\d* hits, 0 misses", again[1])

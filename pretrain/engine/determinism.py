"""`training.deterministic`: the same kernels, in the same order of additions, in every attempt.

A CPU computes the same bits without it. On an H100 runs of every ZeRO stage and of FlexAttention
that were killed had the bits of runs that were not (torch 2.11).
"""

from collections.abc import MutableMapping
from pathlib import Path

FOLDER = "compiled"
"""Of a run's folder: kernels that torch.compile made."""


def cache_use() -> str:
    """Say how often torch.compile found a graph in its caches in this process, and how often not.

    Without `training.deterministic` they are torch's own, in TORCHINDUCTOR_CACHE_DIR or under /tmp:
    there other runs find them too, and nothing that came with a run's folder is executed.
    """
    from torch._dynamo.utils import counters

    hits, misses = (
        sum(part[name] for part in counters.values() for name in part if name.endswith(ends))
        for ends in ("cache_hit", ("cache_miss", "cache_bypass"))
    )
    return f"compile caches: {hits} hits, {misses} misses"


def make_deterministic(run: Path, environ: MutableMapping[str, str]) -> None:
    """Make this process deterministic; call it before anything uses the GPU.

    - Inductor chooses kernels without timing them (`torch._inductor.config.deterministic`), and
      keeps them in the run's folder, so that a relaunch takes the same ones and compiles nothing.
      It executes what it finds there.
    - torch takes deterministic kernels, as for the backward passes of embeddings, `index_add` and
      attention, and raises RuntimeError for operations that have none.
    - cuBLAS has a workspace of its own for each stream, which it needs to repeat its results.

    Args:
        run: the run's folder.
        environ: of this process.
    """
    environ["TORCHINDUCTOR_CACHE_DIR"] = str((run / FOLDER).absolute())
    environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    import torch._inductor.config
    import torch.utils.deterministic

    torch._inductor.config.deterministic = True
    torch.use_deterministic_algorithms(True)
    # Costs time, and finds errors only.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

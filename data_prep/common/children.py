"""The environment of the Python processes that a command starts.

`python -m` and `python -c` search the working directory first. There a user may have a `torch.py`
or a `pretrain.py` of their own, which would run in place of ours.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.context import SpawnContext
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a child process: it finds our packages, and none in its folder.

    Args:
        environ: variables that the child inherits.
    """
    found = {**environ, "PYTHONSAFEPATH": "1"}
    paths = [path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path]
    if not _is_installed() and str(_ROOT) not in paths:
        paths.insert(0, str(_ROOT))
    return {**found, "PYTHONPATH": os.pathsep.join(paths)} if paths else found


def spawn_context() -> SpawnContext:
    """Return the context that starts the workers of a pool, which inherit this environment."""
    os.environ.update(environment())
    return multiprocessing.get_context("spawn")


def _is_installed() -> bool:
    """Return whether a child finds this very package without this process's working directory."""
    paths = sys.path if sys.flags.safe_path else sys.path[1:]
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    specs = (find("data_prep", paths) for find in finders if find)
    first = next(filter(None, specs), None)
    return first is not None and first.origin == str(_ROOT / "data_prep" / "__init__.py")

"""Weights & Biases curves of a run: `tracker=wandb`, with the extra `wandb` installed.

wandb's own variables say where they go (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE). Each attempt is a
run of its own, in a group with the name of the run's folder. Errors never end a run: the first one
is reported, and the attempt logs nothing more. W&B has no texts along a run's steps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_INIT_SECONDS, _FINISH_SECONDS = 15.0, 8.0
"""The second is below processes.GRACE_SECONDS: the other ranks have exited by then."""


class WandbRun:
    """Logs one attempt to W&B."""

    def __init__(
        self, run: Path, recipe: Mapping[str, Any], attempt: int, say: Callable[[str], object]
    ) -> None:
        """Start a run at W&B for an attempt at a run; `say` prints a message."""
        self._say = say
        self._run: Any = None  # wandb may not be installed where types are checked
        with self._ended_by_errors():
            import wandb

            is_online = wandb.setup().settings.mode == "online"
            if is_online and not wandb.login(prompt=False, verify=False):
                raise PermissionError("not logged in; `wandb login`, or set WANDB_MODE=offline")
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "zeroclap"),
                group=run.name,
                name=f"{run.name}, attempt {attempt}",
                dir=str(run),
                config={**recipe, "attempt": attempt},
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    save_code=False,
                    disable_git=True,
                    x_disable_meta=True,  # the command line and paths of this machine
                    init_timeout=_INIT_SECONDS,
                    finish_timeout=_FINISH_SECONDS,
                ),
            )

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # wandb's have no common class
            self._run = None
            reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
            self._say(f"WARNING: W&B shows no curves of this attempt: {reason}")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show named numbers of a step."""
        if self._run is not None:
            with self._ended_by_errors():
                self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run at W&B; what is not uploaded in a few seconds stays in the run's folder."""
        if self._run is not None:
            with contextlib.suppress(Exception):
                import wandb

                self._run.finish()
                wandb.teardown()  # waits for its process, which may write after `finish`

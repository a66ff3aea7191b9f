"""Weights & Biases curves of a run: `tracker=wandb`, with the extra `wandb` installed.

wandb's own variables say where they go (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE). Nothing here ends
a run: what fails is said once, and without a network the curves stay in the run's folder, from
where `wandb sync` uploads them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.common import files
from pretrain.train.trackers.table import Shown

STATE = "wandb.json"
"""In the run's folder: the run at W&B that the last attempt wrote to."""
_INIT_SECONDS, _FINISH_SECONDS = 15.0, 8.0
"""The second is below processes.GRACE_SECONDS: the other ranks have exited by then."""


class WandbRun:
    """Shows the surviving curve at W&B.

    Online, a later attempt rewinds the run to its first step (`resume_from`), as after a rollback,
    so that one curve shows the steps that count. Where W&B refuses that, offline, and from step 0,
    the attempt is a run of its own, in a group with the name of the run's folder.
    """

    def __init__(self, shown: Shown) -> None:
        """Begin or rewind a run at W&B."""
        self._say = shown.say
        self._newest = -1
        self._run: Any = None  # wandb may not be installed where types are checked
        try:
            self._run = self._begin(shown.folder, shown.recipe, shown.attempt, shown.first_step)
        except Exception as error:  # wandb's have no common class
            self._fail(error)

    def _begin(self, folder: Path, config: Mapping[str, Any], attempt: int, first_step: int) -> Any:  # noqa: ANN401 - a wandb.Run
        import wandb

        mode = wandb.setup().settings.mode
        common = {
            "project": os.environ.get("WANDB_PROJECT", "zeroclap"),
            "group": folder.name,
            "dir": str(folder),
            "config": {**config, "attempt": attempt},
            "settings": wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                x_disable_meta=True,  # the command line and paths of this machine
                init_timeout=_INIT_SECONDS,
                finish_timeout=_FINISH_SECONDS,
            ),
        }
        named = {**common, "name": f"{folder.name}, attempt {attempt}"}
        ways: list[dict[str, Any]] = [{**named, "mode": mode}]
        if mode == "online":
            if not wandb.login(prompt=False, verify=False):
                raise PermissionError("not logged in; `wandb login`, or set WANDB_MODE=offline")
            if first_step and (known := _known_run(folder)):
                rewound = f"{known}?_step={first_step - 1}"
                ways.insert(0, {**common, "mode": mode, "resume_from": rewound})
            ways.append({**named, "mode": "offline"})
        for number, way in enumerate(ways, start=1):
            try:
                run = wandb.init(**way)
            except Exception as error:
                if number == len(ways):
                    raise
                then = "offline" if ways[number]["mode"] == "offline" else "a new run there"
                self._say(f"WARNING: W&B: {_first_line(error)}; trying {then}")
            else:
                state = {"id": run.id, "online": way["mode"] == "online"}
                files.replace_json(folder / STATE, state)
                return run
        raise AssertionError

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show named numbers of a step; W&B takes those of an earlier one beside the newest."""
        late = {"evaluated step": step} if step < self._newest else {}
        self._newest = max(step, self._newest)
        if self._run is not None:
            try:
                self._run.log({**values, **late}, step=self._newest)
            except Exception as error:
                self._fail(error)

    def text(self, step: int, text: str) -> None:
        """W&B has no texts along a run's steps: nothing is shown."""

    def sync(self, step: int) -> None:
        """Do nothing: what failed is not begun again in this attempt."""

    def _fail(self, error: Exception) -> None:
        self._run = None
        self._say(f"WARNING: W&B shows no curves of this attempt: {_first_line(error)}")

    def close(self) -> None:
        """End the run at W&B; what is not uploaded in a few seconds stays in the run's folder."""
        with contextlib.suppress(Exception):
            if self._run is not None:
                import wandb

                self._run.finish()
                wandb.teardown()  # waits for its process, which may write after `finish`


def _known_run(folder: Path) -> str:
    """The id of the run that can be rewound; "" without one."""
    try:
        state = json.loads((folder / STATE).read_bytes())
        return str(state["id"]) if state["online"] else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]

"""Programs that show a run's curves: TensorBoard, and Weights & Biases beside it.

No error of theirs ends a run. torch and wandb are imported when the curves are opened.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
"""Of the event files, in the run's folder."""
_FLUSH_SECONDS = 5.0
"""Between two syncs of the event file."""
_INIT_SECONDS, _FINISH_SECONDS = 15.0, 8.0
"""The second is below processes.GRACE_SECONDS."""


class TensorBoard:
    """Writes TensorBoard scalars: the surviving steps, each an event.

    Steps that an attempt repeats replace the earlier ones (TensorBoard's purge step). An error does
    not end the run: nothing is written until `sync` is called.
    """

    def __init__(self, run: Path, first_step: int, say: Callable[[str], object]) -> None:
        """Open an event file in a run's folder for an attempt; `say` prints a message."""
        self._folder, self._warn = run / FOLDER, say
        self._writer: Any = None  # SummaryWriter has no complete annotations
        self._warned = False
        self.sync(first_step)

    def sync(self, step: int) -> None:
        """Write buffered events; open an event file for steps from `step` on, if none is."""
        self.close()
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            with self._closing_on_error():
                self._writer = SummaryWriter(
                    str(self._folder), purge_step=step, flush_secs=_FLUSH_SECONDS
                )

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # TensorFlow's, where that is installed, are not OSErrors
            if not self._warned:
                self._warn(f"WARNING: {self._folder}: no curves are written for now: {error}")
            self._warned = True
            with contextlib.suppress(Exception):
                self._writer.file_writer.close()  # ends its thread though it cannot write the rest
            self._writer = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the named values of a step."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        with self._closing_on_error():
            named = [Summary.Value(tag=name, simple_value=v) for name, v in values.items()]
            self._writer.file_writer.add_summary(Summary(value=named), step)

    def close(self) -> None:
        """Write buffered events."""
        if self._writer is not None:
            with self._closing_on_error():
                self._writer.flush()


class WandbRun:
    """Logs one attempt to W&B: `tracker=wandb`, with the extra `wandb` installed.

    wandb's own variables say where (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE). Each attempt is a run
    of its own, in a group with the name of the run's folder. After the first error, which is
    reported, the attempt logs nothing more.
    """

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

"""MLflow curves of a run: `tracker=mlflow`, with the extra `mlflow` installed.

MLFLOW_TRACKING_URI says where they go; without it, to a database in the run's folder. MLflow cannot
take back what it has: each attempt is a run of its own, in an experiment with the name of the run's
folder. Nothing here ends a run: what fails is said once, and a server that does not answer is given
up after seconds, because the other ranks wait for rank 0.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pretrain.train.trackers.table import Shown


class MlflowRun:
    """Shows one attempt at MLflow."""

    def __init__(self, shown: Shown) -> None:
        """Begin a run at MLflow."""
        self._say = shown.say
        self._client: Any = None  # mlflow may not be installed where types are checked
        for variable, value in (("TIMEOUT", "5"), ("MAX_RETRIES", "0")):
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{variable}", value)
        with self._ended_by_errors():
            from mlflow import MlflowClient

            is_elsewhere = "MLFLOW_TRACKING_URI" in os.environ
            local = f"sqlite:///{(shown.folder / 'mlflow.db').absolute()}"
            client = MlflowClient(None if is_elsewhere else local)
            name = shown.folder.name
            known = client.get_experiment_by_name(name)
            artifacts = None if is_elsewhere else (shown.folder / "mlflow").absolute().as_uri()
            experiment = known.experiment_id if known else client.create_experiment(name, artifacts)
            run = client.create_run(experiment, run_name=f"{name}, attempt {shown.attempt}")
            self._id = run.info.run_id
            client.log_dict(self._id, dict(shown.recipe), "recipe.json")
            self._client = client

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of many libraries
            self._client = None
            text = (str(error).strip() or type(error).__name__).partition("\n")[0]
            self._say(f"WARNING: MLflow shows no curves of this attempt: {text}")

    def _call(self, action: Callable[[Any], object]) -> None:
        if self._client is not None:
            with self._ended_by_errors():
                action(self._client)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show named numbers of a step; MLflow refuses some characters in names."""

        def log(client: Any) -> None:  # noqa: ANN401 - an MlflowClient
            from mlflow.entities import Metric

            now = int(1000 * time.time())
            names = {name: re.sub(r"[^\w\-./ ]", "_", name) for name in values}
            found = [Metric(names[name], value, now, step) for name, value in values.items()]
            client.log_batch(self._id, metrics=found)

        self._call(log)

    def text(self, step: int, text: str) -> None:
        """Show none: the texts name hosts and folders, and the server may be anybody's."""

    def sync(self, step: int) -> None:
        """Do nothing: what failed is not begun again in this attempt."""

    def close(self) -> None:
        """End the run at MLflow."""
        self._call(lambda client: client.set_terminated(self._id))

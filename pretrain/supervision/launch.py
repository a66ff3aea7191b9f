"""How an attempt is launched on a node: its control file, command line and environment."""

from __future__ import annotations

import base64
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep.common import children, files
from pretrain.config.run import RunConfig
from pretrain.config.sections import SupervisionConfig
from pretrain.processes import gpus, processes
from pretrain.processes.launching import free_port
from pretrain.records import control, ledger
from pretrain.records.control import ControlFile
from pretrain.records.folder import SUPERVISED
from pretrain.supervision.nodes import Node, connect_problem


def world_size(config: SupervisionConfig, nodes: int) -> int:
    """Return the number of ranks of a launch."""
    return nodes * gpus.ranks_here(config.processes_per_node)


def check(config: SupervisionConfig) -> None:
    """Check that the ranks of this node can have the GPUs that are visible here.

    Raises:
        ValueError: There are too few, or its processes cannot connect to each other.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        if problem := connect_problem(*server.getsockname()):
            raise ValueError(f"this machine {problem} Is lo up (`ip link set lo up`)?")
    gpus.gpus_of(gpus.ranks_here(config.processes_per_node))


def command(run: Path, control_file: ControlFile, node: int = 0) -> list[str]:
    """Return the launcher's command line for an attempt on one node.

    Args:
        run: folder of the run.
        control_file: gives the address of rank 0, and the numbers of nodes and processes.
        node: number of this node.

    Raises:
        ValueError: There are too few GPUs.
    """
    options = [f"--world_info={_world(control_file, node)}", "--node_rank", str(node)]
    options += ["--master_addr", control_file.address, "--master_port", str(control_file.port)]
    options += ["--module", "pretrain.train", str(run / SUPERVISED)]
    return [sys.executable, "-u", "-m", "deepspeed.launcher.launch", *options]


def _world(control_file: ControlFile, node: int) -> str:
    """Return DeepSpeed's --world_info: the GPUs of every node, as JSON in base64.

    This is what the program `deepspeed` does on one machine or with --no_ssh (launcher/runner.py,
    `main`): it starts launcher/launch.py, and costs an import of torch and DeepSpeed before. A
    launcher writes its own node's into CUDA_VISIBLE_DEVICES, numbers or names (GPU-..., MIG-...);
    of the other nodes only their count matters.
    """
    default = list(range(control_file.processes_per_node))
    own = gpus.gpus_of(control_file.processes_per_node) or default
    nodes = range(control_file.nodes)
    world = {f"node-{number}": own if number == node else default for number in nodes}
    return base64.urlsafe_b64encode(files.strict_json(world).encode()).decode()


def next_control_file(
    config: RunConfig, node: Node, records: Sequence[ledger.Record]
) -> ControlFile:
    """Return the control file for a run's next attempt, with a new token, number and port.

    If a supervisor was killed right after a launch, the number of that launch is in no record but
    in its control file.
    """
    recorded = ledger.run_state(records).next_attempt
    before = control.read_control_file(Path(config.folder))
    count = gpus.ranks_here(config.supervision.processes_per_node)
    return ControlFile(
        token=secrets.token_hex(8),
        attempt=max(recorded, before.attempt + 1 if before else 0),
        state=control.RUN,
        nodes=node.count,
        processes_per_node=count,
        address=node.address,
        port=free_port(),
        device=device_type(os.environ),
        threads=max(1, len(os.sched_getaffinity(0)) // count),
    )


def environment(run: Path, control_file: ControlFile, node: int = 0) -> dict[str, str]:
    """Return the launcher's environment: this process's, and marks of the attempt's processes.

    On several nodes, ranks on CPUs get as many threads each as those of node 0, so that a run on
    other machines computes the same numbers.

    Raises:
        ValueError: Ranks of this node would use another device than those of node 0.
    """
    device = device_type(os.environ)
    if device != (control_file.device or device):
        raise ValueError(
            f"ranks here would use the {device}, those of node 0 the {control_file.device}; "
            "does nvidia-smi list the GPUs of both machines?"
        )
    marks = {
        processes.RUN_VARIABLE: processes.mark(run, node),
        control.TOKEN_VARIABLE: control_file.token,
    }
    result = {**children.environment(), **marks}
    if device == "cpu":
        result["DS_ACCELERATOR"] = device  # DeepSpeed's own choice may be another
        if control_file.nodes > 1:
            result.setdefault("OMP_NUM_THREADS", str(control_file.threads))
    return result


def device_type(environ: Mapping[str, str]) -> str:
    """Return the device that ranks on this machine use, "cpu" or "cuda"."""
    chosen = environ.get("DS_ACCELERATOR") or ("cuda" if gpus.visible_gpus(environ) else "cpu")
    return "cpu" if chosen == "cpu" else "cuda"

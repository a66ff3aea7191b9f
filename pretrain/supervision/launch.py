"""How an attempt is started on a machine: the launcher's command line and its environment.

Imports no torch.
"""

from __future__ import annotations

import re
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrain.config.run import RunConfig, SupervisionConfig
from pretrain.run import ledger
from pretrain.supervision import control as orders
from pretrain.supervision import gpus, processes
from pretrain.supervision.nodes import Place

MODULE = "pretrain.train"
"""What the launcher starts. Tests of faults start a module of theirs that goes on to this one."""
RECIPE = "supervised.yaml"
"""The recipe as merged, which the ranks read."""
_MOST_GPUS = 1024
"""More than any machine has: DeepSpeed refuses to include a GPU whose number is not below this."""


def default_ranks() -> int:
    """One for each visible GPU of this machine, or two where there is none."""
    return len(gpus.visible_gpus()) or 2


def world_size(config: RunConfig, nodes: int) -> int:
    """Process that a launch will have: each machine's, or as many as a hostfile has slots.

    Raises:
        ValueError: the hostfile cannot be read, or has none.
    """
    if not config.supervision.hostfile:
        return nodes * (config.supervision.processes_per_node or default_ranks())
    return sum(_slots(config.supervision))


def _slots(config: SupervisionConfig) -> list[int]:
    """Process of each machine in the hostfile."""
    path = Path(config.hostfile)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.findall(r"^[^#\n]+\sslots=(\d+)", text, flags=re.MULTILINE)
    slots = [int(number) for number in found]
    if not sum(slots):
        raise ValueError(
            f"supervision.hostfile: {path} names no machine; it needs lines such as `gpu-1 slots=8`"
        )
    return slots


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find_launcher(config: SupervisionConfig) -> str:
    """The launcher's program: beside this Python, else on PATH.

    Raises:
        ValueError: there is none; how to get one is named.
    """
    name = config.launcher
    beside = Path(sys.executable).with_name(name)
    program = str(beside) if beside.is_file() else shutil.which(name)
    if program is None:
        ways = {"deepspeed": "install the package deepspeed into this environment"}
        ways |= {"torchrun": "install the package torch into this environment"}
        raise ValueError(
            f"supervision.launcher: no `{name}` beside {sys.executable} nor on PATH; "
            f"{ways.get(name, 'start this inside a Slurm allocation')}, or choose another launcher"
        )
    return program


def refuse_agents(config: SupervisionConfig, nodes: int) -> None:
    """Refuse agents on several machines with a launcher that reaches them all by itself.

    Raises:
        ValueError: names both ways out.
    """
    if nodes > 1 and (config.hostfile or config.launcher == "srun"):
        by = "supervision.hostfile" if config.hostfile else "supervision.launcher srun"
        raise ValueError(
            f"--nodes {nodes} with {by}, which starts the ranks of all machines from one; start "
            "one supervisor without --nodes, or an agent on each machine without that setting"
        )


def refuse_gpus(config: RunConfig) -> None:
    """Refuse a launch from this machine whose ranks could not have the GPUs visible here.

    Raises:
        ValueError: more ranks than GPUs, or a CUDA_VISIBLE_DEVICES that the launcher cannot follow.
    """
    launcher = config.supervision
    processes = launcher.processes_per_node or default_ranks()
    if launcher.hostfile:
        gpus.refuse_with_hostfile(_slots(launcher))
    elif launcher.launcher == "deepspeed":
        gpus.numbers_of(processes)
    elif launcher.launcher == "torchrun":
        gpus.gpus_of(processes)


def command(config: RunConfig, run: Path, order: orders.Order, node: int = 0) -> list[str]:
    """The launcher's command line for one attempt, on one machine.

    Args:
        config: the recipe.
        run: its folder.
        order: says where rank 0 is, and how many machines and ranks there are.
        node: number of this machine.

    Raises:
        ValueError: there is no such launcher here, or there are too few GPUs.
    """
    program, name = find_launcher(config.supervision), config.supervision.launcher
    trained = [MODULE, str(run / RECIPE)]
    if name == "srun":
        tasks = ["--kill-on-bad-exit=1", "--ntasks-per-node", str(order.processes_per_node)]
        return [program, *tasks, sys.executable, "-u", "-m", *trained]
    place, port = str(node), str(order.port)
    if name == "torchrun":
        gpus.gpus_of(order.processes_per_node)
        words = ["--nnodes", str(order.nodes), "--node-rank", place]
        words += ["--nproc-per-node", str(order.processes_per_node)]
        return [
            program,
            *words,
            "--master-addr",
            order.address,
            "--master-port",
            port,
            "--module",
        ] + (trained)
    if config.supervision.hostfile:
        words = ["--hostfile", config.supervision.hostfile]
    elif order.nodes > 1:
        words = ["--hostfile", str(hostfile(run)), "--no_ssh", "--node_rank", place]
        words += ["--master_addr", order.address, "--include", _included(order, node)]
    elif numbers := gpus.numbers_of(order.processes_per_node):
        words = ["--include", f"localhost:{','.join(numbers)}"]
    else:
        words = ["--num_gpus", str(order.processes_per_node)]
    return [program, *words, "--master_port", port, "--module", *trained]


def next_order(config: RunConfig, place: Place, records: Sequence[ledger.Record]) -> orders.Order:
    """The order for a run's next attempt, with a token, a number and a port that no other has.

    A launch whose supervisor was killed at once stands in no record, but its order has its number.
    """
    recorded = ledger.run_state(records, config.training.seed).next_attempt
    before = orders.read(Path(config.folder))
    return orders.Order(
        token=secrets.token_hex(8),
        attempt=max(recorded, before.attempt + 1 if before else 0),
        state=orders.RUN,
        nodes=place.count,
        processes_per_node=config.supervision.processes_per_node or default_ranks(),
        address=place.address,
        port=free_port(),
    )


def hostfile(run: Path) -> Path:
    """The hostfile that agents hand to the deepspeed launcher, which wants one of several nodes."""
    return orders.folder_of(run) / "hostfile"


def write_hostfile(run: Path, nodes: int) -> None:
    """Write it. Nobody looks the names up: each node has its agent, whose command says the GPUs."""
    path = hostfile(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"node-{node} slots={_MOST_GPUS}\n" for node in range(nodes)))


def _included(order: orders.Order, node: int) -> str:
    """DeepSpeed's --include for one machine's agent: which GPUs, of every machine.

    A machine's launcher uses its own GPUs' numbers; of the other machines only their count matters.
    """
    usual = [str(number) for number in range(order.processes_per_node)]
    own = gpus.numbers_of(order.processes_per_node) or usual
    return "@".join(
        f"node-{number}:{','.join(own if number == node else usual)}"
        for number in range(order.nodes)
    )


def environment(
    environ: Mapping[str, str], run: Path, order: orders.Order, node: int = 0
) -> dict[str, str]:
    """The launcher's environment: `environ`, the run's mark and the order's token."""
    return {**environ, **marks(run, order, node)}


def accelerator(config: SupervisionConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that tells DeepSpeed to use the CPU, where the ranks run on this machine only.

    srun and a hostfile start ranks on other machines, which may have GPUs where this one has none.
    """
    elsewhere = config.launcher == "srun" or bool(config.hostfile)
    if elsewhere or "DS_ACCELERATOR" in environ or gpus.visible_gpus(environ):
        return {}
    return {"DS_ACCELERATOR": "cpu"}


def marks(run: Path, order: orders.Order, node: int = 0) -> dict[str, str]:
    """The variables by which a process is known as one of an attempt."""
    return {processes.RUN_VARIABLE: processes.mark(run, node), orders.TOKEN_VARIABLE: order.token}


def pass_on_over_ssh(run: Path, order: orders.Order, environ: Mapping[str, str]) -> dict[str, str]:
    """Have the deepspeed launcher carry the marks to the machines of a hostfile.

    It passes on only what a file names, `.deepspeed_env` at home or that of DS_ENV_FILE; ours holds
    the user's lines as well.

    Returns:
        The variable that names our file.
    """
    theirs = Path.home() / environ.get("DS_ENV_FILE", ".deepspeed_env")
    lines = theirs.read_text().splitlines() if theirs.is_file() else []
    lines += [f"{name}={value}" for name, value in marks(run, order).items()]
    path = (orders.folder_of(run) / "deepspeed_env").resolve()
    path.write_text("".join(f"{line}\n" for line in lines))
    return {"DS_ENV_FILE": str(path)}

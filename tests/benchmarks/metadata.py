"""What supervision asks of the file system and the CPU on many nodes: opens and renames a minute.

usage: python -m tests.benchmarks.metadata [--nodes 16 64 128] [--seconds 60]

Every node is a process with a true agent, node 0 one with a true supervisor. The launcher of each
is `sleep`; a thread beside the supervisor writes the heartbeat and a line of metrics.jsonl a
second, as rank 0 does. Once all nodes run the attempt, Python's audit hook counts opens (of
folders, too) and renames in the run's folder, in every process. Then an agent is killed: the last
column says when the supervisor noticed. All agents share one machine, so they find their launchers
among their own children instead of among all processes.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import psutil

from pretrain.config.run import RunConfig
from pretrain.config.sections import SupervisionConfig
from pretrain.processes import processes
from pretrain.records import control, heartbeat, ledger, metrics
from pretrain.supervision import launch
from pretrain.supervision.agent import Agent
from pretrain.supervision.nodes import Node, OtherNodes
from pretrain.supervision.supervisor import Supervisor

counts = {"open": 0, "os.rename": 0}
_OPENS = ("open", "os.listdir", "os.scandir")


def children(run, node=0):
    """Find the launcher, in place of `processes.members`."""
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [processes.Member(psutil.Process(int(pid)), {}) for pid in listed]


def prepare(run):
    """Count the opens and renames of this process in a folder, from now on."""
    processes.members = children
    signal.signal(signal.SIGUSR2, write_counts)

    def hook(event, arguments):
        name = "open" if event in _OPENS else event
        if name in counts and str(arguments[0]).startswith(run):
            counts[name] += 1

    sys.addaudithook(hook)


def write_counts(signal_number, frame):
    """Write the counts and the CPU time of this process to a file."""
    found = {**counts, "cpu": time.process_time()}
    path = Path(os.environ["COUNTS"]) / f"{os.getpid()}-{time.monotonic_ns()}"
    path.write_text(json.dumps(found))


def rank_0(run, token, left):
    """Write what rank 0 writes while it trains."""
    beat, step = heartbeat.Heartbeat(run, token), 0
    values = dict.fromkeys(metrics.NEEDED[metrics.METRICS], 1)
    lines = metrics.JsonLines(run / metrics.METRICS)
    while not left.wait(1.0):
        step += 1
        if beat.beat(heartbeat.STEP, step):
            control.superseded(run, token)
        lines.write({**values, "step": step, "seconds": 1.0})


def be_agent(config, node):
    os.setsid()
    prepare(config.folder)
    os._exit(Agent(config, node, lambda text: None).run())


def be_supervisor(config, count):
    prepare(config.folder)
    run, left = Path(config.folder), threading.Event()
    supervisor = Supervisor(config, Node(0, count), lambda text: None)

    def wait_and_train():
        while not (found := control.try_read(run)) or found.state != control.RUN:
            time.sleep(0.1)
        fields = {"attempt": 1, "step": 0, "ranks": count, "seed": 1, "host": "here"}
        ledger.append(run / ledger.FILE_NAME, "attempt", token=found.token, **fields)
        rank_0(run, found.token, left)

    threading.Thread(target=wait_and_train, daemon=True).start()
    os._exit(supervisor.run())


def started(action, *arguments):
    if child := os.fork():
        return child
    try:
        action(*arguments)
    finally:
        traceback.print_exc()
        os._exit(1)


def read_counts(folder, children):
    """Ask all processes for their counts; return those of each."""
    for child in children:
        os.kill(child, signal.SIGUSR2)
    deadline = time.monotonic() + 30.0
    while len(files := list(folder.iterdir())) < len(children) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.2)
    found = {int(file.name.partition("-")[0]): json.loads(file.read_text()) for file in files}
    for file in files:
        file.unlink()
    return found


def measure(count, seconds):
    with tempfile.TemporaryDirectory() as name:
        run, folder = Path(name) / "run", Path(name) / "counts"
        folder.mkdir()
        os.environ["COUNTS"] = str(folder)
        launch.command = lambda config, run, control_file, node=0: ["sleep", "100000"]
        supervision = SupervisionConfig(processes_per_node=1, max_retries=0)
        config = RunConfig(folder=str(run), supervision=supervision)
        children = [started(be_supervisor, config, count)]
        children += [started(be_agent, config, Node(n, count)) for n in range(1, count)]
        try:
            wait_until_all_run(run, count)
            time.sleep(10.0)  # quiet
            before, begun = read_counts(folder, children), time.monotonic()
            time.sleep(seconds)
            after, minutes = read_counts(folder, children), (time.monotonic() - begun) / 60
            rates = {
                pid: {name: (after[pid][name] - before[pid][name]) / minutes for name in after[pid]}
                for pid in children
            }
            os.kill(children[-1], signal.SIGKILL)
            killed = time.monotonic()
            while not any(r["kind"] == "crash" for r in ledger.read_ledger(run / ledger.FILE_NAME)):
                time.sleep(0.2)
            noticed = time.monotonic() - killed
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            for node in range(count):
                processes.end_all(run, 0.0, node)
    own, others = rates[children[0]], [rates[child] for child in children[1:]]
    mean = {name: sum(rate[name] for rate in others) / len(others) for name in own}
    whole = {name: sum(rate[name] for rate in rates.values()) / count for name in own}
    for who, rate in (("an agent", mean), ("node 0", own), ("mean of all", whole)):
        sys.stdout.write(
            f"{count:5}  {who:12}  {rate['os.rename']:9.1f}  {rate['open']:9.1f}  "
            f"{rate['cpu']:9.2f}  {noticed:9.1f}\n"
        )
        sys.stdout.flush()


def wait_until_all_run(run, count):
    others = OtherNodes(run, count, 60.0)
    while len(others.busy()) < count - 1:
        time.sleep(0.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    head = "nodes  who             renames      opens        CPU    noticed"
    sys.stdout.write(f"{head}\n       (a minute; seconds of CPU a minute; seconds)\n")
    for count in options.nodes:
        measure(count, options.seconds)


if __name__ == "__main__":
    main()

"""Hosts of their own for a run: namespaces with sshd, and with Slurm (hosts.sh, slurm.sh)."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.chaos.fault import PLAN
from tests.chaos.fixtures import PATIENCE, ROOT

SCRIPTS = Path(__file__).parent
HOSTS = ("ip", "nsenter", "unshare", "ssh", "/usr/sbin/sshd")
SLURM = (*HOSTS, "slurmctld", "slurmd", "sbatch", "munged")
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def skip_without(programs):
    """Skip unless this is root and has these programs."""
    if os.geteuid():
        pytest.skip("needs root, to make network namespaces")
    if missing := [name for name in programs if not shutil.which(name, path=SBIN)]:
        pytest.skip(f"needs {', '.join(missing)}; see .ci/run for the packages")
    probe = ["unshare", "--net", "--pid", "--mount", "--fork", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make namespaces, which root lacks in some containers")


class Cluster:
    """Hosts node1, node2, ... on this machine, which share its file system."""

    def __init__(self, folder):
        self.folder = folder

    def do(self, *words, script="hosts.sh", **variables):
        environment = {**os.environ, "HOSTS_FOLDER": str(self.folder), "PATH": SBIN, **variables}
        command = ["bash", str(SCRIPTS / script), *map(str, words)]
        # Its daemons keep the output open, so that a pipe would not end.
        with (self.folder.parent / "hosts.log").open("a+") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            log.seek(0)
            assert done.returncode == 0, log.read()

    def pid(self, host):
        return int((self.folder / f"{host}.pid").read_text())

    def enter(self, host):
        """Return the beginning of a command line that runs on a host, in the present folder."""
        options = ["-n", "-u", "-i", "-p", "-m", f"--wd={Path.cwd()}", "--"]
        return ["nsenter", "-t", str(self.pid(host)), *options]

    def run(self, host, *words, **variables):
        """Run a command on a host; return what it prints."""
        done = subprocess.run(
            [*self.enter(host), *map(str, words)],
            env={**os.environ, "PATH": SBIN, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def processes(self, host, *words):
        """Return the processes of a host whose command line contains all these words."""
        namespace, found = os.readlink(f"/proc/{self.pid(host)}/ns/pid"), []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == namespace:
                    line = " ".join(process.cmdline())
                    if all(word in line for word in words):
                        found.append(process)
        return found

    def kill(self, host, *words, number=signal.SIGKILL):
        """Send a signal to the processes of a host whose command line contains all these words."""
        found = self.processes(host, *words)
        assert found, f"no process on node{host} with {words}"
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@pytest.fixture
def cluster(tmp_path):
    """Two hosts."""
    yield from running(Cluster, tmp_path, HOSTS, "hosts.sh")


def running(kind, tmp_path, programs, script):
    """Give two hosts while a test runs."""
    skip_without(programs)
    # The name is part of those of the network namespaces, of which there is one set a machine.
    cluster = kind(tmp_path / f"zeroclap-{os.getpid()}")
    try:
        cluster.do("up", 2, script=script)
        yield cluster
    finally:
        cluster.do("down")


class SlurmCluster(Cluster):
    """The same with Slurm; its controller is node1."""

    def slurm(self, *words, **variables):
        """Run one of Slurm's commands on node1; return what it prints."""
        return self.run(
            1, *words, SLURM_CONF=str(self.folder / "slurm" / "slurm.conf"), **variables
        )

    def job(self, number):
        """Return what Slurm says of a job, such as JobState."""
        words = self.slurm("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words)


@pytest.fixture
def slurm_cluster(tmp_path):
    """Two hosts with Slurm."""
    yield from running(SlurmCluster, tmp_path, SLURM, "slurm.sh")


class HostfileRun:
    """A run on the machines of a hostfile, supervised from node1."""

    def __init__(self, cluster, chaos, folder):
        self.cluster, self.chaos = cluster, chaos
        self.hosts = cluster.folder / "hostfile"
        self.variables = folder / "variables"
        # Only variables in this file reach the other hosts, and the plan of faults is one of them.
        self.variables.write_text(f"{PLAN}={chaos.plan}\n")

    def start(self, *overrides, **variables):
        return self.chaos.start(
            f"supervision.hostfile={self.hosts}",
            "supervision.node_wait_seconds=120",
            *overrides,
            before=self.cluster.enter(1),
            PATH=SBIN,
            DS_ENV_FILE=str(self.variables),
            **variables,
        )

    def rank(self, host):
        """Words of the command line of the rank on a host."""
        return (f"--local_rank=0 {self.chaos.run}",)

    def finish(self, supervisor, undisturbed, starts):
        """Assert that the run ends well, with the weights of a run without faults."""
        assert supervisor.wait(PATIENCE) == 0, self.chaos.output()
        assert self.chaos.start_steps() == starts, self.chaos.output()
        self.chaos.assert_same_as(undisturbed)
        for host in (1, 2):
            assert not self.cluster.processes(host, str(self.chaos.run)), self.chaos.output()


@pytest.fixture
def hostfile_run(cluster, chaos, tmp_path):
    return HostfileRun(cluster, chaos, tmp_path)


def change_code(cluster):
    """Give node2 another line in one source file, as a checkout that was not updated has."""
    change_file(cluster, "pretrain/loop/loop.py", lambda text: f"{text}\n# another line\n")


def change_file(cluster, path, change):
    """Give node2 another copy of a file of this checkout."""
    changed, source = cluster.folder / Path(path).name, ROOT / path
    changed.write_text(change(source.read_text()))
    cluster.run(2, "mount", "--bind", changed, source)


def mount_read_only(cluster, folder):
    """Make a new folder that node2 cannot write to."""
    folder.mkdir()
    cluster.run(2, "mount", "--bind", folder, folder)
    cluster.run(2, "mount", "-o", "remount,ro,bind", folder)

"""Ranks on two hosts under a launcher, without a supervisor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.fixtures import PATIENCE, ROOT, SHORT
from tests.machines.conftest import SBIN, change_code

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent


def deepspeed(hostfile, node):
    options = ["--no_ssh", "--node_rank", node, "--master_addr", "node1", "--master_port", "29999"]
    return [BIN / "deepspeed", "--hostfile", hostfile, *options, "--module", "pretrain.train"]


def test_ranks_refuse_a_host_with_other_code_by_name(cluster, recipe, tmp_path):
    change_code(cluster)
    run, said = tmp_path / "run", []
    environment = {**os.environ, "PATH": SBIN, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    for node in (0, 1):
        words = deepspeed(cluster.folder / "hostfile", node)
        command = [*cluster.enter(node + 1), *map(str, words), str(recipe.path), f"folder={run}"]
        said.append(
            subprocess.Popen(
                [*command, *SHORT],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    printed = [process.communicate(timeout=PATIENCE)[0] for process in said]
    assert all(process.returncode for process in said), printed
    for text in printed:
        assert "not all ranks run the same code: zeroclap: " in text, text
        assert "on node2 (pretrain/loop/loop.py differs)" in text, text
    assert not (run / "ledger.jsonl").exists()


def test_ranks_under_srun_refuse_a_host_with_other_code_by_name(slurm_cluster, recipe, tmp_path):
    change_code(slurm_cluster)
    run, log = tmp_path / "run", tmp_path / "srun.log"
    command = [sys.executable, "-m", "pretrain.train", recipe.path, f"folder={run}", *SHORT]
    with pytest.raises(AssertionError):
        slurm_cluster.slurm(
            *("srun", "--nodes=2", "--ntasks-per-node=1", f"--output={log}", f"--chdir={ROOT}"),
            *command,
            PYTHONPATH=str(ROOT),
            DS_ACCELERATOR="cpu",
        )
    text = log.read_text()
    assert "not all ranks run the same code: zeroclap: " in text, text
    assert "on node2 (pretrain/loop/loop.py differs)" in text, text

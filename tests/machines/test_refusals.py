"""What machines of a hostfile are refused for, over a true ssh."""

import time
from pathlib import Path

import pytest

from pretrain.config.load import load
from tests.chaos.fixtures import PATIENCE
from tests.machines.conftest import ROOT, change_code, change_file, mount_read_only

pytestmark = pytest.mark.slow


def without_folder(cluster, chaos):
    chaos.run.mkdir()
    cluster.run(2, "mount", "-t", "tmpfs", "tmpfs", chaos.run)


def read_only(cluster, chaos):
    mount_read_only(cluster, chaos.run)


def without_corpus(cluster, chaos):
    cluster.run(2, "mount", "-t", "tmpfs", "tmpfs", load(str(chaos.recipe)).data.corpus)


def without_key(cluster, chaos):
    keys = Path("~root/.ssh/authorized_keys").expanduser()
    cluster.run(2, "mount", "--bind", "/dev/null", keys)


def other_code(cluster, chaos):
    change_code(cluster)


def other_settings(cluster, chaos):
    change_file(cluster, "ds_configs/zero1_fp32.json", lambda text: text.replace("1", "2"))


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (other_code, "node2 has zeroclap "),
        (other_settings, f"node2 has another copy of {ROOT}/ds_configs/zero1_fp32.json; give it"),
        (without_folder, "node2 does not have the folder"),
        (read_only, "node2 cannot write to the folder"),
        (without_corpus, "/manifest.json; give it the copy of this machine"),
        (without_key, "node2: root@node2: Permission denied"),
    ],
)
def test_machines_that_cannot_run_it_are_refused_in_seconds(
    hostfile_run, chaos, cluster, arrange, message
):
    arrange(cluster, chaos)
    started = time.monotonic()
    assert hostfile_run.start().wait(PATIENCE) == 2, chaos.output()
    assert message in chaos.output()
    assert time.monotonic() - started < 60  # most of it is the start of Python
    assert not (chaos.run / "ledger.jsonl").exists()

"""The launcher's command line and environment."""

import sys
from pathlib import Path

import pytest

from pretrain.config import RunConfig, SupervisionConfig, TrainingConfig
from pretrain.supervision import launch, orders
from pretrain.supervision.nodes import Place
from pretrain.supervision.orders import Order

RUN = Path("/runs/a")
ONE = Order("aa", 3, orders.RUN, nodes=1, ranks=2, port=999)
TWO = Order("aa", 3, orders.RUN, nodes=2, ranks=4, address="10.0.0.1", port=999)


@pytest.fixture(autouse=True)
def _programs(monkeypatch, tmp_path):
    """Every launcher beside a Python of this test's own."""
    for name in ("deepspeed", "torchrun", "srun"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def command(order, node=0, **settings):
    config = RunConfig(supervision=SupervisionConfig(**settings))
    program, *words = launch.command(config, RUN, order, node)
    return f"{Path(program).name} {' '.join(words)}"


def test_a_launch_has_a_number_above_that_of_every_launch_before(tmp_path):
    config = RunConfig(folder=str(tmp_path))

    def next_number(*records):
        return launch.next_order(config, Place(), records).attempt

    began = {"kind": "attempt", "attempt": 1, "step": 0}
    never_began = {"kind": "crash", "attempt": 2, "step": 0}
    assert [next_number(), next_number(began), next_number(began, never_began)] == [1, 2, 3]
    orders.give(tmp_path, Order("killed at once, so that nothing was recorded", 3, orders.RUN))
    assert next_number(began, never_began) == 4


TRAINED = "pretrain.train /runs/a/supervised.yaml"


def test_the_deepspeed_launcher_on_one_machine_on_several_and_by_ssh():
    words = f"--master_port 999 --module {TRAINED}"
    assert command(ONE) == f"deepspeed --num_gpus 2 {words}"
    agent = "--hostfile /runs/a/control/hostfile --no_ssh --node_rank 1 --master_addr 10.0.0.1"
    assert command(TWO, node=1) == f"deepspeed {agent} {words}"
    assert command(ONE, hostfile="hosts") == f"deepspeed --hostfile hosts {words}"


def test_torchrun_and_srun():
    words = "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr 10.0.0.1 --master-port 999"
    assert command(TWO, 1, launcher="torchrun") == f"torchrun {words} --module {TRAINED}"
    started = command(TWO, launcher="srun")
    assert started.startswith("srun --kill-on-bad-exit=1 --ntasks-per-node 4 ")
    assert started.endswith(f"/python -u -m {TRAINED}")


def test_a_launcher_that_is_not_there_is_refused_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for name, way in (
        ("deepspeed", "install the package deepspeed"),
        ("torchrun", "install the package torch"),
        ("srun", "start this inside a Slurm allocation"),
    ):
        with pytest.raises(ValueError, match=rf"supervision.launcher: no `{name}` .*{way}"):
            launch.find_launcher(SupervisionConfig(launcher=name))


def test_settings_that_no_launcher_has_are_refused():
    with pytest.raises(ValueError, match="supervision.launcher: 'mpirun' .*deepspeed, torchrun"):
        SupervisionConfig(launcher="mpirun")
    with pytest.raises(ValueError, match="only the deepspeed launcher takes a hostfile"):
        SupervisionConfig(launcher="srun", hostfile="hosts")


def test_agents_and_a_launcher_that_reaches_all_machines_exclude_each_other():
    for settings in ({"launcher": "srun"}, {"hostfile": "hosts"}):
        launch.refuse_agents(SupervisionConfig(**settings), 1)
        with pytest.raises(ValueError, match=r"--nodes 2 with supervision\..*without --nodes, or"):
            launch.refuse_agents(SupervisionConfig(**settings), 2)


def test_the_hostfile_has_a_line_a_machine(tmp_path):
    launch.write_hostfile(tmp_path, 2, 8)
    assert launch.hostfile(tmp_path).read_text() == "node-0 slots=8\nnode-1 slots=8\n"


def test_processes_are_marked_over_ssh_too_and_the_users_own_lines_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n")
    run = tmp_path / "a run"
    orders.give(run, ONE)
    named = launch.pass_on_over_ssh(run, ONE, {})
    lines = Path(named["DS_ENV_FILE"]).read_text().splitlines()
    marks = launch.marks(run, ONE)
    assert lines == ["NCCL_DEBUG=INFO", f"ZEROCLAP_RUN={run}", "ZEROCLAP_ATTEMPT=aa"]
    assert launch.environment({"A": "1"}, run, ONE).items() >= {"A": "1", **marks}.items()


def test_the_ranks_of_a_launch_are_counted_before_it(tmp_path):
    four = TrainingConfig(ranks=4)
    assert launch.world_size(RunConfig(training=four), 3) == 12
    hosts = tmp_path / "hosts"
    config = RunConfig(training=four, supervision=SupervisionConfig(hostfile=str(hosts)))
    for text in (None, "", "# gpu-1 slots=8\n"):
        if text is not None:
            hosts.write_text(text)
        with pytest.raises(ValueError, match=r"hosts names no machine; .*gpu-1 slots=8"):
            launch.world_size(config, 1)
    hosts.write_text("gpu-1 slots=8\n# gpu-2 slots=8\ngpu-3  slots=4\n")
    assert launch.world_size(config, 1) == 12


def test_ranks_are_the_visible_gpus_or_two(monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda path, pattern: ["nvidia0", "nvidia1", "nvidia2"])
    for visible, ranks in [("0", 1), ("0,2", 2), ("0,1,2", 3), ("", 2)]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert launch.default_ranks() == ranks, visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert launch.default_ranks() == 3
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [])
    assert launch.default_ranks() == 2

"""Launchers: the variables of deepspeed, torchrun, Slurm's srun, or none."""

import os

import pytest

from pretrain.engine.distributed import Process, first_host, launcher_variables
from tests.pretrain.engine.test_engine import build, train

SRUN = {
    **{"SLURM_JOB_ID": "1234567", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"},
    **{"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"},
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
}


def test_a_process_without_a_launcher_is_alone():
    assert Process.from_environment({}) == Process(0, 1, 0, 1)
    assert launcher_variables({"HOME": "/"})["MASTER_ADDR"] == "127.0.0.1"


def test_variables_of_a_launcher_are_used_unchanged():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    torchrun |= {"MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
    assert launcher_variables(torchrun) == torchrun
    assert launcher_variables({**torchrun, **SRUN}) == torchrun  # torchrun inside a job
    assert Process.from_environment(torchrun) == Process(5, 8, 1, 4)


def test_local_size_of_the_deepspeed_launcher_is_the_local_world_size():
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert Process.from_environment(variables) == Process(3, 4, 1, 2)


def test_a_local_world_size_left_by_another_launcher_is_ignored():
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    deepspeed = {"LOCAL_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert Process.from_environment({**variables, **deepspeed}).local_world_size == 2
    elastic = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Process.from_environment({**variables, **elastic}).local_world_size == 2


def test_under_srun_ranks_and_master_address_come_from_the_job_step():
    assert Process.from_environment(SRUN) == Process(5, 7, 1, 2)
    variables = launcher_variables(SRUN)
    assert variables["MASTER_ADDR"] == "gpu03"
    assert 12000 <= int(variables["MASTER_PORT"]) < 32000
    assert launcher_variables({**SRUN, "MASTER_PORT": "77"})["MASTER_PORT"] == "77"
    with pytest.raises(ValueError, match="MASTER_PORT is 65536"):
        launcher_variables({**SRUN, "MASTER_PORT": "65536"})


def test_a_batch_script_is_a_single_process():
    script = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert Process.from_environment(script) == Process(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("a1,b2", "a1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("rack[2-3]node[10-11]-ib,x", "rack2node10-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, which is not below WORLD_SIZE 2"),
        ({"RANK": "1"}, "RANK is 1, which is not below WORLD_SIZE 1"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a whole number"),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK is 3, which is not below LOCAL_WORLD_SIZE 2",
        ),
    ],
)
def test_variables_that_contradict_each_other_are_refused(variables, message):
    with pytest.raises(ValueError, match=message):
        Process.from_environment(variables)


SLURM_OF_ONE_NODE = {
    **{"SLURM_JOB_ID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost"},
    **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"},
}


def test_ranks_of_srun_train_the_same_bits(run_ranks):
    """The deepspeed launcher and torchrun stand in tests/chaos."""

    def work(slurm):
        if slurm:
            number = os.environ["RANK"]
            for name in launcher_variables({}):
                if name != "MASTER_PORT":
                    del os.environ[name]
            numbers = {"SLURM_PROCID": number, "SLURM_LOCALID": number}
            os.environ.update(SLURM_OF_ONE_NODE | numbers)
        built = build("zero2_fp32", micro=2)
        losses = train(built, 2, range(3))
        weights = [parameter.detach().numpy().copy() for parameter in built.module.parameters()]
        return losses, [each.tobytes() for each in weights]

    assert run_ranks(2, work, True) == run_ranks(2, work, False)

"""What is wrong with machines, from what their ranks measured."""

import dataclasses
import re

import pytest

from pretrain.machine.judge import Needs, problems, table
from pretrain.machine.measure import STAGES, Answer

VERSIONS = {"python": "3.11", "torch": "2.13", "CUDA": "12.8", "NCCL": "2.27", "driver": "570.86"}
NEEDS = Needs(
    ranks=3,
    on_gpus=True,
    save_seconds=1800,
    device_bytes=18 * 10**9,
    checkpoint_bytes=5 * 10**9,
    gradient_bytes=7 * 10**8,
    update_flops=2e14,
)


def answer(rank, **changes):
    """What a healthy A100 with 40 GB answers."""
    return dataclasses.replace(
        Answer(
            rank,
            f"gpu-{rank}",
            VERSIONS,
            device="cuda:0",
            name="NVIDIA A100-SXM4-40GB",
            capability=8.0,
            total_bytes=42 * 10**9,
            free_bytes=41 * 10**9,
            matmul_flops=2.5e14,
            write_bytes_per_second=5e8,
            fsync_seconds=0.01,
            all_reduce_bytes_per_second=1e11,
            all_reduce_seconds=1e-5,
        ),
        **changes,
    )


def found(*, needs=NEEDS, **changes):
    """The problems where rank 1 differs from the others."""
    return problems([answer(0), answer(1, **changes), answer(2)], needs)


def test_healthy_machines_have_no_problem():
    assert found() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"versions": VERSIONS | {"NCCL": "2.26"}},
            "^NCCL: versions differ: 2.27 on gpu-2, 2.26 on gpu-1$",
        ),
        (
            {"device": "cpu", "name": "CPU"},
            r"^rank 1 on gpu-1 would use the CPU: .* torch 2.13 \(for CUDA 12.8\) .* 570.86$",
        ),
        (
            {"free_bytes": 19 * 10**9},
            r"^rank 1 on gpu-1 needs about 18\.0 GB .*, of which 19\.0 GB are free; end the other",
        ),
        (
            {"total_bytes": 16 * 10**9, "free_bytes": 15 * 10**9},
            r"^rank 1 on gpu-1 needs about 18\.0 GB of its GPU, which has 16\.0 GB; `plan` says",
        ),
        (
            {"matmul_flops": 1.5e14},
            "^rank 1 on gpu-1: a matrix product reaches 150 TFLOP/s, 48% of the data sheet's",
        ),
        (
            {"matmul_flops": 1.9e14},
            "^rank 1 on gpu-1 is slow: 190 TFLOP/s where the others reach 250 TFLOP/s$",
        ),
        (
            {"all_reduce_bytes_per_second": 8e8},
            r"^all-reduce: 0\.8 GB/s, .* takes 0\.875 s and computing them 0\.8 s; .*NCCL_DEBUG",
        ),
    ],
)
def test_each_problem_is_named_with_its_rank_and_host(changes, message):
    (text,) = found(**changes)
    assert re.search(message, text), text


def test_a_card_without_a_data_sheet_is_compared_with_the_others_alone():
    unknown = [answer(rank, name="NVIDIA H100 PCIe", matmul_flops=1e14) for rank in range(3)]
    assert problems(unknown, NEEDS) == []
    unknown[2] = dataclasses.replace(unknown[2], matmul_flops=7e13)
    (text,) = problems(unknown, NEEDS)
    assert text.startswith("rank 2 on gpu-2 is slow: 70 TFLOP/s")


def test_of_two_ranks_each_is_compared_with_the_other():
    pair = [answer(0), answer(1, matmul_flops=1.9e14)]
    (text,) = problems(pair, dataclasses.replace(NEEDS, ranks=2))
    assert text.startswith("rank 1 on gpu-1 is slow: 190 TFLOP/s where the others reach 250")


def test_a_folder_that_takes_too_long_for_a_checkpoint_is_a_problem():
    slow = [answer(rank, write_bytes_per_second=9e5) for rank in range(3)]
    (text,) = problems(slow, NEEDS)
    assert (
        "2.7 MB/s: a checkpoint of 5.0 GB would take longer than supervision.save_seconds" in text
    )
    assert problems(slow, dataclasses.replace(NEEDS, save_seconds=1900)) == []


@pytest.mark.parametrize("field", STAGES)
def test_a_rank_that_hangs_or_dies_is_named_with_what_it_was_doing(field):
    later = list(STAGES)[list(STAGES).index(field) :]
    assert f"rank 1 on gpu-1 stopped in {STAGES[field]}" in found(**dict.fromkeys(later))
    assert f"{field} None" not in table([answer(0), answer(1, **dict.fromkeys(later))])


def test_a_rank_that_never_answered_is_named():
    assert problems([answer(0), answer(2)], NEEDS)[0] == "rank 1 did not start"


def test_on_a_cpu_speeds_are_not_judged():
    cpus = [
        answer(rank, device="cpu", name="CPU", capability=None, matmul_flops=speed)
        for rank, speed in enumerate((1e9, 9e10, 9e10))
    ]
    slow = [dataclasses.replace(cpu, all_reduce_bytes_per_second=1e6) for cpu in cpus]
    assert problems(slow, dataclasses.replace(NEEDS, on_gpus=False)) == []


def test_the_table_has_a_line_for_each_rank():
    lines = table([answer(0), answer(1, matmul_flops=3e10)]).splitlines()
    expected = "0 gpu-0 cuda:0 (NVIDIA A100-SXM4-40GB) 42.0 GB 41.0 GB 250 TFLOP/s 500 MB/s "
    assert " ".join(lines[1].split()) == f"{expected}10.00 ms 100,000 MB/s 0.01 ms"
    assert "30 GFLOP/s" in lines[2]
    assert lines[-1] == "run's folder: 1,000 MB/s for 2 ranks at once"
    assert "NCCL 2.27" in lines[-2]

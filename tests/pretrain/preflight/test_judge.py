"""What is wrong with machines, from what their ranks measured."""

import dataclasses
import re

import pytest

from pretrain.preflight.judge import Needs, problems, table
from pretrain.preflight.measure import STAGES, Answer

VERSIONS = {"Python": "3.11", "torch": "2.13", "CUDA": "12.8", "NCCL": "2.27", "driver": "570.86"}
NEEDS = Needs(
    ranks=3,
    on_gpus=True,
    device_bytes=18 * 10**9,
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
            "^NCCL: 2.27 on gpu-0, gpu-2 and 2.26 on gpu-1$",
        ),
        ({"device": "cpu", "name": "CPU"}, "^rank 1 on gpu-1 would use the CPU: .* 570.86$"),
        ({"free_bytes": 19 * 10**9}, r"^rank 1 on gpu-1 .* 19\.0 GB are free; end"),
        ({"total_bytes": 16 * 10**9, "free_bytes": 15 * 10**9}, r"18\.0 GB .* has 16\.0 GB"),
    ],
)
def test_each_problem_is_named_with_its_rank_and_host(changes, message):
    (text,) = found(**changes)
    assert re.search(message, text), text


@pytest.mark.parametrize("field", STAGES)
def test_a_rank_that_hangs_or_dies_is_named_with_what_it_was_doing(field):
    later = list(STAGES)[list(STAGES).index(field) :]
    assert f"rank 1 on gpu-1 stopped in {STAGES[field]}" in found(**dict.fromkeys(later))
    assert f"{field} None" not in table([answer(0), answer(1, **dict.fromkeys(later))])


def test_a_rank_that_never_answered_is_named():
    assert problems([answer(0), answer(2)], NEEDS)[0] == "rank 1 did not start"


def test_speeds_are_not_judged():
    slow = {"matmul_flops": 1e9, "write_bytes_per_second": 1.0, "all_reduce_bytes_per_second": 1e6}
    assert found(**slow) == []


def test_the_table_has_a_line_for_each_rank():
    lines = table([answer(0), answer(1, matmul_flops=3e10)]).splitlines()
    expected = "0 gpu-0 cuda:0 (NVIDIA A100-SXM4-40GB) 42.0 GB 41.0 GB 250 TFLOP/s 500 MB/s "
    assert " ".join(lines[1].split()) == f"{expected}10.00 ms 100,000 MB/s 0.01 ms"
    assert "30 GFLOP/s" in lines[2]
    assert lines[-1] == "run's folder: 1,000 MB/s for 2 ranks at once"
    assert "NCCL 2.27" in lines[-2]

"""`preflight` with real ranks on the CPU, through the run's launcher."""

import pytest

from pretrain import __main__ as command_line
from pretrain.checks import capacity
from pretrain.preflight import command, measure
from pretrain.preflight.judge import Needs, problems
from pretrain.processes import gpus
from pretrain.supervision import jobs

TWO = "supervision.processes_per_node=2"
TORCHRUN = "supervision.launcher=torchrun"


def preflight(capsys, *words):
    code = command_line.main(["preflight", *words])
    return code, capsys.readouterr()


def test_two_ranks_measure_everything(run_ranks, tmp_path):
    recipe = str(tmp_path / "supervised.yaml")
    assert run_ranks(2, measure.main, ["--local_rank=0", recipe]) == [0, 0]
    answers = measure.read_answers(tmp_path, 3)
    assert [(a.rank, a.device, a.stopped_in) for a in answers] == [(0, "cpu", ""), (1, "cpu", "")]
    assert problems(answers, Needs(2, on_gpus=False)) == []


def test_a_wrong_sum_of_the_ranks_ends_the_measurement(run_ranks, tmp_path, monkeypatch):
    import torch

    def forget(tensor):
        """Count the own part alone."""

    def work():
        process = start()
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", forget)
            with pytest.raises(ValueError, match=r"an all-reduce of 2 ranks gave \d\.0, not 3\.0"):
                measure._all_reduce(process, tmp_path)

    from pretrain.engine.engine import start

    run_ranks(2, work)


@pytest.mark.slow
def test_preflight_starts_the_ranks_through_the_launcher_and_leaves_nothing(tmp_path, capsys):
    run = tmp_path / "runs" / "new"
    words = [TWO, TORCHRUN, f"folder={run}", "model.size=small"]
    code, printed = preflight(capsys, *words)
    assert code == 0, printed.out
    rows = printed.out.splitlines()[1:3]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert all(row.split()[2:4] == ["cpu", "(CPU)"] and " - " not in row for row in rows)
    assert printed.out.endswith("no problems found\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_its_error_shown(tmp_path, capsys, monkeypatch):
    """The launcher fails at once, so that no rank starts."""
    monkeypatch.setattr(command, "MODULE", "pretrain.preflight.nothing")
    code, printed = preflight(capsys, TWO, TORCHRUN, f"folder={tmp_path / 'run'}")
    assert code == 1
    assert "PROBLEM: rank 0, 1 did not start" in printed.out
    assert "the launcher ended with code 1" in printed.out
    assert "pretrain.preflight.nothing" in printed.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.attention_backend=flex"], "'flex' needs a GPU; on cpu write dense"),
        (["nothing"], "recipe 'nothing' is neither a file nor one of"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(words, message, capsys, monkeypatch):
    monkeypatch.setattr(command, "_ask", lambda *_: pytest.fail("something was started"))
    monkeypatch.setenv("PATH", "/nowhere")  # the machine may have Slurm
    code, printed = preflight(capsys, *words)
    assert code == 2
    assert message in printed.err


@pytest.mark.parametrize("command_name", ["preflight", "supervise"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([TWO], "2 ranks on a machine with 1 usable GPU (CUDA_VISIBLE_DEVICES="),
        ([TWO], "write at most 1"),
        (
            ["supervision.processes_per_node=1", "training.deepspeed=zero1_bf16"],
            "zero1_bf16 computes in bf16, which needs compute capability 8.0 (A100) or later, and "
            "the GPU has compute capability 7.5; write zero1_fp16",
        ),
    ],
)
def test_what_a_gpu_cannot_do_is_refused_before_anything_starts(
    command_name, words, message, capsys, monkeypatch, recipe, tmp_path
):
    """On a machine that shows one GPU of an earlier generation."""
    monkeypatch.delenv("DS_ACCELERATOR")
    card = gpus.Gpu("0", "Tesla T4", "570.86", 7.5, 16 << 30, 16 << 30)
    monkeypatch.setattr(gpus, "visible_gpus", lambda *_: ["0"])
    monkeypatch.setattr(gpus, "describe", lambda: [card])
    monkeypatch.setattr(jobs, "start", lambda *_: pytest.fail("something was started"))
    arguments = [command_name, str(recipe.path), f"folder={tmp_path / 'run'}", *words]
    assert command_line.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_answer_is_read_as_it_was_written(tmp_path):
    answer = measure.Answer(1, "h", {"torch": "2"}, device="cpu", matmul_flops=1e9)
    path = measure.answer_file(tmp_path, 1)
    measure.files.replace_json(path, measure.dataclasses.asdict(answer))
    assert measure.read_answers(tmp_path, 2) == [answer]
    assert answer.stopped_in == "writing to the run's folder"


def test_the_write_speed_leaves_no_file(tmp_path):
    speed, seconds = capacity.write_speed(tmp_path, (1 << 20) + 1)
    assert speed > 0
    assert seconds >= 0
    assert list(tmp_path.iterdir()) == []

"""One attempt, from its command line to its exit code, with everything that may fail."""

import contextlib
import errno
import fcntl
import io
import json
import math
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from data_prep import contents
from data_prep.common import files
from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_SPIKE
from data_prep.common.files import write_json
from finetune.zeroclap import main as pretrain
from pretrain.config import deepspeed
from pretrain.config.load import load
from pretrain.convert.export import export_checkpoint
from pretrain.plan import plan
from pretrain.records import audit, checkpoints, control, ledger, metrics, status
from pretrain.records import folder as run_folder
from pretrain.spikes import policy
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.replay import read_curve
from pretrain.train import __main__ as train
from pretrain.train import setup
from tests.pretrain.builders import lines_of, short, weights_of

SHORT = short(6, 3)


@pytest.fixture(scope="session")
def attempt(train_ranks):
    """As `train_ranks`, of a short run."""
    return lambda folder, *words, **options: train_ranks(folder, *SHORT, *words, **options)


@pytest.fixture(scope="module")
def straight(attempt, tmp_path_factory):
    """A run that nothing disturbed, of 6 steps with a checkpoint after every second."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert [code for code, _, _ in attempt(folder)] == [0, 0]
    return folder


def test_a_rank_that_fails_alone_reports_its_error(run_ranks):
    """Also if its machine's first rank has no error."""

    def work():
        train._SECONDS_TO_BE_ENDED = 0.1  # no launcher ends them
        errors, rank = io.StringIO(), int(os.environ["RANK"])
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = train.main(["no-such-recipe" if rank else "--help"])
        return code, errors.getvalue()

    (first, nothing), (other, output) = run_ranks(2, work)
    assert (first, nothing, other) == (0, "", 2)
    assert output.startswith("pretrain.train: error on rank 1: recipe 'no-such-recipe' is neither")


def test_ranks_with_other_copies_of_files_are_refused_before_the_start(attempt, corpus, tmp_path):
    """Such as those of another machine: they could hang, or compute other numbers."""
    copy, sample = shutil.copytree(corpus, tmp_path / "copy"), contents.sample
    ids = (copy / "train" / "shard-00000.bin").read_bytes()
    (copy / "train" / "shard-00000.bin").write_bytes(ids[2:] + ids[:2])
    other, own = tmp_path / "zero1_fp32.json", deepspeed.DS_CONFIGS / "zero1_fp32.json"
    other.write_text(own.read_text().replace('comm": false', 'comm": true'))

    def sabotage(rank):
        if rank:
            deepspeed.DS_CONFIGS = tmp_path
            contents.sample = lambda folder, *names: sample(copy, *names)
            train.load = lambda recipe, words: load(recipe, [*words, "optimizer.epsilon=1e-3"])

    (code, _, errors), (other_code, *_) = attempt(tmp_path / "run", sabotage=sabotage)
    assert (code, other_code) == (2, 2), errors
    assert "not all ranks have the same settings or files: optimizer.epsilon: " in errors
    assert f"files of {corpus}: " in errors
    assert "zero1_fp32.zero_optimization.overlap_comm: false on " in errors
    assert not (tmp_path / "run").exists()


def test_a_slow_rank_is_named_once_in_the_log(attempt, tmp_path):
    """Rank 1, on a machine of its own, reads its batches slowly.

    Nothing of that is in the steps' durations.
    """

    def sabotage(rank):
        from pretrain.data.batches import PretrainingBatches
        from pretrain.records import pace

        pace.STEPS, pace.LEAST_STEPS = 5, 2
        socket.gethostname = lambda: f"node-{rank}"
        usual = PretrainingBatches.micro_batches

        def slow(self, *arguments):
            time.sleep(0.5)
            return usual(self, *arguments)

        if rank:
            PretrainingBatches.micro_batches = slow

    results = attempt(tmp_path / "run", sabotage=sabotage)
    text = "WARNING: rank 1 on node-1 is slow and every step waits for it"
    assert [(code, output.count(text)) for code, output, _ in results] == [(0, 1), (0, 0)]
    first, *lines = lines_of(tmp_path / "run" / metrics.METRICS)
    assert "slowest_rank" not in first  # a rank tells in a step how long the one before took
    assert [line["slowest_rank"] for line in lines] == [1] * 5
    assert all(line["slowest_rank_seconds"] > 0.5 for line in lines)
    assert all(0 < line["padding"] < 1 and line["memory_bytes"] > 1e7 for line in lines)
    assert all(line["perplexity"] == math.exp(line["loss"]) for line in lines)
    assert first["beta"] == 1.0
    assert all(0.9 < line["beta"] < 1.1 for line in lines)


def test_rank_0_traces_the_recipe_s_window_and_no_bit_changes(straight, attempt, tmp_path):
    assert [code for code, _, _ in attempt(tmp_path, "profile.steps=[1, 3]")] == [0, 0]
    names = [path.name for path in (tmp_path / "profile").iterdir()]
    assert names == ["attempt-001-steps-1-3.pt.trace.json.gz"]
    assert_same_run(tmp_path, straight)


def test_what_auto_stands_for_is_said_on_a_screen_line_and_recorded(attempt, tmp_path):
    ((code, output, _),) = attempt(tmp_path / "run", ranks=1)
    (line,) = (line for line in output.splitlines() if line.startswith("attempt 1: "))
    assert (code, line.endswith(", dense)"), len(line) <= 120) == (0, True, True)
    assert "validation: 15 % of the tokens masked" in output
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (environment["attention_backend"], environment["compiled"]) == ("dense", False)


@pytest.mark.parametrize(("token", "expected"), [("", 2), ("aa", 1)])
def test_a_busy_port_is_a_usage_error_unless_a_supervisor_chose_it(
    attempt, tmp_path, token, expected
):
    """The supervisor chooses the port of each launch, and another one for the next."""

    def sabotage(rank):
        from pretrain.engine import engine
        from pretrain.engine.distributed import PortInUse

        def refuse(environ):
            raise PortInUse("127.0.0.1 port 9, where the ranks are to meet, cannot be opened")

        os.environ[control.TOKEN_VARIABLE] = token
        engine.check_port_is_free = refuse

    if token:  # as its supervisor has
        (tmp_path / "run").mkdir()
    ((code, _, output),) = attempt(tmp_path / "run", ranks=1, sabotage=sabotage)
    assert (code, output.startswith("pretrain.train: error: 127.0.0.1 port 9")) == (expected, True)
    begun = {path.name for path in (tmp_path / "run").glob("*")}
    assert begun == ({"control"} if token else set()), (
        "an error file for the supervisor, if there is one"
    )


def records(run, kind=None):
    found = ledger.read_ledger(run / ledger.FILE_NAME)
    return [record for record in found if kind in (None, record["kind"])]


def committed(run):
    return list(ledger.run_state(records(run)).checkpoints)


def interrupted(run, folder, after=4):
    """A copy of a run as it was when the checkpoint of a step had just been committed."""
    shutil.copytree(run, folder)
    (folder / "train.lock").unlink()
    lines = (folder / ledger.FILE_NAME).read_bytes().splitlines(keepends=True)
    found = records(run)
    end = next(r["number"] for r in found if r["kind"] == "commit" and r["step"] == after)
    (folder / ledger.FILE_NAME).write_bytes(b"".join(lines[: end + 1]))
    return folder


def recommit(run, step, change):
    """Commit a checkpoint again, with a manifest that `change` has changed."""
    path = checkpoints.folder_of(run, step) / checkpoints.MANIFEST
    change(manifest := json.loads(path.read_text()))
    write_json(path, manifest)
    digest = checkpoints.manifest_hash(run, step)
    ledger.append(run / ledger.FILE_NAME, "commit", attempt=1, step=step, manifest=digest)


def assert_same_run(left, right, step=6):
    mine, others = weights_of(left, step), weights_of(right, step)
    assert all(mine[name].equal(others[name]) for name in others)
    kept = [metrics.surviving(lines_of(run / metrics.METRICS)) for run in (left, right)]
    of_machine = {"attempt", "seconds", "data_seconds", "tokens_per_second", "memory_bytes"}
    of_machine |= {"slowest_rank", "slowest_rank_seconds", "other_ranks_seconds"}
    mine, others = (
        [{name: line[name] for name in line.keys() - of_machine} for line in lines]
        for lines in kept
    )
    assert mine == others


# --- how it ends and resumes ---------------------------------------------------------------------


def ask_to_stop(after):
    """Replace what the loop asks its supervisor: a request comes during an update."""
    from pretrain.train.client import SupervisorClient

    verdict = SupervisorClient.verdict

    def ask(self, record):
        if record.step + 1 == after:
            control.request_stop(self._run, self._token)
        return verdict(self, record)

    SupervisorClient.verdict = ask


def leaving_after(step, seen):
    """The attempt is asked to stop during an update; what the detector sees is recorded."""

    def sabotage(rank):
        from pretrain.spikes.live import SpikeWatch

        watch = SpikeWatch._judge

        def note(self, record):
            with seen.open("a") as file:
                file.write(f"{record!r}\n")
            return watch(self, record)

        SpikeWatch._judge = note
        ask_to_stop(step)

    return sabotage


def test_an_evaluation_that_a_stop_left_out_is_done_on_resume(attempt, tmp_path):
    """Stopping and going on leaves the same losses, to readers and to the detector."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    noted = tmp_path / "noted-straight", tmp_path / "noted-stopped"
    phases = "phases=[{steps: 4}, {data: {sequence_length: 32}}]"  # which validates on other blocks
    assert attempt(straight, phases, sabotage=leaving_after(None, noted[0]))[0][0] == 0
    code, _, _ = attempt(stopped, phases, sabotage=leaving_after(3, noted[1]))[0]
    assert code == EXIT_PREEMPTED
    assert lines_of(stopped / metrics.VALIDATION) == []
    assert attempt(stopped, phases, sabotage=leaving_after(None, noted[1]))[0][0] == 0
    assert [record["step"] for record in records(stopped, "attempt")] == [0, 3]
    assert committed(stopped) == [2, 4, 6], "one of a stop is kept only while it is the newest"
    measured = [lines_of(run / metrics.VALIDATION) for run in (straight, stopped)]
    assert [line["step"] for line in measured[1]] == [3, 4, 4, 6]
    for line in sum(measured, []):
        del line["attempt"]
    assert measured[1] == measured[0]
    assert noted[1].read_text() == noted[0].read_text()
    loss = measured[0][0]["loss"]
    assert noted[1].read_text().splitlines()[3].startswith(f"Evaluation(updates=3, loss={loss},")
    assert_same_run(stopped, straight)


def broken_evaluations(*steps, stop_after=None):
    """The validation loss is not finite after so many updates."""

    def sabotage(rank):
        from pretrain.train.attempt import Attempt
        from pretrain.train.data_pipeline import DataPipeline

        evaluate, scores, now = Attempt._evaluate, DataPipeline.scores, []

        def noted(self, step):
            now[:] = [step]
            return evaluate(self, step)

        def broken(self, sums):
            record = scores(self, sums)
            if now[0] in steps:
                record["total"]["loss"] = math.nan
            return record

        Attempt._evaluate, DataPipeline.scores = noted, broken
        ask_to_stop(stop_after)

    return sabotage


OFTEN = ["training.evaluation_interval=2"]


def found_live(run):
    """What the detector found, from the ledger; it is what a replay of the run finds."""
    found = [
        (r["kind"], r["channel"], r["step"], r["onset"])
        for r in records(run)
        if r["kind"] in ("suspect", "healed", "spike")
    ]
    detector = SpikeDetector(load(str(run / "run.yaml")).spike)
    events = [event for seen in read_curve(run) for event in detector.update(seen)]
    assert [(e.kind, e.channel, e.step, e.onset) for e in events] == found
    return found


def test_a_spike_that_the_last_evaluation_confirms_is_rolled_back(attempt, tmp_path):
    """Like any other: the run is not done, and what it ended with is not saved.

    The launcher ends all ranks with the first that ends: rank 0 ends its trackers before.
    """
    closed = tmp_path / "closed"

    def sabotage(rank):
        from pretrain.train.attempt import Attempt
        from pretrain.train.log import RunLog

        def close(self):
            time.sleep(0.5)
            closed.touch()

        def run(self):
            code = attempt_run(self)
            assert closed.exists()
            return code

        broken_evaluations(4, 6)(rank)
        attempt_run, Attempt.run = Attempt.run, run
        if rank == 0:
            RunLog.close = close

    answers = attempt(tmp_path, *OFTEN, sabotage=sabotage)
    assert [code for code, _, _ in answers] == [EXIT_SPIKE] * 2
    suspect, spike = found_live(tmp_path)
    assert (suspect, spike) == (("suspect", "validation", 3, 2), ("spike", "validation", 5, 2))
    assert committed(tmp_path) == [2, 4]
    assert records(tmp_path, "done") == []
    config = load(str(tmp_path / "run.yaml"))
    rollback = policy.answer_to_spike(records(tmp_path), config)
    assert rollback.step == 2


def test_a_last_evaluation_that_only_suspects_is_told_where_the_run_ends(attempt, tmp_path, capsys):
    run = tmp_path / "run"
    answer, *_ = attempt(run, *OFTEN, ranks=1, sabotage=broken_evaluations(6))
    assert answer[0] == EXIT_DONE
    assert found_live(run) == [("suspect", "validation", 5, 4)]
    (done,) = records(run, "done")
    assert done["suspected_since"] == 4
    said = "under suspicion of a loss spike since step 4"
    assert f"finished: 6 of 6 steps in 1 attempt, {said}" in status.describe_run(status.view(run))
    assert pretrain(["export", str(run), "--output", str(tmp_path / "model")]) == 0
    told = capsys.readouterr().out
    assert "after 4 steps" in told
    assert f"not of step 6, the newest: the run is {said}" in told
    assert "--step 6" in told


def test_an_evaluation_that_a_stop_left_out_is_judged_before_the_next_step(attempt, tmp_path):
    broken = broken_evaluations(2, 4, stop_after=4)
    assert attempt(tmp_path, *OFTEN, ranks=1, sabotage=broken)[0][0] == EXIT_PREEMPTED
    assert attempt(tmp_path, *OFTEN, ranks=1, sabotage=broken)[0][0] == EXIT_SPIKE
    lines = lines_of(tmp_path / metrics.METRICS)
    assert [line["step"] for line in lines] == list(range(4))
    assert found_live(tmp_path)[-1] == ("spike", "validation", 3, 0)


# --- what it writes ------------------------------------------------------------------------------


def test_a_checkpoint_describes_itself_without_its_run(straight):
    manifest = checkpoints.read_manifest(checkpoints.folder_of(straight, 4))
    assert manifest["step"] == 4
    assert manifest["ranks"] == 2
    (segment,) = manifest["lineage"]
    assert segment[:3] == [0, 1, 0]
    assert manifest["recipe"]["model"]["variant"] == "zero-clap"
    assert manifest["architecture"]["position"] == "alibi"
    assert manifest["corpus"]["vocab_size"] == 400
    assert manifest["environment"]["versions"]["deepspeed"]
    line = lines_of(straight / metrics.METRICS)[4]
    assert manifest["position"]["blocks"] == 4 * 8
    assert manifest["position"]["epoch"] == line["epoch"]
    assert manifest["position"]["learning_rate"] == line["learning_rate"]


def test_its_checkpoints_are_as_many_and_as_large_as_planned(straight):
    planned = plan.plan(load(str(straight / "run.yaml")), 2, "a100")
    folders = [*(straight / "checkpoints").glob("step-*")]
    assert len(folders) == planned.checkpoints_usual
    for folder in folders:
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert size == pytest.approx(planned.checkpoint, rel=0.1)


def test_a_finished_run_is_left_as_it_is(straight, attempt):
    before = {p: p.read_bytes() for p in straight.glob("*.*") if p.name != "train.lock"}
    answers = attempt(straight)
    assert [code for code, _, _ in answers] == [0, 0]
    assert "done already" in answers[0][1]
    assert {path: path.read_bytes() for path in before} == before


# --- a finished run is extended ------------------------------------------------------------------


def test_an_extended_run_equals_one_that_had_its_steps_from_the_start(attempt, tmp_path):
    """Also if it is killed meanwhile; without the step that it goes on from it is refused."""
    constant = "schedule.name=constant"
    longer = [constant, "training.steps=10", "--from=6"]
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert attempt(whole, *longer[:2])[0][0] == 0
    assert attempt(run, constant)[0][0] == 0
    before = records(run)
    for words, message in (
        (longer[:2], "training.steps: 6, now 10; resume it unchanged, with the recipe "),
        ([*longer, "training.seed=2"], "training.seed: 1, now 2 (the first weights, "),
        ([*longer[:2], "--from=7"], "--from 7: accepted: the step of a checkpoint"),
        ([*longer, "--from=7"], "error: --from: given twice (--from=6, --from=7)"),
    ):
        code, _, errors = attempt(run, *words, ranks=1)[0]
        assert (code, message in errors) == (2, True), errors
    assert records(run) == before
    with pytest.raises(pytest.fail.Exception, match="rank"):
        attempt(run, *longer, sabotage=failing_save(10, killed))
    assert export_checkpoint(run, tmp_path / "model")[0] == 8
    answers = attempt(run, *longer)
    assert [code for code, _, _ in answers] == [0, 0], answers
    assert [record["step"] for record in records(run, "attempt")] == [0, 6, 8]
    assert [record["step"] for record in records(run, "done")] == [6, 10]
    assert records(run, "discontinuity") == []
    assert_same_run(run, whole, 10)
    found = audit.audit(run)
    assert (found.problems, found.unchecked) == ([], [])
    assert "finished: 10 of 10 steps in 3 attempts" in status.describe_run(status.view(run))
    assert export_checkpoint(run, tmp_path / "extended")[0] == 10
    assert "done already" in attempt(run, *longer, ranks=1)[0][1]
    code, _, errors = attempt(run, constant, "training.steps=8", "--from=8", ranks=1)[0]
    assert (code, "training.steps 8 is not above --from 8" in errors) == (2, True)


# --- saves that fail -----------------------------------------------------------------------------


def failing_save(step, what, rank=1):
    """Sabotage: `what(folder)` in one rank's save of a step, before DeepSpeed's."""

    def sabotage(own):
        from pretrain.engine.engine import Engine

        save = Engine.save

        def sabotaged(self, folder):
            is_meant = own == rank and f"{step:08d}" in folder.name
            with what(folder) if is_meant else contextlib.nullcontext():
                save(self, folder)

        Engine.save = sabotaged

    return sabotage


@contextlib.contextmanager
def killed(folder):
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
    yield


def small_disk(rank):
    """Sabotage: the disk has 1 kB free."""
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=1000)


def test_a_disk_too_small_for_what_is_kept_is_refused_before_the_start(attempt, tmp_path):
    answers = attempt(tmp_path, sabotage=small_disk)
    assert [code for code, _, _ in answers] == [2, 2]
    message = answers[0][2]
    assert "4 checkpoints of " in message, "the run saves three times, and one is being written"
    assert "its disk has 0.0 MB free" in message
    assert records(tmp_path, "attempt") == []


def test_a_resumed_run_needs_as_much_as_its_last_checkpoint_took(straight, attempt, tmp_path):
    run = interrupted(straight, tmp_path / "run")
    size = checkpoints.size_of(checkpoints.read_manifest(checkpoints.folder_of(run, 4)))
    message = attempt(run, sabotage=small_disk)[0][2]
    assert f"1 checkpoint of {size / 1e6:,.1f} MB need {size / 1e6:,.1f} MB" in message


def test_metrics_are_on_disk_before_a_checkpoint_is_committed(attempt, tmp_path):
    """What a power cut at the moment of the commit would leave of them is enough for an audit."""

    def sabotage(rank):
        fsync, replace, synced = os.fsync, checkpoints._replace, {}

        def noted(descriptor):
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.suffix == ".jsonl":
                synced[path.name] = path.read_bytes()

        def kept(final, staging):
            for name, data in synced.items():
                (tmp_path / f"{final.name}-{name}").write_bytes(data)
            replace(final, staging)

        os.fsync, checkpoints._replace = noted, kept

    assert attempt(tmp_path, sabotage=sabotage)[0][0] == 0
    for step in (2, 4, 6):
        lines = lines_of(tmp_path / f"step-{step:08d}-{metrics.METRICS}")
        assert [line["step"] for line in lines] == list(range(step))
        lines = lines_of(tmp_path / f"step-{step:08d}-{metrics.VALIDATION}")
        assert [line["step"] for line in lines] == [s for s in (3, 6) if s <= step]


# --- checkpoints that were touched ---------------------------------------------------------------


def in_place_of(run, step, other):
    """Put the files of another checkpoint of a run in the place of one's."""
    folder = checkpoints.folder_of(run, step)
    shutil.copytree(checkpoints.folder_of(run, other), folder, dirs_exist_ok=True)
    return folder / checkpoints.MANIFEST


@pytest.mark.parametrize("is_other", [False, True])
def test_a_finished_run_with_a_damaged_checkpoint_is_finished_again(
    straight, attempt, tmp_path, is_other
):
    run = shutil.copytree(straight, tmp_path / "run")
    path = in_place_of(run, 6, other=4) if is_other else touch(run, 6)
    with pytest.raises(ValueError, match=r"its hash differs; `zeroclap supervise` with"):
        export_checkpoint(run, tmp_path / "model")
    answers = attempt(run)
    assert [code for code, _, _ in answers] == [0, 0]
    assert f"its steps are done again: {path}" in answers[0][1]
    kinds = [record["kind"] for record in records(run)]
    assert kinds[-4:] == ["reject", "attempt", "commit", "done"]
    assert records(run, "reject")[0]["step"] == 6
    assert records(run, "discontinuity") == []
    assert_same_run(run, straight)
    assert audit.audit(run).problems == []


def test_a_run_resumes_from_an_older_checkpoint_than_one_that_is_not_its_own(
    straight, attempt, tmp_path
):
    run = interrupted(straight, tmp_path / "run")
    path = in_place_of(run, 4, other=2)
    output = attempt(run)[0][1]
    assert f"checkpoint of step 4 rejected: {path}: is not what was committed" in output
    assert_same_run(run, straight)


def test_a_checkpoint_that_cannot_be_read_is_passed_over_and_its_files_stay(
    straight, attempt, tmp_path
):
    run = interrupted(straight, tmp_path / "run")
    unreadable, seen = checkpoints.folder_of(run, 4), tmp_path / "seen"

    def sabotage(rank):
        fingerprint, begin = checkpoints.fingerprint, setup.begin
        files._PAUSES = (0.0,)

        def fails(path):
            if path.parent == unreadable:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return fingerprint(path)

        def looked(*arguments):
            begun = begin(*arguments)
            seen.write_text(str([*unreadable.iterdir()]))
            return begun

        checkpoints.fingerprint, setup.begin = fails, looked

    answers = attempt(run, sabotage=sabotage)
    assert [code for code, _, _ in answers] == [0, 0]
    (rejected,) = records(run, "reject")
    assert (rejected["step"], "Input/output error" in rejected["reason"]) == (4, True)
    assert "mp_rank_00_model_states.pt" in seen.read_text()
    assert_same_run(run, straight)


def touch(run, step):
    path = checkpoints.folder_of(run, step) / "mp_rank_00_model_states.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def test_a_changed_weight_under_a_consistent_hash_is_noticed_in_the_loss(
    straight, attempt, tmp_path
):
    import torch

    run = interrupted(straight, tmp_path / "run")
    folder = checkpoints.folder_of(run, 4)
    path = folder / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=False)
    name = next(name for name in states["module"] if "norm" in name and "weight" in name)
    states["module"][name] *= 1.1
    torch.save(states, path)
    changed = {path.name: checkpoints.fingerprint(path)}
    recommit(run, 4, lambda found: found["files"].update(changed))
    code, output, _ = attempt(run)[0]
    assert code == 0
    assert "WARNING: the run does not continue from step 4: loss " in output
    (found,) = records(run, "discontinuity")
    assert (found["step"], found["attempt"]) == (4, 2)


def test_a_run_resumes_on_another_number_of_ranks(straight, attempt, tmp_path):
    """The batches are the same, and the losses except for the order of sums."""
    run = interrupted(straight, tmp_path / "run")
    assert attempt(run, ranks=1)[0][0] == 0
    assert records(run, "discontinuity") == []
    again, before = (metrics.surviving(lines_of(r / metrics.METRICS)) for r in (run, straight))
    for line, other in zip(again, before, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)


# --- two attempts at once ------------------------------------------------------------------------


def test_where_the_lock_does_not_hold_the_older_attempt_commits_nothing_more(attempt, tmp_path):
    """As on a network file system that forgets locks: the ledger tells who came last."""

    @contextlib.contextmanager
    def overtaken(folder):
        path = tmp_path / ledger.FILE_NAME
        other = {"attempt": 2, "token": "theirs", "step": 2, "pid": 7, "host": "elsewhere"}
        ledger.append(path, "attempt", **other, ranks=2, micro_batch_size=2, seed=1)
        yield

    def sabotage(rank):
        fcntl.flock = lambda *_: None
        failing_save(4, overtaken, rank=0)(rank)

    with files.lock(tmp_path / run_folder.LOCK, "is locked"):
        answers = attempt(tmp_path, sabotage=sabotage)
    assert [code for code, _, _ in answers] == [EXIT_FAILED] * 2
    assert "attempt 2 (process 7 on elsewhere) has begun on this run since" in answers[0][2]
    assert records(tmp_path)[-1]["token"] == "theirs"
    assert committed(tmp_path) == [2]
    assert not checkpoints.folder_of(tmp_path, 4).exists()


# --- what is refused -----------------------------------------------------------------------------


def test_a_run_of_a_later_version_is_refused_by_the_name_of_what_is_new(
    straight, attempt, tmp_path
):
    run = interrupted(straight, tmp_path / "run")
    recommit(run, 4, lambda found: found["architecture"].update(rope_theta=1e4))
    answers = attempt(run)
    assert [code for code, _, _ in answers] == [2, 2]
    assert "unknown key 'rope_theta'" in answers[0][2]
    with pytest.raises(ValueError, match=r"MANIFEST.json: .*unknown key 'rope_theta'"):
        export_checkpoint(run, tmp_path / "model", 4)


def test_an_edited_deepspeed_configuration_is_refused_before_the_checkpoint_is_loaded(
    attempt, tmp_path
):
    """The recipe has its name alone, and the engine would load other files or none."""
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    run, words = tmp_path / "run", [f"training.deepspeed={mine}"]
    assert [code for code, _, _ in attempt(run, *words)] == [0, 0]
    run = interrupted(run, tmp_path / "run-2")
    mine.write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    answers = attempt(run, *words)
    assert [code for code, _, _ in answers] == [2, 2]
    assert f"{mine} differs from that of the checkpoint of step 4: bf16.ena" in answers[0][2]
    assert len(records(run, "attempt")) == 1


def test_a_checkpoint_that_does_not_fit_the_engine_ends_every_rank_with_one_message(
    straight, attempt, tmp_path
):
    def sabotage(rank):
        from pretrain.engine.engine import Engine

        def refuse(*_):
            raise ValueError("the optimizer state has 3 parameter groups")

        Engine.load = refuse

    run = interrupted(straight, tmp_path / "run")
    answers = attempt(run, sabotage=sabotage)
    assert [code for code, _, _ in answers] == [EXIT_FAILED] * 2
    for _, _, printed in answers:  # a launcher ends the second rank before it prints
        assert "checkpoint of step 4 cannot be loaded: the optimizer state has 3 p" in printed
        assert printed.count("\n") == 1


def test_a_folder_that_is_not_a_run_is_refused_and_not_changed(recipe, tmp_path, capsys):
    mine = tmp_path / "thesis.tex"
    mine.write_text("")
    assert train.main([str(recipe.path), f"folder={tmp_path}", *SHORT]) == 2
    assert "holds thesis.tex but no ledger.jsonl" in capsys.readouterr().err
    assert train.main([str(recipe.path), f"folder={mine}", *SHORT]) == 2
    assert "thesis.tex is a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]


def test_without_a_recipe_it_prints_its_usage(capsys):
    assert train.main([]) == 2
    assert train.main(["--local_rank=0", "--help"]) == 0
    assert capsys.readouterr().out.count("usage: deepspeed") == 2


def test_a_rank_that_is_ended_while_it_hangs_shows_where_it_was(tmp_path, monkeypatch):
    from pretrain.engine import distributed

    monkeypatch.setattr(
        distributed, "adopt_launcher", lambda _: signal.raise_signal(signal.SIGTERM)
    )
    log = tmp_path / "log"
    if not (child := os.fork()):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        train.attempt(["recipe.yaml"])
        os._exit(0)
    _, status_of_child = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status_of_child) == -signal.SIGTERM
    assert " in attempt" in log.read_text()

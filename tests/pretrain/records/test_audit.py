"""The audit says what it checked, and finds what does not hold."""

import errno
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep.manifest import load_manifest
from finetune import zeroclap as command_line
from pretrain.data.order import Order
from pretrain.data.sources import algorithms, open_source
from pretrain.records import audit, ledger, metrics, proof
from pretrain.records.segments import RECIPES
from tests.pretrain.builders import commit_checkpoint, failing
from tests.pretrain.histories import TOTAL, History, random_history, spiked
from tests.pretrain.histories import recipe as recipe_of


def finished(epochs=3, **parts):
    """A run with a crash, a rollback with a skip past an epoch's end, and another one."""
    history = History(**parts)
    history.begin(steps=8)
    history.commit()
    history.train(3)  # lost to a crash
    history.begin(steps=6)
    history.spike(onset=10)
    history.roll_back(8, skip=(10, 14))
    history.begin()
    while history.sizes.first_block(history.step) < epochs * TOTAL:
        history.train(1)
    history.commit()
    history.add("done", attempt=history.attempt, step=history.step)
    return history


def problems(history):
    return history.audit().problems


def test_a_sound_run_is_sound_with_its_numbers():
    found = finished().audit()
    assert found.problems == []
    text = "\n".join(found.checked)
    assert "3 attempts" in text
    assert f"epoch 0: {TOTAL} blocks read, each once\n" in text
    assert "epoch 1: 13 blocks read, each once, 24 declared skipped" in text


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens_to_a_run_its_audit_is_sound(seed):
    assert problems(random_history(seed)) == []


@pytest.mark.parametrize("seed", range(20))
def test_findings_do_not_depend_on_how_many_steps_are_looked_up_at_once(seed, monkeypatch):
    history, draw = random_history(seed), random.Random(seed)
    for line in draw.sample(history.lines, min(len(history.lines), draw.randint(0, 2))):
        line |= draw.choice([{"blocks": "0" * 16}, {"seed": 99}, {"step": draw.randint(-3, 30)}])
    kept = [line for line in history.lines if draw.random() < 0.9]
    found = []
    for steps in (1, 2, 3, 50):
        monkeypatch.setattr(proof, "_STEPS", steps)
        found.append(proof.examine(history.records, kept))
    assert found == found[:1] * 4


TOTALS = {"web": 37, "books": 17}
WEIGHTS = [(0, [3, 1]), (10, [1, 1]), (16, [1, 4]), (20, [2, 0])]


def test_each_corpus_of_a_mixture_is_checked_by_itself():
    """Three weight changes, a crash, a rollback with a skip."""
    found = finished(totals=TOTALS, weights=WEIGHTS).audit()
    assert found.problems == found.unchecked == []
    text = "\n".join(found.checked)
    assert "web, epoch 0: 32 blocks read, each once, 5 declared skipped" in text
    assert "books, epoch 2: 17 blocks read, each once\n" in text
    skipped = [int(n) for n in re.findall(r"(\d+) declared skipped", text)]
    assert sum(skipped) == 24


def test_another_recipe_may_add_a_corpus_and_change_the_weights_from_a_step_on():
    history = finished(totals=TOTALS, weights=WEIGHTS)
    history.totals = {**TOTALS, "code": 7}
    history.segment("user", history.step, recipe_of([(0, 6)], history.totals, [(0, [1, 1, 5])]))
    history.begin(steps=2)
    found = history.audit()
    assert found.problems == []
    assert any("code, epoch 0: 7 blocks read, each once" in text for text in found.checked)


def test_a_mixture_that_repeats_a_block_is_found_though_the_metrics_agree(monkeypatch):
    right = Order.blocks

    def repeating(self, first_place, count):
        blocks, epochs = right(self, first_place, count)
        return np.where(blocks == 40, 41, blocks), epochs

    monkeypatch.setattr(Order, "blocks", repeating)
    found = problems(finished(totals=TOTALS, weights=WEIGHTS))
    assert "books, epoch 2: block 4 was read twice" in found


def test_an_epoch_that_an_order_leaves_out_is_found_though_the_metrics_agree(monkeypatch):
    right = Order.blocks

    def leaving_out(self, first_place, count):
        blocks, epochs = right(self, first_place, count)
        return blocks, np.where(epochs > 0, epochs + 1, epochs)

    monkeypatch.setattr(Order, "blocks", leaving_out)
    history = History()
    history.begin(steps=2 * TOTAL)
    assert f"epoch 1: {TOTAL} blocks were neither read nor declared skipped" in problems(history)


def test_steps_that_were_rolled_back_do_not_count_though_the_next_launch_began_no_attempt():
    history = spiked(skip=(10, 14))
    before = history.audit()
    history.add("crash", attempt=history.attempt + 1, reason="the port was in use")
    assert history.audit().checked[1:] == before.checked[1:]
    assert any(text.startswith("9 steps survive") for text in before.checked)


def test_a_rollback_is_followed_once_however_many_attempts_come_after_it(monkeypatch):
    history, followed, right = spiked(skip=(10, 14)), [], Order.rolled_back
    for _ in range(9):
        history.begin()
    monkeypatch.setattr(Order, "rolled_back", lambda *a: followed.append(a) or right(*a))
    assert problems(history) == []
    assert len(followed) == 2  # for all attempts, and for the blocks


def test_a_step_that_no_surviving_attempt_did_is_found():
    """An attempt went back to step 5 and did nothing, and the next one began at step 8."""
    history = History()
    history.begin()
    for steps in (5, 3):
        history.train(steps)
        history.commit()
    history.begin()
    history.records[-1].update(step=5, manifest="1-5")
    history.begin(steps=1)
    assert problems(history) == ["step 5 is missing from the steps that survive"]


def first(history, kind):
    return next(record for record in history.records if record["kind"] == kind)


BROKEN = {
    "attempt 1: step 3 read other blocks": lambda h: h.lines[3].update(blocks="0" * 16),
    "step 3 used seed 9, the lineage says 5": lambda h: h.lines[3].update(seed=9),
    "step 2 follows step 2": lambda h: h.lines.insert(3, dict(h.lines[2])),
    "lines of attempt 9, which the ledger does not know": lambda h: h.lines.append(
        {**h.lines[-1], "attempt": 9}
    ),
    "began at step 8, of which no committed checkpoint was left": lambda h: first(
        h, "commit"
    ).update(kind="note"),
    "loaded another checkpoint of step 8": lambda h: next(
        r for r in h.records if r["kind"] == "attempt" and r["step"]
    ).update(manifest="other"),
    "attempt 3: followed the lineage": lambda h: ledger.segments(h.records)[-1].update(
        skip=[10, 13]
    ),
    "was written by attempt 1, which was over": lambda h: h.records[-2].update(attempt=1),
    "no record of the run's creation": lambda h: h.records[0].update(kind="note"),
    "creation stands before its first attempt": lambda h: h.records[0].update(number=9),
}
"""What the auditor finds, and what brings it about."""


@pytest.mark.parametrize("found", BROKEN)
def test_whatever_is_not_as_the_rules_say_is_found(found):
    history = finished()
    BROKEN[found](history)
    assert found in problems(history)[0]


def test_a_run_that_has_not_begun_is_not_called_unsound(tmp_path):
    ledger.append(tmp_path / ledger.FILE_NAME, "crash", attempt=1, step=0, reason="no launcher")
    found = audit.audit(tmp_path, content=True)
    assert found.problems == []
    assert found.unchecked == ["which blocks were read: the run has not begun"]


@pytest.mark.parametrize("seed", ["the last", "all", *range(12)])
def test_steps_without_a_line_are_unchecked_and_named_where_they_survive(seed):
    draw = random.Random(seed)
    history = finished()
    surviving = {(line["attempt"], line["step"]) for line in metrics.surviving(history.lines)}
    lost = {"the last": history.lines[-1:], "all": history.lines}.get(
        seed, draw.sample(history.lines, draw.randint(1, len(history.lines)))
    )
    history.lines = [line for line in history.lines if line not in lost]
    found = history.audit()
    assert found.problems == []
    missing = [line["step"] for line in lost if (line["attempt"], line["step"]) in surviving]
    assert bool(found.unchecked) == bool(missing)
    for words in found.unchecked:
        assert f"{len(missing):,} of {history.step:,} steps" in words
        assert proof._ranges(sorted(missing)) in words


def test_numbers_are_shortened_to_ranges():
    assert proof._ranges([3, 7, 8, 9, 11]) == "3, 7 to 9, 11"


def after_a_launch_that_never_began(number, next_number):
    """A run whose second launch failed before its attempt began, recorded by the supervisor."""
    history = History()
    history.begin(steps=4)
    history.commit()
    history.train(2)
    history.add("crash", attempt=1, step=4, reason="rank 1 has ended")
    history.add("crash", attempt=number, step=4, reason="the launcher was killed")
    history.begin()
    history.attempt = history.records[-1]["attempt"] = next_number
    history.train(3)
    history.commit()
    return history


def test_a_launch_that_failed_before_its_attempt_began_does_no_harm():
    history = after_a_launch_that_never_began(2, 3)
    assert problems(history) == []
    assert history.audit().unchecked == []
    assert history.state.attempts == 2


def test_a_record_by_an_attempt_that_had_not_begun_is_found():
    history = after_a_launch_that_never_began(2, 3)
    next(r for r in history.records if r["kind"] == "commit")["attempt"] = 2
    assert "was written by attempt 2, which had not begun" in problems(history)[0]


def test_attempts_whose_numbers_do_not_ascend_are_found():
    found = problems(after_a_launch_that_never_began(2, 1))
    assert any("began after attempt 1, whose number is not below its own" in p for p in found)


def test_one_block_too_few_or_too_many_is_found_whichever_it_is():
    lineage = finished().order.lineages[0]
    skipped = lineage.skipped(1)
    assert len(skipped) == 24
    for block in range(TOTAL):
        counts = np.isin(range(TOTAL), skipped, invert=True).astype(np.uint8)
        counts[block] = block in skipped
        found = proof.Audit()
        proof._judge_epoch("epoch", lineage, 1, counts, True, found)
        missing = "epoch 1: 1 blocks were neither read nor declared skipped"
        read = f"epoch 1: block {block} was read, though skipped"
        assert found.problems == [read if block in skipped else missing]


def test_a_launch_that_failed_before_the_run_was_created_does_no_harm():
    history = finished()
    history.records.insert(0, {"kind": "crash", "attempt": 1, "reason": "no such file"})
    for number, record in enumerate(history.records):
        record["number"] = number
    assert problems(history) == []


def test_the_command_says_sound_or_names_the_problem(tmp_path, capsys):
    history = History()
    history.begin(steps=5)
    history.write(tmp_path / "run")
    assert command_line.main(["audit", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.endswith("sound\n")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text()
    path.write_text(lines.replace('"step": 3', '"step": 2'))
    assert command_line.main(["audit", str(tmp_path / "run")]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM   attempt 1: metrics.jsonl: step 2 follows step 2" in out
    assert out.endswith("not sound\n")
    path.write_text("".join(line for line in lines.splitlines(True) if '"step": 3' not in line))
    assert command_line.main(["audit", str(tmp_path / "run")]) == 3
    out = capsys.readouterr().out
    assert "UNCHECKED 1 of 5 steps have no line" in out
    assert out.endswith("incomplete\n")


def test_a_checkpoint_that_is_another_or_not_on_disk_is_a_problem(tmp_path, capsys):
    history = History()
    history.begin(steps=5)
    history.commit()
    history.write(tmp_path / "run")
    assert command_line.main(["audit", str(tmp_path / "run")]) == 1
    assert "checkpoint of step 5" in capsys.readouterr().out
    commit_checkpoint(tmp_path / "run", 5, lambda folder: (folder / "weights").write_bytes(b"1"))
    assert command_line.main(["audit", str(tmp_path / "run")]) == 1
    assert "step-00000005/MANIFEST.json: is not what was committed" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    ledger.append(tmp_path / "run" / ledger.FILE_NAME, "done", attempt=1, step=5)
    assert command_line.main(["audit", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "note      " in out
    assert "step-00000005: was deleted since the run's end" in out


def test_a_folder_without_a_ledger_and_a_ledger_that_was_changed_are_refused(tmp_path, capsys):
    assert command_line.main(["audit", str(tmp_path)]) == 2
    assert "has no ledger.jsonl" in capsys.readouterr().err
    history = History()
    history.begin()
    history.write(tmp_path / "run")
    path = tmp_path / "run" / ledger.FILE_NAME
    path.write_bytes(path.read_bytes().replace(b'"seed": 5', b'"seed": 6', 1))
    assert command_line.main(["audit", str(tmp_path / "run")]) == 2
    assert "line 1 does not follow" in capsys.readouterr().err


@pytest.fixture
def began(corpus, recipe, tmp_path):
    """A copy of the corpus, and `compare()`: the findings on the contents of a run that read it."""
    folder = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    segments = recipe.load(tmp_path / "run", f"data.corpus={folder}").segments
    (cut,) = algorithms(segments.sources)
    corpus = {"digest": load_manifest(folder).digest(), "cut": cut}
    open_source(segments.sources[0], "train")[0]

    def compare():
        found = proof.Audit()
        records = [{"kind": "segment", "why": "start", "corpora": [corpus]}]
        audit.compare_contents(segments, records, found)
        return found

    return SimpleNamespace(folder=folder, recorded=corpus, compare=compare)


def test_the_corpus_that_a_run_began_with_is_checked_to_be_unchanged(began):
    found = began.compare()
    assert (found.problems, found.unchecked) == ([], [])
    assert any(str(began.folder) in text for text in found.checked)


def test_shuffled_ids_and_missing_files_are_found_by_reading_the_corpus(began):
    file = began.folder / "train" / "shard-00000.bin"
    np.random.default_rng(0).permutation(np.fromfile(file, np.uint16)).tofile(file)
    (problem,) = began.compare().problems
    assert f"{file}: its sha256 is" in problem
    file.unlink()
    assert began.compare().problems == [f"{file}: no such file, but the manifest names it"]


@pytest.mark.parametrize(
    ("kept", "table"), [("train-chunked-1-64-*", "ranges"), ("train-lengths-*", "lengths")]
)
def test_another_table_of_blocks_is_found_though_its_hash_was_made_anew(kept, table, began):
    (file,) = began.folder.glob(f"blocks/{kept}/{table}.npy")
    np.save(file, np.load(file)[::-1])
    (problem,) = began.compare().problems
    assert f"the kept table {table} of the blocks of split 'train'" in problem


def test_another_corpus_or_none_is_found_and_another_algorithm_is_not_checked(began, monkeypatch):
    began.recorded["cut"] = "chunked-0"
    assert "chunked-0; this version cuts by chunked-1" in began.compare().unchecked[0]
    began.recorded["digest"] = "0" * 64
    assert "is not the corpus" in began.compare().problems[0]
    shutil.rmtree(began.folder)
    assert "no such folder" in began.compare().problems[0]
    monkeypatch.setattr(audit, "load_manifest", failing(load_manifest, [errno.EIO]))
    assert "Input/output error" in began.compare().problems[0]  # and the audit goes on


def test_a_recipe_that_was_changed_or_gives_other_batches_than_the_ledger_is_found(tmp_path):
    history = finished()
    history.write(tmp_path / "run")
    (path,) = (tmp_path / "run" / RECIPES).iterdir()
    text = path.read_text()
    for old, new in (("learning_rate: 0.0006", "learning_rate: 0.0007"), ("  corpus: ", "  # ")):
        path.write_text(text.replace(old, new))
        assert text != path.read_text()
        for content in (False, True):
            found = audit.audit(tmp_path / "run", content=content)
            assert f"{path}: was changed" in " ".join(found.problems)
    path.write_text(text)
    segments = audit.audit(tmp_path / "run").segments
    steps = [line.strip().split("  ")[0] for line in segments]
    assert steps == ["steps", "0 to 3", "3 to 6", "6 to 8", "8 to 133,082"]
    assert segments[1].endswith(" 5"), "after its seed: nothing changes at the first step"
    history.records[0]["batches"] = [[0, 2], [3, 4], [6, 5]]
    other = History()
    other.recipes, other.records = history.recipes, history.records[:1]
    other.write(tmp_path / "other")
    found = audit.audit(tmp_path / "other")
    assert found.problems == ["the recipes give other batches or weights than the ledger has"]

"""A supervised run with phases: a spike in the first, rank 0 killed in the second, two ranks."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pretrain.records import ledger, metrics

FAULT = ["fault.random_labels=[22, 34]"]
KILLED_AFTER, STEPS = 46, 56


@pytest.fixture(scope="module")
def words(recipe, corpus, other_corpus):
    """The command line of the run, without its folder."""
    corpora = {
        "a": {"path": str(corpus), "weight": 2},
        "b": {"path": str(other_corpus)},
    }
    changed = {"steps": 32, "data": {"corpora": {"b": {"weight": 3}}}}
    second = {
        "name": "decay",
        "objective": {"probability": 0.3},
        "data": {"sequence_length": 48},
        "schedule": {"name": "wsd", "warmup_steps": 0, "cooldown_steps": 16},
    }
    settings = [
        'data.corpus=""',
        f"data.corpora={json.dumps(corpora)}",
        f"training.steps={STEPS}",
        "schedule.decay_steps=40",
        "phases=" + json.dumps([{"steps": 8}, changed, second]),
        *FAULT,
    ]
    return [sys.executable, "-m", "pretrain", "supervise", str(recipe.path), *settings]


def supervised(words, run, kill=False):
    """Train a run to its end; kill rank 0 in the second phase."""
    with (run.parent / f"{run.name}.log").open("wb") as log:
        process = subprocess.Popen([*words, f"folder={run}"], stdout=log, stderr=log)
        while kill and process.poll() is None:
            lines = metrics.read_metrics(run / metrics.METRICS)
            if lines and lines[-1]["step"] >= KILLED_AFTER:
                begun = [
                    r for r in ledger.read_ledger(run / ledger.FILE_NAME) if r["kind"] == "attempt"
                ]
                os.kill(begun[-1]["pid"], signal.SIGKILL)
                break
            time.sleep(0.02)
        return process.wait(timeout=500)


def weights(run):
    from pretrain.engine.consolidated import consolidated_weights
    from pretrain.records import checkpoints

    return consolidated_weights(checkpoints.folder_of(run, STEPS))


@pytest.mark.slow
def test_a_run_killed_in_its_second_phase_ends_with_the_same_weights(words, tmp_path):
    for name, kill in (("straight", False), ("killed", True)):
        run = tmp_path / name
        assert supervised(words, run, kill) == 0, (tmp_path / f"{name}.log").read_text()
        kinds = [record["kind"] for record in ledger.read_ledger(run / ledger.FILE_NAME)]
        assert kinds.count("rollback") == 1
        assert kinds.count("crash") == kill
        rates = [line["learning_rate"] for line in metrics.read_metrics(run / metrics.METRICS)]
        assert rates[-1] < 0.15 * max(rates)
        audit = [sys.executable, "-m", "pretrain", "audit", str(run)]
        said = subprocess.run(audit, capture_output=True, text=True)
        assert said.returncode == 0, said.stdout
        assert "b@48, epoch 0" in said.stdout
    (straight, killed) = (weights(tmp_path / name) for name in ("straight", "killed"))
    assert straight.keys() == killed.keys()
    assert all((straight[name] == killed[name]).all() for name in straight)

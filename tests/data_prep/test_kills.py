import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from data_prep.manifest import ShardManifest, read_record
from data_prep.verify import verify
from tests.data_prep.conftest import content, write_pile
from tests.data_prep.test_run import ROOT

KILLS = 5
INPUTS = 4


def start(home, tokenizer_folder, output):
    """Start a prepare in its own process group."""
    options = ["--max-tokens", "4096", "--valid-fraction", "0.2", "--workers", "2"]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "data_prep", "prepare", "--tokenizer", tokenizer_folder),
            *("--input", f"{home}/*.zst", "--output", output, *options),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill(run, victim):
    """Kill the run, its youngest child, or the whole group; then wait until all have ended."""
    try:
        family = psutil.Process(run.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    try:
        if victim == "group":
            os.killpg(run.pid, signal.SIGKILL)
        elif victim == "worker" and family:
            family[-1].kill()
        else:
            run.kill()
    except (ProcessLookupError, psutil.NoSuchProcess):
        pass  # it was quicker
    run.wait(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def assert_nothing_is_torn(output):
    """Check that every shard with a manifest is complete."""
    if (output / "manifest.json").exists():
        assert list(verify(output)) == []
    for file in output.glob("shards/shard-*.json"):
        for files in read_record(ShardManifest, file).files.values():
            assert (output / f"{files.stem}.bin").stat().st_size == files.size_bytes


@pytest.mark.slow
def test_run_killed_at_any_moment_continues_and_gives_the_same_bytes(tokenizer_folder, tmp_path):
    generator = np.random.default_rng(0)
    for number in range(INPUTS):
        words = generator.integers(0, 10**9, size=(40, 300))
        texts = [" ".join(map(str, row)) for row in words]
        texts += ["", "word " * 5000]
        write_pile(tmp_path / f"{number}.jsonl.zst", texts)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    started = time.monotonic()
    assert start(tmp_path, tokenizer_folder, whole).wait(timeout=120) == 0
    whole_seconds = time.monotonic() - started
    expected = content(whole)
    moments = random.Random(0)
    caught = 0
    for _ in range(KILLS):
        run = start(tmp_path, tokenizer_folder, killed)
        time.sleep(moments.uniform(0.3, 1.0) * whole_seconds)
        caught += run.poll() is None
        kill(run, moments.choice(["run", "worker", "group"]))
        assert_nothing_is_torn(killed)
        if (killed / "manifest.json").exists():
            assert content(killed) == expected
            # Remove a file of a finished corpus.
            (killed / "manifest.json").unlink()
            (killed / "train" / f"shard-0000{moments.randrange(INPUTS)}.idx").unlink()
    assert caught  # some at least were in the middle
    standing = {file: file.stat().st_mtime_ns for file in killed.glob("shards/shard-*.json")}
    lost = {file for file in standing if not (killed / "train" / f"{file.stem}.idx").exists()}
    assert start(tmp_path, tokenizer_folder, killed).wait(timeout=120) == 0
    assert content(killed) == expected
    made_again = {file for file, was in standing.items() if file.stat().st_mtime_ns != was}
    assert made_again == lost

"""Batches made ahead by other processes are those that would have been made here."""

import functools
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from data_prep.common import children
from data_prep.corpus import Corpus
from pretrain.config.sections import BatchConfig
from pretrain.data.batches import segmented_batches
from pretrain.data.prefetch import prefetched
from pretrain.data.sources import SOURCES
from pretrain.loop.protocols import MicroBatch
from pretrain.objectives.base import Vocabulary
from pretrain.objectives.masked import MaskedLMConfig
from pretrain.objectives.sentence_pairs import SentencePairsConfig
from pretrain.objectives.spans import SpanCorruptionConfig
from tests.pretrain.builders import batches_of, order_of
from tests.running import wait_until

BROKEN_STEP = 40
DEADLY_STEP = 60


class Drawn:
    """Batches that say which process made them, and leave a file for each step."""

    def __init__(self, folder):
        self.folder = folder

    def micro_batches(self, step, rank, ranks):
        if step == BROKEN_STEP:
            raise ValueError(f"document {step} is damaged")
        if step == DEADLY_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / str(step)).touch()
        draw = np.random.default_rng([step, rank, ranks])
        return [
            MicroBatch(
                index, {"ids": draw.integers(0, 9, 5), "pid": np.array([os.getpid()])}, 5, (1,)
            )
            for index in range(rank, 4, ranks)
        ]


def content(micro_batches):
    return [(batch.index, batch.arrays["ids"].tolist()) for batch in micro_batches]


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return Drawn(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module", params=[1, 3])
def ahead(request, drawn):
    with prefetched(drawn.micro_batches, request.param) as batches:
        yield batches


def test_any_step_may_come_next_and_any_rank_and_a_worker_makes_what_the_rank_would(drawn, ahead):
    others = [(30, 0, 1), (7, 0, 1), (7, 1, 2), (8, 1, 2), (1000000, 3, 4)]
    for key in [*((step, 1, 2) for step in range(12)), *others]:
        made = ahead(*key)
        assert content(made) == content(drawn.micro_batches(*key))
        assert made[0].arrays["pid"] != os.getpid()


def test_an_exception_in_a_worker_is_raised_at_its_step_with_its_traceback(ahead):
    assert ahead(BROKEN_STEP - 1, 0, 1)
    with pytest.raises(ValueError, match="document 40 is damaged") as caught:
        ahead(BROKEN_STEP, 0, 1)
    assert "in micro_batches" in str(caught.value.__cause__)
    assert ahead(BROKEN_STEP + 1, 0, 1)


def test_without_workers_the_batches_are_as_they_were(drawn):
    with prefetched(drawn, 0) as batches:
        assert batches is drawn


def test_as_many_steps_are_made_ahead_as_are_promised_each_by_its_phase(tmp_path):
    parts = [(end, Drawn(tmp_path / str(end)).micro_batches) for end in (7, 20)]
    for end, _ in parts:
        (tmp_path / str(end)).mkdir()

    def made():
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))

    with prefetched(functools.partial(segmented_batches, parts), 1) as batches:
        batches(5, 0, 1)
        wait_until(lambda: len(made()) >= 3)
        batches(6, 0, 1)
        wait_until(lambda: len(made()) >= 4)
        time.sleep(0.1)
    assert made() == ["20/7", "20/8", "7/5", "7/6"]


def test_no_worker_outlives_the_context(drawn):
    with prefetched(drawn.micro_batches, 1) as batches:
        (worker,) = {int(batch.arrays["pid"][0]) for batch in batches(8, 0, 1)}
    assert not psutil.pid_exists(worker)


def test_a_worker_that_is_killed_ends_the_attempt_rather_than_hang_it(tmp_path):
    with prefetched(Drawn(tmp_path).micro_batches, 1) as batches:  # noqa: SIM117
        with pytest.raises(RuntimeError, match="terminated abruptly"):
            batches(DEADLY_STEP, 0, 1)


RANK = """
import sys, time
from pathlib import Path
from pretrain.data.prefetch import prefetched
sys.path.insert(0, {tests!r})
from test_prefetch import Drawn
if __name__ == "__main__":
    with prefetched(Drawn(Path({folder!r})).micro_batches, 2) as batches:
        batches(0, 0, 1)
        print("ready", flush=True)
        time.sleep(60)
"""


def test_workers_end_when_their_rank_is_killed(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=children.environment(),
    ) as rank:
        assert rank.stdout.readline() == "ready\n"
        started = psutil.Process(rank.pid).children(recursive=True)
        assert len(started) >= 2
        rank.kill()
    wait_until(lambda: not any(alive(child) for child in started))


@pytest.mark.parametrize(
    ("packing", "settings"),
    [
        *((name, MaskedLMConfig()) for name, packing in SOURCES.items() if not packing.pairs),
        ("sentence-pairs", SentencePairsConfig(pair_task="nsp")),
        ("one-document", SpanCorruptionConfig()),
    ],
)
def test_a_run_s_batches_survive_the_way_to_a_worker(packing, settings, corpus_for):
    folder = corpus_for(packing)
    blocks = SOURCES[packing](Corpus(folder, "train"), 64)
    size = blocks.corpus.manifest.vocab_size
    objective = settings.build(Vocabulary(size, size, folder))
    order = order_of(len(blocks)).rolled_back(17, 3, (17, 30))
    batches = batches_of(blocks, objective, BatchConfig(8, 2), order)
    # Their tables, which are read anew, do not travel.
    assert len(pickle.dumps(blocks)) < len(pickle.dumps(blocks.corpus)) + 200
    there = pickle.loads(pickle.dumps(batches))
    for step in (0, 5):
        for here, sent in zip(
            batches.micro_batches(step, 1, 2), there.micro_batches(step, 1, 2), strict=True
        ):
            assert (here.index, here.tokens, here.targets) == (
                sent.index,
                sent.tokens,
                sent.targets,
            )
            assert all(np.array_equal(here.arrays[k], sent.arrays[k]) for k in here.arrays)

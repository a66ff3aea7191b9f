"""Fixtures that tests of several folders use; each is made once per process."""

import contextlib
import io
import json
import os
import random
import resource
import warnings
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest

from data_prep.engines import ENGINES
from finetune.zeroclap import main
from tests.data_prep.conftest import run_here
from tests.finetune.conftest import make_model, sentence, write_cola, write_tsv

RECIPE = """
data: {{corpus: "{corpus}", sequence_length: 64}}
model: {{size: tiny, variant: zero-clap, overrides: {{dropout: 0.1}}}}
batch: {{global_batch_size: 8, micro_batch_size: 2}}
optimizer: {{learning_rate: 3e-3, gradient_clipping: 1.0}}
schedule: {{warmup_steps: 4, minimum_learning_rate: 3e-4}}
training: {{steps: 40, deepspeed: zero1_fp32, evaluation_interval: 20,
  evaluation_blocks: 6, checkpoint_interval: 5, checkpoints_kept: 4}}
spike: {{window: 40, deviations: 2.5, patience: 2, confirm_steps: 4,
  gross_nats: 20.0, margin_steps: 4}}
supervision: {{processes_per_node: 2, max_retries: 1}}
"""


@pytest.fixture
def room():
    """`room(size)`: no file can grow beyond so many bytes, as on a disk that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Paragraphs of Python's help topics: a corpus folder of documents of at most 64 tokens."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def make_corpus(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    paragraphs = [
        " ".join(paragraph.split())
        for _, text in sorted(topics.items())[:6]
        for paragraph in text.split("\n\n")
    ]
    raw = folder / "topics.jsonl"
    raw.write_text("".join(json.dumps({"text": p}) + "\n" for p in paragraphs if len(p) > 20))
    vocabulary = ["--output", str(folder / "vocabulary")]
    data_prep(["train-tokenizer", "--input", str(raw), "--vocab-size", "400", *vocabulary])
    settings = ["--max-tokens", "64", "--valid-fraction", "0.1"]
    output = ["--output", str(folder / "made"), "--tokenizer", str(folder / "vocabulary")]
    data_prep(["prepare", "--input", str(raw), *output, *settings])
    return folder / "made"


def prepared(folder: Path, texts: Iterable[str], tokenizer: Path, *settings: str) -> Path:
    """Prepare a corpus of these documents, with this vocabulary."""
    raw = folder.with_suffix(".jsonl")
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--input", str(raw), "--output", str(folder), "--tokenizer", str(tokenizer)]
    data_prep(["prepare", *words, *settings])
    return folder


def data_prep(arguments: list[str]) -> None:
    """Run a command of data_prep, without workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "local", run_here)
        assert main(arguments) == 0


@pytest.fixture(scope="session")
def recipe(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`recipe.load(folder, *overrides)`: a tiny run of 40 steps on the corpus."""
    from pretrain.config import load as recipe
    from pretrain.config.run import RunConfig

    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(RECIPE.format(corpus=corpus))

    def load(folder: Path, *overrides: str) -> RunConfig:
        return recipe.load(str(path), [f"folder={folder}", *overrides])

    return SimpleNamespace(load=load, path=path)


@pytest.fixture(scope="session")
def train_ranks(run_ranks, recipe):
    """`train_ranks(folder, *overrides)`: exit code, output and errors of each rank, rank 0 first.

    `sabotage(rank)` is called in each rank before it starts.
    """
    from pretrain.train import __main__ as train

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What each rank would otherwise import by itself.
        import torch.utils.tensorboard.writer  # noqa: F401

        from pretrain.convert import initial_weights  # noqa: F401

    def run(folder, *overrides, ranks=2, sabotage=lambda rank: None):
        def work():
            train._SECONDS_TO_BE_ENDED = 0.0  # no launcher ends them
            sabotage(int(os.environ["RANK"]))
            output, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                code = train.main([str(recipe.path), f"folder={folder}", *overrides])
            return code, output.getvalue(), errors.getvalue()

        return run_ranks(ranks, work)

    return run


@pytest.fixture(scope="session")
def easy_glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make tasks that any model solves.

    CoLA: three in ten sentences contain "wug" and are not acceptable. RTE: a first sentence with
    "wug" does not entail the second. STS-B: 5 if the second sentence contains "wug", else 0.
    """
    folder = tmp_path_factory.mktemp("glue")
    draw = random.Random(0)

    for split, count in (("train", 160), ("dev", 50)):
        rows = [(str(int(n % 10 >= 3)), sentence(draw, int(n % 10 < 3))) for n in range(count)]
        write_cola(folder, split, rows)
        pairs = [("index", "sentence1", "sentence2", "label")]
        graded = [("index", "sentence1", "sentence2", "score")]
        for n in range(count):
            label = "not_entailment" if n % 5 < 2 else "entailment"
            pairs.append((str(n), sentence(draw, int(n % 5 < 2)), sentence(draw, 0), label))
            graded.append(
                (str(n), sentence(draw, 0), sentence(draw, 2 * (n % 2)), f"{5 * (n % 2):.3f}")
            )
        write_tsv(folder, "RTE", split, pairs)
        write_tsv(folder, "STS-B", split, graded)
    rows = [("index", "sentence"), ("0", "the old dog sees a wug"), ("1", "the old dog runs near")]
    write_tsv(folder, "CoLA", "test", rows)
    rows = [
        ("index", "sentence1", "sentence2"),
        ("0", "the small dog runs", "a wug sees the wug near"),
        ("1", "the small dog runs", "a cat sees the house near"),
    ]
    write_tsv(folder, "STS-B", "test", rows)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model folder with random weights."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "zero-clap")

"""A small model folder and a small task, shared by the tests of fine-tuning."""

import os
import random
from pathlib import Path

import pytest

WORDS = ["the", "a", "red", "old", "small", "dog", "cat", "bird", "house", "runs", "sees", "near"]


@pytest.fixture(scope="session")
def real_glue() -> Path:
    """The folder of real GLUE tasks."""
    shared = os.environ.get("ZEROCLAP_SHARED")
    if not shared:
        pytest.skip("ZEROCLAP_SHARED is not set; it names the folder that holds data/glue/")
    return Path(shared) / "data" / "glue"


def write_cola(folder: Path, split: str, rows: list[tuple[str, str]]) -> Path:
    """Write (label, sentence) rows in CoLA's layout below `folder`."""
    path = folder / "CoLA" / f"{split}.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = {"0": "*"}
    lines = (f"xx\t{label}\t{mark.get(label, '')}\t{sentence}\n" for label, sentence in rows)
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def easy_glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task that any model solves: wrong sentences hold "wug". Three in ten do."""
    folder = tmp_path_factory.mktemp("glue")
    draw = random.Random(0)
    for split, count in (("train", 160), ("dev", 50)):
        rows = []
        for number in range(count):
            words = [draw.choice(WORDS) for _ in range(draw.randrange(4, 9))]
            if number % 10 < 3:
                words[draw.randrange(len(words))] = "wug"
            rows.append(("0" if "wug" in words else "1", " ".join(words)))
        write_cola(folder, split, rows)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose weights nobody trained."""
    import torch

    from data_prep.tokenizer import train
    from pretrain import model_folder
    from pretrain.model import presets
    from pretrain.model.language_model import LanguageModel

    tokenizer = train(iter([f"{word} wug" for word in WORDS] * 20), 320)
    config = presets.build("tiny", "zero-clap", tokenizer.vocab_size, {})
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    weights = LanguageModel(config).state_dict()
    model_folder.save(folder, model_folder.ModelContents(config, weights, tokenizer, {}))
    return folder

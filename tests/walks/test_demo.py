"""The demo that `make demo` runs."""

import re
from pathlib import Path

import pytest

from pretrain.records import ledger, metrics
from tests.running import python


@pytest.mark.slow
def test_the_demo_survives_a_damaged_block_and_pretraining_helps(tmp_path: Path) -> None:
    output = tmp_path / "demo output"  # with a space, as some users have
    printed = python("-m", "finetune.zeroclap", "demo", "--output", output, folder=tmp_path)
    assert len(re.findall(r"^next: zeroclap ", printed, flags=re.MULTILINE)) == 2
    assert "python -m" not in printed
    table = dict(re.findall(r"^(\S.*?|  of .*?) {2,}(\S.*)$", printed, flags=re.MULTILINE))
    perplexity = float(table["validation perplexity, 128 tokens"])
    assert perplexity < 0.25 * float(table["  of the unigram distribution"])
    # A new seed does not cure the first spike: the second rollback skips data.
    rollbacks = ledger.segments(ledger.read_ledger(output / "run" / ledger.FILE_NAME), ledger.SPIKE)
    assert [bool(each["skip"]) for each in rollbacks] == [False, True]
    assert table["loss spikes survived"] == "2"
    lines = metrics.read_metrics(output / "run" / metrics.METRICS)
    assert sum(line["gradient_norm"] > 1000 for line in lines) == 2
    assert all(line["gradient_norm"] < 1000 for line in metrics.surviving(lines))
    accuracy = {
        name: float(table[f"word order, accuracy, {name}"])
        for name in ("pretrained weights", "random weights", "best constant answer")
    }
    assert accuracy["random weights"] > accuracy["best constant answer"]
    assert accuracy["pretrained weights"] > accuracy["random weights"] + 0.1
    assert (output / "run" / "loss.png").stat().st_size > 10_000
    assert list((output / "run" / "tensorboard").glob("events*"))

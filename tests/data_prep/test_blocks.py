import json
import os
from pathlib import Path

import numpy as np
import pytest

from data_prep.blocks import complete


def slow_complete(lengths: list[int], block_tokens: int) -> list[tuple[int, int]]:
    """The definition, a document at a time."""
    blocks = []
    first, size = 0, 1
    for index, length in enumerate(lengths):
        if size + length > block_tokens:
            if index > first:
                blocks.append((first, index))
            first, size = index, 1
        if 1 + length > block_tokens:
            first = index + 1
        else:
            size += length
    if first < len(lengths):
        blocks.append((first, len(lengths)))
    return blocks


@pytest.mark.parametrize("seed", range(30))
def test_is_what_the_definition_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.blocks._WINDOW", 1 + seed)
    generator = np.random.default_rng(seed)
    longest = int(generator.integers(1, 40))
    lengths = generator.integers(1, longest + 1, size=200).astype(np.int32)
    found = complete(lengths, block_tokens=20)
    assert [tuple(block) for block in found.tolist()] == slow_complete(lengths.tolist(), 20)
    assert found.dtype == np.int64


def test_reproduces_fairseq() -> None:
    root = os.environ.get("ZEROCLAP_SHARED")
    if not root:
        pytest.skip("ZEROCLAP_SHARED is unset: no recorded blocks of fairseq")
    golden = json.loads((Path(root) / "golden" / "data_and_lr.json").read_text())["token_blocks"]
    # Fairseq truncates to 64, so that what is longer makes a block of 64 alone, 65 with its <s>,
    # which the size filter drops.
    expected = [
        [first, last + 1]
        for first, _, last, size in golden["blocks_start_doc_offset_enddoc_size"]
        if size <= golden["block_size"]
    ]
    found = complete(np.array(golden["doc_sizes"]), golden["block_size"] + 1)
    assert found.tolist() == expected


def test_nothing_and_nothing_that_fits_give_no_blocks() -> None:
    assert complete(np.array([], dtype=np.int32), 8).shape == (0, 2)
    assert complete(np.array([8, 9, 100]), 8).shape == (0, 2)
    assert complete(np.array([7]), 8).tolist() == [[0, 1]]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="block of 1 tokens"):
        complete(np.array([1]), 1)
    with pytest.raises(ValueError, match="document 1 has 0 tokens"):
        complete(np.array([1, 0]), 8)

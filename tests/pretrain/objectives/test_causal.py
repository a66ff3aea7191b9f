"""Causal language modelling: which tokens are predicted, and where."""

import numpy as np
import pytest

from data_prep.corpus import Corpus
from pretrain.data.sources import SOURCES
from pretrain.objectives.base import Block
from pretrain.objectives.causal import CausalLM, CausalLMConfig
from pretrain.objectives.tokens import IGNORED

OBJECTIVE = CausalLM(CausalLMConfig(), 400)
LENGTH = 48


@pytest.mark.parametrize("packing", [n for n in SOURCES if not SOURCES[n].pairs])
def test_every_token_but_the_first_of_a_text_is_predicted_once_from_the_place_before(
    packing, corpus
):
    """Also where a block holds several texts: no prediction crosses their border."""
    source = SOURCES[packing](Corpus(corpus, "train"), LENGTH)
    blocks = [source[index] for index in range(len(source))]
    arrays = OBJECTIVE.collate(blocks, [(1, 0, 0)] * len(blocks), LENGTH)
    labels = arrays["labels"].reshape(len(blocks), -1)
    positions = arrays["target_positions"].reshape(len(blocks), -1)
    for row, block in enumerate(blocks):
        assert arrays["input_ids"][row, : len(block.ids)].tolist() == block.ids.tolist()
        used = labels[row] != IGNORED
        reads = positions[row][used] - row * LENGTH
        predicted = np.flatnonzero(block.ids != 0)
        assert reads.tolist() == (predicted - 1).tolist()
        assert labels[row][used].tolist() == block.ids[predicted].tolist()
        if block.document_ids is not None:
            assert np.array_equal(block.document_ids[reads], block.document_ids[predicted])
    starts = sum(int((block.ids == 0).sum()) for block in blocks)
    assert OBJECTIVE.targets(arrays) == (sum(len(block.ids) for block in blocks) - starts,)


def test_a_block_without_a_start_is_refused():
    """Its first token would have to be predicted from the place before the block."""
    with pytest.raises(ValueError, match="does not begin with <s>"):
        OBJECTIVE.collate([Block(np.array([5, 6, 7]))], [(0, 0, 0)], 4)

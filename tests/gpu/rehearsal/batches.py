"""Batches of random tokens, with the padding of a recipe's."""

import numpy as np

from pretrain.objectives.base import Block
from pretrain.plan.speed import RandomBatches


class Batches(RandomBatches):
    """Random rows that end in padding where those of whole documents do."""

    def _block(self, draw: np.random.Generator) -> Block:
        block = super()._block(draw)
        if self.config.data.packing != "complete":
            return block
        return Block(block.ids[: -draw.integers(1, len(block.ids) // 8)])

"""Documents -> blocks of at most L tokens."""

import numpy as np
import numpy.typing as npt

_WINDOW = 1 << 20  # documents handled at a time


def complete(lengths: npt.NDArray[np.integer], block_tokens: int) -> npt.NDArray[np.int64]:
    """Pack whole documents in file order, `<s>` first: fairseq's break mode "complete".

    A block takes documents while 1 (`<s>`) + their tokens <= block_tokens. A document that fits no
    block is dropped and ends the block before it. Fairseq comes to the same in two steps: a block
    of its own, too long by the prepended `<s>`, which its size filter drops.

    Time O(documents * log(documents a block)), most of it vectorised; memory bounded but for the
    result.

    Args:
        lengths: Tokens of each document, the final `</s>` included; at least 1.
        block_tokens: Most tokens of a block, its `<s>` included.

    Returns:
        int64 [blocks, 2]: the first document of each block and the one after its last.

    Raises:
        ValueError: block_tokens leaves no room for a document, or a length is below 1.
    """
    if block_tokens < 2:
        raise ValueError(f"block of {block_tokens} tokens: accepted: 2 (<s> and an id) or more")
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"document {int(lengths.argmin())} has {lengths.min()} tokens")
    budget = block_tokens - 1
    pieces = []
    first = 0
    while first < len(lengths):
        # A block holds at most `budget` documents: those that start in the window end in this
        # slice.
        sizes = lengths[first : first + _WINDOW + budget].astype(np.int64)
        blocks = _walk(_ends(sizes, budget), min(_WINDOW, len(lengths) - first))
        pieces.append(first + blocks[sizes[blocks[:, 0]] <= budget])
        first += int(blocks[-1, 1])
    return np.concatenate(pieces) if pieces else np.empty((0, 2), np.int64)


def _ends(sizes: npt.NDArray[np.int64], budget: int) -> npt.NDArray[np.int64]:
    """For each document, the end of a block that starts there; at least one document on."""
    ends = np.cumsum(sizes)
    fits = np.searchsorted(ends, ends - sizes + budget, side="right")
    return np.maximum(fits, np.arange(1, len(sizes) + 1))


def _walk(ends: npt.NDArray[np.int64], stop: int) -> npt.NDArray[np.int64]:
    """Follow the ends from document 0 to the first block that starts at `stop` or later."""
    end_of = ends.tolist()
    bounds = [0]
    while bounds[-1] < stop:
        bounds.append(end_of[bounds[-1]])
    return np.column_stack([bounds[:-1], bounds[1:]])

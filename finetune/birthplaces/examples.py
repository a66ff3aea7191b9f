"""What the model reads and predicts, printed as the assignment's `dataset.py` prints it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from finetune.birthplaces import corpus
from finetune.birthplaces.rows import AnswerObjective, encode, read_rows
from pretrain.config.load import load
from pretrain.objectives.base import Block, Vocabulary
from pretrain.objectives.tokens import IGNORED

COUNT = 4
"""Rows that are shown."""


def show(kind: str, text: Path, data: Path | None) -> None:
    """Print lines "x: ..." and "y: ..." of the first rows.

    Args:
        kind: charcorruption, documents as `pretrain` corrupts them, or namedata, rows of a file.
        text: one document per line.
        data: with namedata, a TSV file of questions and answers.

    Raises:
        ValueError: a file is not accepted.
    """
    documents, recipe = corpus.documents(text), load("birthplaces-vanilla")
    tokenizer, length = corpus.vocabulary(documents), recipe.data.sequence_length
    if kind == "charcorruption":
        size = tokenizer.vocab_size
        objective = recipe.objective.build(Vocabulary(size, size, text.parent))
        blocks = [
            Block(np.array([tokenizer.bos_id, *ids[: length - 1]], dtype=np.int64))
            for ids in tokenizer.encode_batch(documents[:COUNT])
        ]
        shown = [objective.collate([b], [(1, 0, at)], length) for at, b in enumerate(blocks)]
    elif data is None:
        raise ValueError("--finetune_corpus_path: is needed with namedata")
    else:
        answers = AnswerObjective(tokenizer.mask_id)
        rows = encode(read_rows(data)[:COUNT], tokenizer, length, data)
        shown = [answers.collate([row], length) for row in rows]
    special = {tokenizer.pad_id: "\u25a1", tokenizer.mask_id: "\u2047"}
    for arrays in shown:
        inputs = arrays["input_ids"][0]
        labels = np.full_like(inputs, tokenizer.pad_id)
        used = arrays["labels"] != IGNORED
        labels[arrays["target_positions"][used]] = arrays["labels"][used]
        for name, ids in (("x", inputs[1:]), ("y", labels[1:])):
            words = [special.get(int(id)) or tokenizer.token_text(int(id)) for id in ids]
            print(f"{name}: {''.join(words)}")

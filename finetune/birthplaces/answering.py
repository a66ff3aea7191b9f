"""Answers of a fine-tuned model, chosen greedily."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.common.files import write_atomically
from finetune.birthplaces import questions
from finetune.birthplaces.models import Choice, load, refuse_existing
from finetune.birthplaces.rows import encode
from pretrain.objectives.base import Ids

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.model.language_model import LanguageModel

MOST_CHARACTERS = 32
"""Of an answer, as in the assignment."""
_BATCH_SIZE = 256


def answers(model: LanguageModel, rows: Sequence[Ids], mask_id: int) -> list[Ids]:
    """Continue rows with the likeliest ids, up to `<mask>`; other special ids are never chosen.

    Every row is read as a whole for each id, so that it works for every model; rows that have ended
    are not read again. An answer also ends where the model's positions do.

    Args:
        model: causal, in evaluation mode, on any device.
        rows: `<s> question <mask>`, [n] each.
        mask_id: of `<mask>`.

    Returns:
        The ids of each answer, without the closing `<mask>`.
    """
    import torch

    from pretrain.objectives.tokens import FIRST_WORD_ID

    texts = [row.tolist() for row in rows]
    by_length = np.argsort([len(row) for row in rows], kind="stable")
    for start in range(0, len(rows), _BATCH_SIZE):
        batch = [texts[index] for index in by_length[start : start + _BATCH_SIZE]]
        for _ in range(MOST_CHARACTERS):
            with torch.no_grad():
                logits = _next_logits(model, batch)
            logits[:, :FIRST_WORD_ID] = -torch.inf
            chosen = logits.argmax(dim=-1).tolist()
            for row, id in zip(batch, chosen, strict=True):
                row.append(id)
            block = model.config.max_positions
            batch = [row for row in batch if row[-1] != mask_id and len(row) <= block]
            if not batch:
                break
    found = [row[len(read) :] for row, read in zip(texts, rows, strict=True)]
    return [np.array([id for id in ids if id != mask_id], dtype=np.int64) for ids in found]


def _next_logits(model: LanguageModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits of the id that follows each text, [B, V]."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from pretrain.model.embeddings import PAD_ID

    device = next(model.parameters()).device
    rows = [torch.tensor(text, device=device) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
    ends = [row * ids.shape[1] + len(text) - 1 for row, text in enumerate(texts)]
    logits: Tensor = model(ids, ids != PAD_ID, torch.tensor(ends, device=device))
    return logits


def evaluate(
    choice: Choice, text: Path, reading: Path, data: Path, output: Path, device: str | None = None
) -> str:
    """Answer the questions of a TSV file, and write the answers, one per line.

    Args:
        choice: the model.
        text: the corpus, whose characters are the vocabulary.
        reading: the model folder.
        data: TSV file of questions, with or without answers.
        output: the file to write.
        device: see `pretrain.engine.distributed.choose_device`.

    Returns:
        What to print: what was counted, and the accuracy where the file has answers.

    Raises:
        ValueError: a file or the device is not accepted, or the output exists.
    """
    from pretrain.engine.distributed import choose_device

    refuse_existing(output, is_file=True)
    read = questions.read_questions(data)
    chosen = choose_device(device)
    loaded = load(reading, choice, text)
    tokenizer, model = loaded.tokenizer, loaded.model.to(chosen)
    block = model.config.max_positions
    encoded = encode(read, tokenizer, block, with_answers=False)
    ids = answers(model, encoded.rows, tokenizer.mask_id)
    predictions = [tokenizer.decode(each.tolist()) for each in ids]
    write_atomically(output, "".join(f"{line}\n" for line in predictions).encode())
    lines = [f"{data}: {note}" for note in encoded.notes]
    lines.append(f"{output}: {len(predictions):,} predictions")
    return "\n".join([*lines, questions.score_line(questions.score(read, predictions))])

"""Answers of a fine-tuned model, chosen greedily."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from data_prep.common.files import write_atomically
from finetune.birthplaces import training
from finetune.birthplaces.rows import encode, read_rows, score
from pretrain.objectives.base import Ids

if TYPE_CHECKING:
    from pretrain.model.language_model import LanguageModel

MOST_CHARACTERS = 32
"""Of an answer, as in the assignment."""
_BATCH_SIZE = 256


def answers(model: LanguageModel, rows: Sequence[Ids], mask_id: int) -> list[list[int]]:
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
    from torch.nn.utils.rnn import pad_sequence

    from pretrain.objectives.tokens import FIRST_WORD_ID, PAD_ID

    device, block = next(model.parameters()).device, model.config.max_positions
    texts = [row.tolist() for row in rows]
    for start in range(0, len(texts), _BATCH_SIZE):
        batch = texts[start : start + _BATCH_SIZE]
        for _ in range(MOST_CHARACTERS):
            tensors = [torch.tensor(text, device=device) for text in batch]
            ids = pad_sequence(tensors, batch_first=True, padding_value=PAD_ID)
            ends = [row * ids.shape[1] + len(text) - 1 for row, text in enumerate(batch)]
            with torch.no_grad():
                logits = model(ids, ids != PAD_ID, torch.tensor(ends, device=device))
            logits[:, :FIRST_WORD_ID] = -torch.inf
            for text, id in zip(batch, logits.argmax(dim=-1).tolist(), strict=True):
                text.append(id)
            batch = [text for text in batch if text[-1] != mask_id and len(text) <= block]
            if not batch:
                break
    found = [text[len(row) :] for text, row in zip(texts, rows, strict=True)]
    return [[id for id in ids if id != mask_id] for ids in found]


def evaluate(options: argparse.Namespace) -> None:
    """Write the answers to the questions of a TSV file, one a line, and print the accuracy.

    Raises:
        ValueError: a file is not accepted, or the output exists.
    """
    from pretrain.engine.distributed import choose_device

    output, data = options.outputs_path, options.eval_corpus_path
    training.refuse_existing(output)
    rows, loaded = read_rows(data, with_answers=False), training.load(options)
    tokenizer, model = loaded.tokenizer, loaded.model.to(choose_device())
    questions = encode([row[:1] for row in rows], tokenizer, model.config.max_positions, data)
    predictions = [tokenizer.decode(ids) for ids in answers(model, questions, tokenizer.mask_id)]
    write_atomically(output, "".join(f"{line}\n" for line in predictions).encode())
    print(f"{output}: {len(predictions):,} predictions\n{score(rows, predictions)}")

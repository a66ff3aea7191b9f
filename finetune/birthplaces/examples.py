"""What the model reads and predicts, printed as the assignment's `dataset.py` prints it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.tokenizer import FILE_NAME
from finetune.birthplaces import corpus, questions
from finetune.birthplaces.models import Choice, refuse_overrides
from finetune.birthplaces.rows import AnswerObjective, encode
from pretrain.objectives.base import Block, Ids, Vocabulary
from pretrain.objectives.tokens import IGNORED, PAD_ID

if TYPE_CHECKING:
    from data_prep.tokenizer import Tokenizer
    from pretrain.loop.protocols import Arrays

PAD_SHOWN, MASK_SHOWN = "\u25a1", "\u2047"


def pretraining(
    text: Path, count: int, seed: int, epoch: int, overrides: Sequence[str] = ()
) -> list[str]:
    """Return lines "x: ..." and "y: ..." of the first documents, as `pretrain` corrupts them.

    Args:
        text: one document per line.
        count: how many documents.
        seed: of the draws.
        epoch: of the draws.
        overrides: of the recipe: objective, and length of a row.

    Raises:
        ValueError: the text or a setting is not accepted.
    """
    refuse_overrides(overrides, ["objective", "data.sequence_length"])
    recipe, documents = Choice("vanilla").config(overrides), corpus.documents(text)
    tokenizer, length = corpus.vocabulary(documents), recipe.data.sequence_length
    ids = tokenizer.encode_batch(documents[:count])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder) / FILE_NAME)
        objective = recipe.objective.build(
            Vocabulary(tokenizer.vocab_size, tokenizer.vocab_size, Path(folder))
        )
    result = []
    for index, document in enumerate(ids):
        block = Block(np.array([tokenizer.bos_id, *document[: length - 1]], dtype=np.int64))
        result += _shown(objective.collate([block], [(seed, epoch, index)], length), tokenizer)
    return result


def finetuning(text: Path, data: Path, count: int) -> list[str]:
    """Return lines "x: ..." and "y: ..." of the first rows of a TSV file, and what was counted."""
    tokenizer = corpus.vocabulary(corpus.documents(text))
    length = Choice("vanilla").config().data.sequence_length
    read = questions.read_questions(data, with_answers=True)
    objective = AnswerObjective(tokenizer.mask_id)
    encoded = encode(read, tokenizer, length, with_answers=True)
    result = []
    for row in encoded.rows[:count]:
        result += _shown(objective.collate([row], length), tokenizer)
    return [*result, *(f"{data}: {note}" for note in encoded.notes)]


def _shown(arrays: Arrays, tokenizer: Tokenizer) -> list[str]:
    """What follows `<s>` in a batch of one row, and what is predicted at each place."""
    inputs = arrays["input_ids"][0]
    labels = np.full_like(inputs, PAD_ID)
    used = arrays["labels"] != IGNORED
    labels[arrays["target_positions"][used]] = arrays["labels"][used]
    return [f"x: {_text(inputs[1:], tokenizer)}", f"y: {_text(labels[1:], tokenizer)}"]


def _text(ids: Ids, tokenizer: Tokenizer) -> str:
    special = {tokenizer.pad_id: PAD_SHOWN, tokenizer.mask_id: MASK_SHOWN}
    return "".join(special.get(int(id), "") or tokenizer.token_text(int(id)) for id in ids)

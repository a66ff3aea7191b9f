"""The most likely fillers of `<mask>` in a text."""

from __future__ import annotations

import dataclasses

import torch

from data_prep.tokenizer import Tokenizer
from pretrain.model.language_model import LanguageModel

MASK = "<mask>"


@dataclasses.dataclass(frozen=True)
class Filler:
    """One candidate for one mask."""

    text: str
    """The whole text with the mask filled (other masks left)."""
    probability: float
    token: str
    """The filler itself, its leading space included."""


def fill_mask(
    model: LanguageModel, tokenizer: Tokenizer, text: str, top_k: int = 5
) -> list[list[Filler]]:
    """Fillers of each mask, the most likely first.

    A space before `<mask>` belongs to the filler, as in the vocabulary's own words (" Beijing").

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        text: holds `<mask>` at least once.
        top_k: how many a mask.

    Raises:
        ValueError: there is no mask in the text, or top_k is not between 1 and the vocabulary.
    """
    pieces = text.split(MASK)
    if len(pieces) < 2:
        raise ValueError(f"{text!r} holds no {MASK}; put one where a word is to be found")
    if not 1 <= top_k <= model.config.vocab_size:
        raise ValueError(f"top_k: {top_k} is not between 1 and {model.config.vocab_size}")
    stripped = [piece.rstrip(" ") for piece in pieces[:-1]] + [pieces[-1]]
    ids = [tokenizer.bos_id]
    for number, encoded in enumerate(tokenizer.encode_batch(stripped)):
        if number:
            ids.append(tokenizer.mask_id)
        ids.extend(encoded.tolist())
    ids.append(tokenizer.eos_id)
    places = [place for place, token in enumerate(ids) if token == tokenizer.mask_id]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), None, torch.tensor(places))
    top = logits.float().softmax(dim=-1).topk(top_k)
    result = []
    for mask, (probabilities, tokens) in enumerate(
        zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ):
        fillers = []
        for probability, token in zip(probabilities, tokens, strict=True):
            word = tokenizer.token_text(token)
            # The text keeps its own space unless the filler brings one.
            before = stripped[mask] if word.startswith(" ") else pieces[mask]
            filled = MASK.join([*pieces[:mask], before]) + word + MASK.join(pieces[mask + 1 :])
            fillers.append(Filler(filled, probability, word))
        result.append(fillers)
    return result

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
    """The whole text with this mask filled and the others left, as the model reads it."""
    probability: float
    token: str
    """The filler itself, its leading space included where it has one."""


def fill_mask(
    model: LanguageModel, tokenizer: Tokenizer, text: str, top_k: int = 5
) -> list[list[Filler]]:
    """Fillers of each mask, the most likely first.

    The space before `<mask>` is the filler's to bring, as in the vocabulary's own words
    (" Beijing"): the model reads "China is<mask>.", and a filler without a space joins the word
    before it. The ids are the original's for a sentence with a mask in it. They differ where the
    original drops other white space, before a mask and at the text's end: here one space is the
    filler's, and what else there is stands in the text as it would in a document.

    Args:
        model: in evaluation mode, on any device.
        tokenizer: the model's.
        text: holds `<mask>` at least once; all else is plain text.
        top_k: how many a mask.

    Raises:
        ValueError: there is no mask in the text, or top_k is not between 1 and the vocabulary.
    """
    pieces = text.split(MASK)
    if len(pieces) < 2:
        raise ValueError(f"{text!r} holds no {MASK}; put one where a word is to be found")
    if not 1 <= top_k <= model.config.vocab_size:
        raise ValueError(f"top_k: {top_k} is not between 1 and {model.config.vocab_size}")
    read = [piece.removesuffix(" ") for piece in pieces[:-1]] + pieces[-1:]
    ids = [tokenizer.bos_id]
    places = []
    for number, encoded in enumerate(tokenizer.encode_batch(read)):
        if number:
            places.append(len(ids))
            ids.append(tokenizer.mask_id)
        ids.extend(encoded.tolist())
    ids.append(tokenizer.eos_id)
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = model(
            torch.tensor([ids], device=device), None, torch.tensor(places, device=device)
        )
    top = logits.float().softmax(dim=-1).topk(top_k)
    result = []
    for mask, (probabilities, tokens) in enumerate(
        zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ):
        before = MASK.join([*pieces[:mask], read[mask]])
        after = MASK.join(pieces[mask + 1 :])
        words = [tokenizer.token_text(token) for token in tokens]
        result.append(
            [
                Filler(before + word + after, probability, word)
                for word, probability in zip(words, probabilities, strict=True)
            ]
        )
    return result

"""The most likely tokens for each `<mask>` in a text."""

from __future__ import annotations

import dataclasses

import torch

from data_prep.tokenizer import Tokenizer
from pretrain.model.language_model import LanguageModel

MASK = "<mask>"


@dataclasses.dataclass(frozen=True)
class Filler:
    """One candidate token for one mask."""

    text: str
    """The whole text as the model reads it, with this mask filled and the others left."""
    probability: float
    token: str
    """The token itself, including its leading space if it has one."""


def fill_mask(
    model: LanguageModel, tokenizer: Tokenizer, text: str, top_k: int = 5
) -> list[list[Filler]]:
    """Return the fillers of each mask, most likely first.

    One space before `<mask>` belongs to the filler, as in the vocabulary's own tokens (" Beijing"):
    the model reads "China is<mask>.", and a filler without a space joins the word before it. The
    ids of a sentence with a mask are those of EIFY/fairseq, except that fairseq also drops other
    white space before a mask and at the end of the text, which is kept here. With a unigram
    vocabulary the text after a mask begins a new word, as it does in transformers.

    Args:
        model: the model, in evaluation mode, on any device.
        tokenizer: the model's tokenizer.
        text: contains `<mask>` at least once; everything else is plain text.
        top_k: number of fillers per mask.

    Raises:
        ValueError: the model is causal, there is no mask in the text, or top_k is not between 1 and
            the vocabulary size.
    """
    if model.config.causal:
        raise ValueError("the model is causal: it does not see what follows a mask")
    pieces = text.split(MASK)
    if len(pieces) < 2:
        raise ValueError(f"{text!r} has no {MASK}; write one in place of a word")
    if not 1 <= top_k <= model.config.vocab_size:
        raise ValueError(f"top_k {top_k}: accepted: 1 to {model.config.vocab_size}")
    read = [piece.removesuffix(" ") for piece in pieces[:-1]] + pieces[-1:]
    first, *others = (ids.tolist() for ids in tokenizer.encode_batch(read))
    ids, positions = [tokenizer.bos_id, *first], []
    for other in others:
        positions.append(len(ids))
        ids += [tokenizer.mask_id, *other]
    ids.append(tokenizer.eos_id)
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = model(
            torch.tensor([ids], device=device), None, torch.tensor(positions, device=device)
        )
    top = logits.float().softmax(dim=-1).topk(top_k)
    result = []
    for mask, candidates in enumerate(zip(top.indices.tolist(), top.values.tolist(), strict=True)):
        before = MASK.join([*pieces[:mask], read[mask]])
        after = MASK.join(pieces[mask + 1 :])
        fillers = []
        for id, probability in zip(*candidates, strict=True):
            token = tokenizer.token_text(id)
            fillers.append(Filler(before + token + after, probability, token))
        result.append(fillers)
    return result

"""Texts that a causal model continues, token by token."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data_prep.tokenizer import Tokenizer
from pretrain.model.cache import KeyValueCache
from pretrain.model.checks import check_value
from pretrain.model.embeddings import PAD_ID
from pretrain.model.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """How the next token is chosen, and how often.

    At temperature 0 the most likely token is taken. At others it is drawn from softmax(logits /
    temperature), of which `top_k` and then `top_p` remove the less likely tokens.
    """

    max_tokens: int = 100
    """Most tokens after the prompt; a text may end earlier, with `</s>`."""
    temperature: float = 0.0
    top_k: int | None = None
    """Draw from so many of the most likely tokens (Fan et al. 2018); None: from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that have this probability together (Holtzman et al. 2020)."""
    seed: int = 1
    """Of the draws: the same seed gives the same text."""

    def __post_init__(self) -> None:
        """Refuse values that are not accepted."""
        is_drawn = self.temperature > 0
        for name, holds, accepted in (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (the most likely token) or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "1 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", 0 <= self.seed < 2**63, "from 0 to below 2^63"),
            ("top_k", self.top_k is None or is_drawn, "left out at temperature 0"),
            ("top_p", self.top_p == 1 or is_drawn, "left out at temperature 0"),
        ):
            check_value(name, getattr(self, name), holds, accepted)


def generate(
    model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], settings: GenerationSettings
) -> list[str]:
    """Continue prompts in one batch.

    Args:
        model: causal, in evaluation mode, on any device.
        tokenizer: the model's tokenizer.
        prompts: plain text; "" begins a new text.
        settings: of all prompts.

    Returns:
        What follows each prompt. At temperature 0 it does not depend on the other prompts, up to
        the rounding of the logits.

    Raises:
        ValueError: the model is not causal, there is no prompt, or one is too long.
    """
    rows = zip(*next_tokens(model, tokenizer, prompts, settings), strict=True)
    return [
        tokenizer.decode(list(itertools.takewhile(lambda id: id != tokenizer.eos_id, row)))
        for row in rows
    ]


def stream(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, settings: GenerationSettings
) -> Iterator[str]:
    """Yield what `generate` returns for one prompt, as soon as whole characters are there."""
    ids: list[int] = []
    written = text = ""
    for (id,) in next_tokens(model, tokenizer, [prompt], settings):
        ids += [id] if id != tokenizer.eos_id else []
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # part of a character
            yield text[len(written) :]
            written = text
    yield text[len(written) :]


@torch.no_grad()
def next_tokens(
    model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], settings: GenerationSettings
) -> Iterator[list[int]]:
    """Yield the next token of every prompt, until all texts have ended; arguments as of `generate`.

    A model reads `<s>` and the prompt. `</s>` ends a text, and is repeated while others go on. The
    other special tokens are never chosen, because no text has them, although a model of span
    corruption predicts `<mask>` at a gap and at the end.
    """
    ids = [[tokenizer.bos_id, *encoded.tolist()] for encoded in tokenizer.encode_batch(prompts)]
    _refuse(model, ids, settings)
    length = max(map(len, ids))
    # On the left, so that the next token of every row has the same place.
    padded = [[tokenizer.pad_id] * (length - len(row)) + row for row in ids]
    device = next(model.parameters()).device
    read = torch.tensor(padded, device=device)
    document_ids = (read != tokenizer.pad_id).int()
    is_done = torch.zeros(len(ids), dtype=torch.bool)
    never = (tokenizer.bos_id, tokenizer.pad_id, tokenizer.unk_id, tokenizer.mask_id)
    cache = KeyValueCache(model.config.num_layers)
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.max_tokens):
        if model.config.latents:
            logits = next_logits(model, ids).cpu()
        else:
            last = torch.arange(1, len(ids) + 1, device=device) * read.shape[1] - 1
            logits = model(read, document_ids, last, cache).cpu()
        logits[:, [id for id in never if id < logits.shape[1]]] = -math.inf
        chosen = choose(logits, settings, generator).masked_fill(is_done, tokenizer.eos_id)
        yield chosen.tolist()
        is_done |= chosen == tokenizer.eos_id
        if is_done.all():
            return
        for row, id in zip(ids, chosen.tolist(), strict=True):
            row.append(id)
        read = chosen[:, None].to(device)
        document_ids = torch.cat([document_ids, document_ids.new_ones(len(ids), 1)], dim=1)


def next_logits(model: LanguageModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits of the token that follows each text, [B, V].

    The texts are read as a whole, without a cache, as models with latents have to.

    Args:
        model: causal, in evaluation mode, on any device.
        texts: ids of B texts, of any lengths, each with its `<s>`.
    """
    device = next(model.parameters()).device
    rows = [torch.tensor(text, device=device) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
    ends = [row * ids.shape[1] + len(text) - 1 for row, text in enumerate(texts)]
    logits: Tensor = model(ids, ids != PAD_ID, torch.tensor(ends, device=device))
    return logits


def choose(logits: Tensor, settings: GenerationSettings, generator: torch.Generator) -> Tensor:
    """Return the next token of every row: [B, V] to [B]."""
    if settings.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.double()
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / settings.temperature
    likely, ids = scaled.sort(dim=-1, descending=True, stable=True)
    if settings.top_k is not None:
        likely[:, settings.top_k :] = -math.inf
    probabilities = likely.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = probabilities.masked_fill(before >= settings.top_p, 0.0)
    return ids.gather(1, torch.multinomial(kept, 1, generator=generator))[:, 0]


def _refuse(model: LanguageModel, ids: Sequence[list[int]], settings: GenerationSettings) -> None:
    if not model.config.causal:
        raise ValueError(
            "the model is not causal: it needs the text on both sides (`fill-mask` fills in <mask>)"
        )
    if not ids:
        raise ValueError("there is no prompt")
    longest, limit = max(map(len, ids)), model.config.longest_input
    # The last token that is made is not read.
    if limit and longest + settings.max_tokens - 1 > limit:
        room = limit - longest + 1
        accepted = f"at most {room} for this prompt" if room > 0 else "a shorter prompt"
        raise ValueError(
            f"max_tokens: {settings.max_tokens} after a prompt of {longest} tokens with <s>; the "
            f"model's learned positions end at {limit}; accepted: {accepted}"
        )

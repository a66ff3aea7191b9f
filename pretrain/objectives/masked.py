"""Masked language modelling: which tokens are hidden, and the loss on them. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le

from data_prep import tokenizer as tokenizers
from data_prep.records import not_accepted
from pretrain.loop import Arrays, Model
from pretrain.objectives.base import Block, Ids, Key, Vocabulary, padded, padded_document_ids

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""The label of an unused target position."""
FIRST_WORD_ID = 4
"""Ids below are `<s>`, `<pad>`, `</s>` and `<unk>`: never drawn as a replacement."""
PAD_ID = 1


@dataclasses.dataclass(frozen=True)
class MaskedLMConfig:
    """How tokens are hidden (Devlin et al. 2019: 80 % `<mask>`, 10 % random, 10 % kept)."""

    name: Literal["masked-lm"] = dataclasses.field(default="masked-lm", kw_only=True)
    probability: Annotated[float, Gt(0), Le(1)] = 0.15
    """Share of the tokens that are chosen."""
    keep_probability: Annotated[float, Ge(0), Le(1)] = 0.1
    """Share of the chosen tokens that stay."""
    random_probability: Annotated[float, Ge(0), Le(1)] = 0.1
    """Share of the chosen tokens that a random token replaces; `<mask>` replaces the rest."""
    targets: Literal["masked", "all"] = "masked"
    """What is predicted: the chosen tokens, or all (with keep and random 0: self-masking)."""
    whole_words: bool = False
    """Choose words, not tokens: a word begins where a token begins with white space."""

    def __post_init__(self) -> None:
        """Refuse shares that exceed the whole."""
        share = self.keep_probability + self.random_probability
        if share > 1.0:
            name = "objective.keep_probability + random_probability"
            raise ValueError(not_accepted(name, share, "at most 1"))

    @property
    def description(self) -> str:
        """What is predicted, in a few words."""
        if self.targets == "all":
            return "all tokens predicted"
        return f"{100 * self.probability:g} % of the tokens masked"

    @property
    def target_share(self) -> float:
        """Share of a block's positions that the head computes, at most."""
        return 1.0 if self.targets == "all" else self.probability

    def for_validation(self) -> MaskedLMConfig:
        """The default masks, whatever a recipe trains with."""
        return MaskedLMConfig()

    def build(self, vocabulary: Vocabulary, *, compiled: bool = False) -> MaskedLM:
        """The objective for one vocabulary; reads the tokenizer where whole words are hidden."""
        starts = word_starts_of(tokenizers.load(vocabulary.folder)) if self.whole_words else None
        return MaskedLM(self, vocabulary.mask_id, vocabulary.embedded, starts, compiled)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedLM:
    """The objective for one vocabulary."""

    settings: MaskedLMConfig
    mask_id: int
    replacement_end: int
    """Random replacements are drawn from [FIRST_WORD_ID, replacement_end)."""
    word_starts: npt.NDArray[np.bool_] | None = None
    """Whether each id begins a word, where whole words are hidden (`word_starts_of`)."""
    compiled: bool = False
    """Let torch.compile make the loss of `loss`: no copy of the logits in fp32 on a GPU."""

    @property
    def terms(self) -> Mapping[str, float]:
        """One term."""
        return {"masked": 1.0}

    def mask(self, ids: Ids, key: Key) -> tuple[Ids, Ids]:
        """Hide some tokens of one block or document.

        Args:
            ids: [n], left unchanged.
            key: of the draw.

        Returns:
            The ids with some hidden, [n], and the sorted positions to predict, [m].
        """
        bits = np.random.Philox(np.random.SeedSequence(list(key)))
        return self.hide(ids, np.random.RandomState(bits))

    def hide(self, ids: Ids, draw: np.random.RandomState) -> tuple[Ids, Ids]:
        """Hide some tokens, as fairseq's MaskTokensDataset does, draw by draw.

        floor(probability * n + u) positions are chosen without replacement, u uniform in [0, 1);
        `<s>` and `</s>` may be among them. Of these, some keep their token, some get a random one,
        and the rest become `<mask>`. With numpy's generator in the state that fairseq gives it,
        the result is fairseq's.

        Where every token is a target, each one is hidden independently with the same probability
        (EIFY/fairseq's self-masking, which draws inside the model).

        Args:
            ids: [n], left unchanged.
            draw: the generator; legacy, because its algorithms will never change.

        Returns:
            The ids with some hidden, [n], and the sorted positions to predict, [m].
        """
        settings, length = self.settings, len(ids)
        if settings.targets == "all":
            chosen = draw.random_sample(length) < settings.probability
        else:
            # The sum may round up to the next whole number, beyond the capacity.
            wanted = int(settings.probability * length + draw.random_sample())
            chosen = self._choose(ids, min(wanted, self.capacity(length)), draw)
        result = ids.copy()
        spared = settings.keep_probability + settings.random_probability
        replaced = np.zeros(length, dtype=bool)
        if spared > 0:
            shown = chosen & (draw.random_sample(length) < spared)
            replaced = shown & (draw.random_sample(length) >= settings.keep_probability / spared)
            result[chosen & ~shown] = self.mask_id
        else:
            result[chosen] = self.mask_id
        words = draw.random_sample(int(replaced.sum())) * (self.replacement_end - FIRST_WORD_ID)
        result[replaced] = FIRST_WORD_ID + words.astype(np.int64)
        return result, np.arange(length) if settings.targets == "all" else np.flatnonzero(chosen)

    def _choose(self, ids: Ids, count: int, draw: np.random.RandomState) -> npt.NDArray[np.bool_]:
        """`count` tokens; or whole words in random order as long as they fit into `count`."""
        chosen = np.zeros(len(ids), dtype=bool)
        if self.word_starts is None:
            chosen[draw.choice(len(ids), count, replace=False)] = True
            return chosen
        starts = np.cumsum(self.word_starts[ids], dtype=np.int64)
        word = starts - starts[0]  # the first token begins a word
        order = draw.permutation(int(word[-1]) + 1)
        fits = np.cumsum(np.bincount(word)[order]) <= count
        is_chosen_word = np.zeros(len(order), dtype=bool)
        is_chosen_word[order[fits]] = True
        chosen[:] = is_chosen_word[word]
        return chosen

    def capacity(self, length: int) -> int:
        """Most positions that `mask` can ask for in a block of `length` tokens."""
        return math.ceil(self.settings.target_share * length)

    def collate(self, blocks: Sequence[Block], keys: Sequence[Key], length: int) -> Arrays:
        """One micro-batch of fixed shapes.

        Args:
            blocks: B blocks of at most `length` ids.
            keys: of each block's masking draw.
            length: T, to which blocks are padded.

        Returns:
            As `arrange`, M = B * capacity.
        """
        masked = [self.mask(block.ids, key) for block, key in zip(blocks, keys, strict=True)]
        return self.arrange(blocks, masked, length)

    def arrange(
        self, blocks: Sequence[Block], masked: Sequence[tuple[Ids, Ids]], length: int
    ) -> Arrays:
        """One micro-batch of tokens that were hidden before.

        Args:
            blocks: B blocks of at most `length` ids.
            masked: what `mask` returns, of each block.
            length: T, to which blocks are padded.

        Returns:
            input_ids [B, T]; document_ids [B, T], 0 for padding, bool where rows are one document;
            target_positions [M] in the flattened batch and labels [M], with label IGNORED at
            position 0 where unused; and subsets [M] where the blocks have them. M is B * capacity,
            or more where a part of a document has more targets than a block can have.
        """
        found = [positions for _, positions in masked]
        capacity = max(self.capacity(length), *map(len, found))
        labels = [block.ids[at] for block, at in zip(blocks, found, strict=True)]
        in_batch = [row * length + at for row, at in enumerate(found)]
        arrays: Arrays = {
            "input_ids": padded([ids for ids, _ in masked], length, PAD_ID),
            "document_ids": padded_document_ids(blocks, length),
            "target_positions": padded(in_batch, capacity, 0).ravel(),
            "labels": padded(labels, capacity, IGNORED).ravel(),
        }
        pairs = zip(blocks, found, strict=True)
        subsets = [block.subsets[at] for block, at in pairs if block.subsets is not None]
        if subsets:
            arrays["subsets"] = padded(subsets, capacity, 0).ravel()
        return arrays

    def targets(self, arrays: Arrays) -> tuple[int, ...]:
        """Number of tokens to predict."""
        return (int((arrays["labels"] != IGNORED).sum()),)

    def corrupted(self, arrays: Arrays, draw: np.random.Generator) -> Arrays:
        """The same micro-batch with random tokens as labels."""
        labels = arrays["labels"]
        noise = draw.integers(FIRST_WORD_ID, self.replacement_end, labels.shape)
        return {**arrays, "labels": np.where(labels == IGNORED, IGNORED, noise)}

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy summed over the tokens to predict, in nats, computed in fp32: [1]."""
        summed = _compiled_loss() if self.compiled else _summed_loss
        return summed(_logits(model, batch), batch["labels"]).unsqueeze(0)

    def evaluate(self, model: Model, batch: Mapping[str, Tensor], subsets: int) -> Tensor:
        """Nats, correct predictions and tokens to predict of each subset: [S, 1, 3] in fp64."""
        import torch
        from torch.nn.functional import cross_entropy

        labels, logits = batch["labels"], _logits(model, batch)
        losses = cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
        parts = (losses, logits.argmax(dim=-1) == labels, labels != IGNORED)
        columns = torch.stack([part.double() for part in parts], dim=1)
        sums = torch.zeros((subsets, 3), dtype=torch.float64, device=labels.device)
        return sums.index_add(0, batch["subsets"], columns).unsqueeze(1)


def _logits(model: Model, batch: Mapping[str, Tensor]) -> Tensor:
    return model(batch["input_ids"], batch.get("document_ids"), batch["target_positions"])


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


@functools.cache
def _compiled_loss() -> Callable[[Tensor, Tensor], Tensor]:
    import torch

    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(_summed_loss, dynamic=False)
    return compiled


def labels_by_position(batch: Mapping[str, Tensor]) -> Tensor:
    """The labels of a batch as transformers takes them: [B, T], IGNORED where there is none."""
    import torch

    labels = torch.full_like(batch["input_ids"], IGNORED)
    used = batch["labels"] != IGNORED
    labels.view(-1)[batch["target_positions"][used]] = batch["labels"][used]
    return labels


def word_starts_of(tokenizer: tokenizers.Tokenizer) -> npt.NDArray[np.bool_]:
    """Whether each id begins a word: its text begins with white space, or it is a special one."""
    return np.array(
        [
            id < FIRST_WORD_ID or id == tokenizer.mask_id or tokenizer.token_text(id)[:1].isspace()
            for id in range(tokenizer.vocab_size)
        ]
    )

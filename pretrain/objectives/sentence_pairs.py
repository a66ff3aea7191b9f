"""Masked language modelling on pairs of segments, with a second term on the pair.

- sop, sentence order (Lan et al. 2020): are two segments of a document in order, or swapped?
- nsp, next sentence (Devlin et al. 2019): does the second segment follow the first, or is it from
  another document?
- none: the segments are in order, and there is no second term.

A byte-level vocabulary keeps the white space around sentences, which is missing where a document
begins and ends: in short documents this reveals the order. A unigram vocabulary does not keep it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from data_prep.tokenizer import Tokenizer
from pretrain.loop.protocols import Arrays, Model
from pretrain.objectives.base import PAIR_SPECIAL_TOKENS, Block, Ids, Key, Vocabulary, padded
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.objectives.tokens import output_of, sums_by_subset

if TYPE_CHECKING:
    from torch import Tensor

FOLLOWS, DOES_NOT_FOLLOW = 0, 1
"""Labels of a pair."""
_PAIR_DRAWS = 1
"""Keeps the draws of a pair apart from those of its masks, which have the same key."""


@dataclasses.dataclass(frozen=True)
class SentencePairsConfig(MaskedLMConfig):
    """Predict hidden tokens, as masked-lm does, and a property of each pair of segments."""

    name: Literal["sentence-pairs"] = dataclasses.field(  # type: ignore[assignment]
        default="sentence-pairs", kw_only=True
    )
    pair_task: Literal["sop", "nsp", "none"] = "sop"
    """sop: whether the segments are swapped; nsp: whether the second is from another document;
    none: the pair head is not trained."""

    pairs: ClassVar[bool] = True

    @property
    def description(self) -> str:
        """What is predicted, in a few words."""
        task = {"sop": ", sentence order", "nsp": ", next sentence", "none": ""}[self.pair_task]
        return f"{super().description} in pairs of segments{task}"

    def for_validation(self) -> "SentencePairsConfig":
        """The default masks, whatever a recipe trains with, and the same task."""
        return SentencePairsConfig(pair_task=self.pair_task)

    def build(self, vocabulary: Vocabulary) -> "SentencePairsLM":
        """The objective for one vocabulary; reads the tokenizer where n-grams are hidden."""
        return SentencePairsLM(**vars(super().build(vocabulary)))


@dataclasses.dataclass(frozen=True, eq=False)
class SentencePairsLM(MaskedLM):
    """The objective for one vocabulary. The model has a pair head and segments.

    `<s>`, which the pair head reads, and `</s>` are never hidden, as in ALBERT.
    """

    settings: SentencePairsConfig

    hides_special = False

    @property
    def terms(self) -> Mapping[str, float]:
        """The masked tokens and the pairs, weighted the same, each over its own count."""
        task = self.settings.pair_task
        return super().terms if task == "none" else {**super().terms, task: 1.0}

    def collate(self, blocks: Sequence[Block], keys: Sequence[Key], length: int) -> Arrays:
        """One micro-batch of fixed shapes.

        Args:
            blocks: B blocks of sentences.
            keys: of each block's draws.
            length: T, to which pairs are cut and padded.

        Returns:
            As `arrange`; segment_ids [B, T], 0 for `<s> a </s>`, 1 for `b </s>`; pair_labels [B];
            and pair_subsets [B], the subset of the block's document, where blocks have them. All
            tokens of a pair count for that subset, also those of another document.
        """
        pairs = [self._pair(block, key, length) for block, key in zip(blocks, keys, strict=True)]
        laid_out, segments, labels = zip(*pairs, strict=True)
        arrays = super().collate(laid_out, keys, length)
        arrays["segment_ids"] = padded(segments, length, 0)
        arrays["pair_labels"] = np.array(labels, dtype=np.int64)
        subsets = [block.subsets[0] for block in blocks if block.subsets is not None]
        if subsets:
            arrays["pair_subsets"] = np.array(subsets, dtype=np.int64)
        return arrays

    def _pair(self, block: Block, key: Key, length: int) -> tuple[Block, Ids, int]:
        """A block as `<s> a </s> b </s>`, the segment of each id, and the label of the pair.

        The segments meet at any end of a sentence, all with the same probability: if it were, say,
        the middle one, the lengths of the segments would reveal their order.
        """
        bits = np.random.Philox(np.random.SeedSequence([*key, _PAIR_DRAWS]))
        draw = np.random.RandomState(bits)
        task = self.settings.pair_task
        assert block.sentences is not None
        ends = np.cumsum(block.sentences[:-1])
        end = ends[int(draw.random_sample() * len(ends))]
        first, second = block.ids[:end], block.ids[end:]
        changed = task != "none" and draw.random_sample() < 0.5
        if task == "nsp":
            second = _cut_second(block, second, draw, other=changed)
        elif changed:
            first, second = second, first
        first, second = _truncated(first, second, length - PAIR_SPECIAL_TOKENS, draw)
        bos, eos = [Tokenizer.bos_id], [Tokenizer.eos_id]
        ids = np.concatenate([bos, first, eos, second, eos])
        segments = (np.arange(len(ids)) > len(first) + 1).astype(np.int64)
        subsets = None if block.subsets is None else np.full(len(ids), block.subsets[0])
        return Block(ids, subsets=subsets), segments, DOES_NOT_FOLLOW if changed else FOLLOWS

    def targets(self, arrays: Arrays) -> tuple[int, ...]:
        """Number of tokens to predict, and of pairs."""
        pairs = len(arrays.get("pair_labels", ()))
        return (*super().targets(arrays), pairs)[: len(self.terms)]

    def corrupted(self, arrays: Arrays, draw: np.random.Generator) -> Arrays:
        """The same micro-batch with random labels of tokens and pairs."""
        pair_labels = draw.integers(0, 2, arrays["pair_labels"].shape)
        return {**super().corrupted(arrays, draw), "pair_labels": pair_labels}

    def loss(self, model: Model, batch: Mapping[str, "Tensor"]) -> "Tensor":
        """Cross-entropy summed over tokens and over pairs, in nats, computed in fp32: [terms].

        Without a task the pair head has the weight 0, so that every rank's backward pass reaches
        the same parameters, whatever it trains with.
        """
        import torch
        from torch.nn.functional import cross_entropy

        given = {"segment_ids": batch["segment_ids"], "labels": batch["labels"]}
        masked, pair_logits = output_of(model, batch, with_pairs=True, **given)
        pair_logits = pair_logits.float()
        if self.settings.pair_task == "none":
            return torch.stack([masked + 0.0 * pair_logits.sum()])
        pairs = cross_entropy(pair_logits, batch["pair_labels"], reduction="sum")
        return torch.stack([masked, pairs])

    def evaluate(self, model: Model, batch: Mapping[str, "Tensor"], subsets: int) -> "Tensor":
        """Nats, correct predictions and targets of each subset and term: [S, terms, 3] in fp64.

        Windows of documents (`arrange`) are single segments, without targets of the second term.
        """
        import torch

        if "pair_labels" not in batch:
            masked = super().evaluate(model, batch, subsets)
            return torch.cat([masked, torch.zeros_like(masked)], dim=1)[:, : len(self.terms)]
        given = {"segment_ids": batch["segment_ids"]}
        logits, pair_logits = output_of(model, batch, with_pairs=True, **given)
        sums = [
            sums_by_subset(logits, batch["labels"], batch["subsets"], subsets),
            sums_by_subset(pair_logits, batch["pair_labels"], batch["pair_subsets"], subsets),
        ]
        return torch.stack(sums[: len(self.terms)], dim=1)


def _cut_second(block: Block, second: Ids, draw: np.random.RandomState, *, other: bool) -> Ids:
    """The second segment, or one of another document, cut to the same number of tokens.

    The other segment begins at an end of a sentence of a block, as the second one does, and the
    rest of that block is not used. The label would be revealed if the segment of another
    document were shorter, or the only one that ends within a sentence: so the length is decided
    before the label, and either one loses 1 token to an eighth of its tokens.
    """
    assert block.sample_other_document is not None
    other_block = block.sample_other_document(draw.random_sample())
    assert other_block.sentences is not None
    ends = np.cumsum(other_block.sentences[:-1])
    enough = max(1, int(np.sum(ends <= len(other_block.ids) - len(second))))
    foreign = other_block.ids[ends[int(draw.random_sample() * enough)] :]
    size = min(len(second), len(foreign))
    size -= min(size - 1, 1 + int(draw.random_sample() * (size / 8)))
    return (foreign if other else second)[:size]


def _truncated(first: Ids, second: Ids, room: int, draw: np.random.RandomState) -> tuple[Ids, Ids]:
    """Cut the longer segment, then both, until they fit: each token from the front or the back.

    As google-research/albert does, token by token. Where both are cut, the first one may keep one
    token more, whatever the order: their lengths say nothing about it.
    """
    half = room // 2
    of_second = min(len(second), max(half, room - len(first)))
    of_first = min(len(first), room - of_second)
    return _shortened(first, of_first, draw), _shortened(second, of_second, draw)


def _shortened(ids: Ids, size: int, draw: np.random.RandomState) -> Ids:
    """`size` consecutive ids; what is cut is divided between front and back by fair coins."""
    front = draw.binomial(len(ids) - size, 0.5)
    return ids[front : front + size]

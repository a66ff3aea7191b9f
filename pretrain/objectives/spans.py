"""Span corruption for causal models: a span of a text is moved behind it.

The model reads `<s> prefix <mask> suffix <mask> span <mask>` and predicts all of it but `<s>`: the
text with a gap, the text of the gap, and its end. This is the span corruption of the assignment on
pretraining of Stanford's course CS224N (2023, assignment 5), with a last `<mask>`; Donahue et al.
2020, "Enabling Language Models to Fill in the Blanks", lay text out similarly: the text with gaps,
then what fills them.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from data_prep import tokenizer as tokenizers
from data_prep.tokenizer import Tokenizer
from pretrain.loop.protocols import Arrays
from pretrain.objectives.base import Block, Ids, Key, ObjectiveSettings, Vocabulary
from pretrain.objectives.tokens import TokenObjective

_SPECIAL_TOKENS = 4
"""`<s>` and three `<mask>`."""
_SHORTEST_TEXT = 4
"""Least length to which a text is cut."""
_MEAN_SHARE = 0.25
"""Mean share of the tokens read that the span has, as in the assignment."""
_SHORTEST_BLOCK = 25
"""Of shorter blocks, seven eighths and the special tokens do not fit."""


@dataclasses.dataclass(frozen=True)
class SpanCorruptionConfig(ObjectiveSettings):
    """Predict each token from those before it, after moving a span to the end of the text."""

    name: Literal["span-corruption"] = dataclasses.field(default="span-corruption", kw_only=True)
    truncate: bool = True
    """Read only the beginning of a text, of a random length from 4 tokens to seven eighths of the
    block, all equally likely. Otherwise read as much as fits."""
    whole_words: bool = False
    """Move whole words: the ends of the span drawn go to the nearest ends of words, without the
    white space around them. A word begins where a token begins with white space, or after a token
    of white space alone. The mean share then holds roughly."""

    causal: ClassVar[bool] = True
    one_text: ClassVar[bool] = True
    target_share = 1.0

    @property
    def description(self) -> str:
        """What is predicted, in a few words."""
        words = " in whole words" if self.whole_words else ""
        span = f"a span of {100 * _MEAN_SHARE:g} %{words}"
        return f"every token predicted, {span} moved to the end"

    def build(self, vocabulary: Vocabulary) -> "SpanCorruptionLM":
        """The objective for one vocabulary; reads the tokenizer where whole words are moved.

        Raises:
            ValueError: the model cannot predict `<mask>`.
        """
        if vocabulary.embedded < vocabulary.size:
            raise ValueError(
                f"objective {self.name} predicts <mask>, and the model has no vector for it; set "
                "model.overrides.mask_embedding=row"
            )
        words = Words.of(tokenizers.load(vocabulary.folder)) if self.whole_words else None
        return SpanCorruptionLM(self, vocabulary.mask_id, vocabulary.mask_id, words)


@dataclasses.dataclass(frozen=True, eq=False)
class Words:
    """Where words begin and end, by the ids of a vocabulary."""

    begins: npt.NDArray[np.bool_]
    """Whether the token begins with white space, [V]."""
    is_space: npt.NDArray[np.bool_]
    """Whether the token is white space alone, [V]."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Words":
        """Read the texts of all tokens."""
        texts = [tokenizer.token_text(id) for id in range(tokenizer.vocab_size)]
        begins = [text[:1].isspace() for text in texts]
        return cls(np.array(begins), np.array([text.isspace() for text in texts]))

    def nearest(self, ids: Ids, first: int, end: int) -> tuple[int, int]:
        """Move a span's ends to the nearest ends of words.

        Args:
            ids: a text, [n].
            first: of the span.
            end: of the span; its first place behind it.

        Returns:
            The nearest place where a word begins, and the nearest behind it where one ends; of
            equally near ones the earlier. Without words, the span as it was.
        """
        space = np.concatenate([[True], self.is_space[ids], [True]])
        begins = np.concatenate([self.begins[ids], [True]])
        firsts = np.flatnonzero(~space[1:-1] & (space[:-2] | begins[:-1]))
        if not len(firsts):
            return first, end
        first = int(firsts[np.abs(firsts - first).argmin()])
        ends = np.flatnonzero(~space[:-1] & (space[1:] | begins))
        ends = ends[ends > first]
        return first, int(ends[np.abs(ends - end).argmin()])


@dataclasses.dataclass(frozen=True, eq=False)
class SpanCorruptionLM(TokenObjective):
    """The objective for one vocabulary. The model must not see later tokens (`causal`).

    `evaluate --lengths` refuses this objective: targets cannot be drawn for a whole document, which
    is longer than a block.
    """

    settings: SpanCorruptionConfig
    mask_id: int
    replacement_end: int
    words: Words | None = None
    """Where words begin and end, where whole words are moved."""

    term = "next-token"

    def collate(self, blocks: Sequence[Block], keys: Sequence[Key], length: int) -> Arrays:
        """One micro-batch of fixed shapes.

        Args:
            blocks: B blocks of at most `length` ids, each one text that begins with `<s>`.
            keys: of each block's draw.
            length: T, to which blocks are padded, at least 25.

        Returns:
            As `arrange`, M = B * capacity. Every id but `<s>` is a target. Of a text of n tokens
            the number of targets depends on n and the key alone.

        Raises:
            ValueError: the blocks are too short.
        """
        if length < _SHORTEST_BLOCK:
            raise ValueError(
                f"data.sequence_length {length}: accepted with objective {self.settings.name}: "
                f"{_SHORTEST_BLOCK} or more, so that seven eighths and {_SPECIAL_TOKENS} special "
                "tokens fit"
            )
        pairs = zip(blocks, keys, strict=True)
        rows = [self.rearranged(block, key, length) for block, key in pairs]
        read = [(row.ids, np.arange(1, len(row.ids))) for row in rows]
        return self.arrange(rows, read, length)

    def rearranged(self, block: Block, key: Key, length: int) -> Block:
        """One text with its span at the end.

        Of a text of t tokens the span has x, rounded up or down at random so that the mean stays
        x. With m = t / 4, x is uniform in [1, 2 m - 1], so that its mean is m. Of a text
        so short that m < 1, x is m, and the span may be empty. With `whole_words` its ends then
        go to the nearest ends of words.

        Args:
            block: `<s>`, a text, and `</s>`, which is left out, if the text ends there.
            key: of the draw.
            length: most ids of the result, from 25.

        Returns:
            `<s> prefix <mask> suffix <mask> span <mask>`, where each part may be empty. `<mask>` is
            of the subset of `<s>`.
        """
        draw = np.random.RandomState(np.random.Philox(np.random.SeedSequence(list(key))))
        size = len(block.ids) - 1 - int(block.ids[-1] == Tokenizer.eos_id)
        longest = length - _SPECIAL_TOKENS
        if self.settings.truncate:
            longest = draw.randint(_SHORTEST_TEXT, 7 * length // 8 + 1)
        size = min(size, longest)
        mean = _MEAN_SHARE * size
        least = min(1.0, mean)
        span = int(least + 2 * (mean - least) * draw.random_sample() + draw.random_sample())
        first = draw.randint(size - span + 1)
        end = first + span
        if self.words is not None:
            first, end = self.words.nearest(block.ids[1 : size + 1], first, end)
        places = np.r_[: first + 1, 0, end + 1 : size + 1, 0, first + 1 : end + 1, 0]
        ids = block.ids[places]
        ids[1:][places[1:] == 0] = self.mask_id
        return Block(ids, subsets=None if block.subsets is None else block.subsets[places])

"""Masked language modelling: the choice of hidden tokens."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le

from data_prep import tokenizer as tokenizers
from data_prep.common.records import Whole, check_value
from pretrain.objectives.base import Ids, Key, ObjectiveSettings, Vocabulary
from pretrain.objectives.tokens import FIRST_WORD_ID, DocumentObjective


@dataclasses.dataclass(frozen=True)
class MaskedLMConfig(ObjectiveSettings):
    """Predict hidden tokens (Devlin et al. 2019: 80 % `<mask>`, 10 % random, 10 % kept)."""

    name: Literal["masked-lm"] = dataclasses.field(default="masked-lm", kw_only=True)
    probability: Annotated[float, Gt(0), Le(1)] = 0.15
    """Share of the tokens that are chosen."""
    keep_probability: Annotated[float, Ge(0), Le(1)] = 0.1
    """Share of the chosen tokens that stay."""
    random_probability: Annotated[float, Ge(0), Le(1)] = 0.1
    """Share of the chosen tokens that a random token replaces; `<mask>` replaces the rest."""
    targets: Literal["masked", "all"] = "masked"
    """What is predicted: the chosen tokens, or all (with keep and random 0: self-masking)."""
    longest_ngram: Annotated[Whole, Ge(1), Le(1000)] = 1
    """Choose runs of up to this many whole words, of n words with a probability proportional to
    1/n, and never special tokens (Lan et al. 2020, section 4.1: 3). A word begins where a token
    has anything but letters: white space, a digit, a punctuation mark. 1: choose single tokens."""

    def __post_init__(self) -> None:
        """Check the sum of the shares, and that n-grams are not combined with all targets."""
        share = self.keep_probability + self.random_probability
        name = "objective.keep_probability + random_probability"
        check_value(name, share, share <= 1.0, "at most 1")
        n, fits = self.longest_ngram, self.longest_ngram == 1 or self.targets != "all"
        check_value("objective.longest_ngram", n, fits, "1, or objective.targets=masked")

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

    def build(self, vocabulary: Vocabulary) -> "MaskedLM":
        """The objective for one vocabulary; reads the tokenizer where n-grams are hidden."""
        by_word = self.longest_ngram > 1
        word_starts = word_starts_of(tokenizers.load(vocabulary.folder)) if by_word else None
        return MaskedLM(self, vocabulary.mask_id, vocabulary.embedded, word_starts)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedLM(DocumentObjective):
    """The objective for one vocabulary."""

    settings: MaskedLMConfig
    mask_id: int
    replacement_end: int
    """Random replacements are drawn from [FIRST_WORD_ID, replacement_end)."""
    word_starts: npt.NDArray[np.bool_] | None = None
    """Whether each id begins a word, where n-grams are hidden (`word_starts_of`)."""

    term = "masked"
    hides_special: ClassVar[bool] = True
    """Whether `<s>` and `</s>` may be chosen where single tokens are."""

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
        `<s>` and `</s>` may be among them, unless a subclass spares them. Of these, some keep their
        token, some get a random one, and the rest become `<mask>`. With numpy's generator in the
        state that fairseq gives it, the result is fairseq's.

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
        shown = replaced = np.zeros(length, dtype=bool)
        if spared > 0:
            shown = chosen & (draw.random_sample(length) < spared)
            replaced = shown & (draw.random_sample(length) >= settings.keep_probability / spared)
        result[chosen & ~shown] = self.mask_id
        words = draw.random_sample(int(replaced.sum())) * (self.replacement_end - FIRST_WORD_ID)
        result[replaced] = FIRST_WORD_ID + words.astype(np.int64)
        return result, np.arange(length) if settings.targets == "all" else np.flatnonzero(chosen)

    def _choose(self, ids: Ids, count: int, draw: np.random.RandomState) -> npt.NDArray[np.bool_]:
        """`count` tokens, or n-grams as long as they fit into `count`."""
        if self.settings.longest_ngram > 1:
            return self._choose_ngrams(ids, count, draw)
        places = np.flatnonzero(self.hides_special | ~self._is_special(ids))
        chosen = np.zeros(len(ids), dtype=bool)
        chosen[draw.choice(places, min(count, len(places)), replace=False)] = True
        return chosen

    def _is_special(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return (ids < FIRST_WORD_ID) | (ids == self.mask_id)

    def _choose_ngrams(
        self, ids: Ids, count: int, draw: np.random.RandomState
    ) -> npt.NDArray[np.bool_]:
        """Runs of whole words, at most `count` tokens, none of them special.

        As in google-research/albert, but from one generator: each word in random order begins a
        run, whose number of words n has a probability proportional to 1/n. It is shortened to the
        text before the next special token, and to what is left of `count`. Runs that overlap an
        earlier one are left out.
        """
        assert self.word_starts is not None
        is_special = self._is_special(ids)
        begins = self.word_starts[ids] | is_special
        begins[:1] = True
        begins[1:] |= is_special[:-1]
        bounds = np.append(np.flatnonzero(begins), len(ids))
        words = np.flatnonzero(~is_special[bounds[:-1]])
        # After the last word of a text comes a special token, or the end.
        text_ends = np.append(np.flatnonzero(is_special[bounds[:-1]]), len(bounds) - 1)
        longest = np.arange(1, self.settings.longest_ngram + 1)
        shares = np.cumsum(1 / longest) / (1 / longest).sum()
        order = draw.permutation(words)
        sizes = 1 + np.searchsorted(shares[:-1], draw.random_sample(len(order)), side="right")
        ends = np.minimum(order + sizes, text_ends[np.searchsorted(text_ends, order)])
        taken, place = bytearray(len(bounds) - 1), bounds.tolist()
        for first, end in zip(order.tolist(), ends.tolist(), strict=True):
            if not count:
                break
            while place[end] - place[first] > count:
                end -= 1
            if any(taken[first:end]):
                continue
            taken[first:end] = b"\1" * (end - first)
            count -= place[end] - place[first]
        return np.repeat(np.frombuffer(taken, dtype=bool), np.diff(bounds))


def word_starts_of(tokenizer: tokenizers.Tokenizer) -> npt.NDArray[np.bool_]:
    """Whether each id begins a word: it is a special one, or its text has more than letters.

    google-research/albert (create_pretraining_data.py) asks for letters of ASCII. Part of a
    character (U+FFFD) counts as a letter.
    """
    texts = map(tokenizer.token_text, range(tokenizer.vocab_size))
    return np.array([not text.replace("\ufffd", "a").isalpha() for text in texts])

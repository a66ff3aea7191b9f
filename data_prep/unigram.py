"""Unigram vocabularies in the style of SentencePiece (Kudo 2018).

They are trained here; those of ALBERT, XLM-RoBERTa and CamemBERT are read.

A text is normalised and split at white space. Each word begins with "▁", which stands for the white
space before it, the first word of a text too. The model then finds the most probable pieces of a
word. How much white space there was, and of which kind, is lost.

The functions return the library's tokenizers; `data_prep.tokenizer` wraps them.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from data_prep.gpt2_vocabulary import FIRST_TOKENS, MASK_TOKEN

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

COVERAGE = 0.9995
"""Share of a text's characters that get pieces, the most frequent ones first. Others are encoded as
their UTF-8 bytes. This is the default of SentencePiece."""
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPACE = "▁"
# Runs of letters, of digits and of other characters are different pieces, as in SentencePiece with
# its default options. In particular, no text contains "<s>" or "<0x00>" as one piece.
_RUNS = rf"{_SPACE}?(?:[\p{{L}}\p{{M}}]+|\p{{N}}+|[^\p{{L}}\p{{M}}\p{{N}}]+)"
_SPECIAL_TOKEN = r"<(?=/?s>|pad>|unk>|mask>)"  # its first character
# ALBERT's special tokens, in the order of ours.
ALBERT = ("[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]")
_FREQUENT = 5  # occurrences: one more changes little
_BATCH = 10_000  # occurrences of a run handed to the trainer at once
_STEP = 1e-4  # min_score_penalty_delta of tokenizers' trainer
_DIGITS = 4  # of a score: the trainer's sums depend on the number of threads after ten or more


def train(texts: Iterable[str], vocab_size: int, *, lowercase: bool = False) -> "Backend":
    """Train a vocabulary; the same texts give the same one, whatever the number of threads.

    The ids: the first four special tokens, the 256 bytes, the pieces by score, `<mask>`.

    Args:
        texts: Documents; consumed once.
        vocab_size: Number of ids, including special tokens. Little text may give fewer.
        lowercase: Normalise as ALBERT does, to lower case without accents. Otherwise the
            normalisation is NFKC, as in SentencePiece.

    Raises:
        ValueError: The texts have no characters, or `vocab_size` is too small for the special
            tokens, the bytes and the characters.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    normalizer = _normalizer(lowercase)
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always"),
            pre_tokenizers.Split(Regex(_RUNS), behavior="isolated"),
        ]
    )
    words: Counter[str] = Counter()
    for text in texts:
        words.update(normalizer.normalize_str(text).split())
    runs: Counter[str] = Counter()
    for word, count in words.items():
        for run, _ in splitter.pre_tokenize_str(word):
            runs[run] += count
    characters = _frequent_characters(runs)
    others = len(FIRST_TOKENS) + len(_BYTES) + 1
    smallest = others + len(characters) + 1  # with fewer the trainer does not end
    if vocab_size < smallest:
        raise ValueError(
            f"vocabulary size {vocab_size}: accepted: {smallest} or more, for {others} special "
            f"tokens and bytes, and the {len(characters)} most frequent characters of these texts"
        )
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.UnigramTrainer(vocab_size=vocab_size - others, show_progress=False)
    trained.train_from_iterator(_training_text(runs, characters), trainer)
    scores: dict[str, float] = dict(content_of(trained)["model"]["vocab"])
    # The characters that it had dropped come in random order, in steps from the lowest score on.
    most = min(scores.values()) + _STEP * len(characters)
    last = {text: score for text, score in scores.items() if len(text) == 1 and score < most}
    scores |= zip(sorted(last), sorted(last.values()), strict=True)
    pieces = [(text, round(score, _DIGITS)) for text, score in scores.items()]
    pieces.sort(key=lambda piece: (-piece[1], piece[0]))
    return _build([*((byte, 0.0) for byte in _BYTES), *pieces], normalizer, splitter, True)


def renumbered(backend: "Backend") -> tuple["Backend", list[int]]:
    """Return a vocabulary from elsewhere with our special tokens and ids, and the old id of each.

    ALBERT's `[CLS]` is our `<s>`, `[SEP]` is `</s>`, and `[MASK]` is `<mask>`; others have special
    tokens with our names. The other pieces keep their order, and texts have corresponding ids.
    Where a text contains the name of a special token it is text.

    Raises:
        ValueError: A special token is missing, or there are tokens that are not pieces.
    """
    from tokenizers import Regex, pre_tokenizers

    model = content_of(backend)["model"]
    pieces: list[tuple[str, float]] = model["vocab"]
    ids = backend.get_vocab(with_added_tokens=True)
    special = ALBERT if ALBERT[0] in ids else (*FIRST_TOKENS, MASK_TOKEN)
    if missing := [token for token in special if token not in ids]:
        raise ValueError(f"lacks {', '.join(missing)} of the special tokens {', '.join(special)}")
    words = [id for id, (piece, _) in enumerate(pieces) if piece not in special]
    if added := len(ids) - len(words) - len(special):
        raise ValueError(f"has {added} added tokens beside {', '.join(special)}")
    order = [*(ids[token] for token in special[:-1]), *words, ids[special[-1]]]
    splitter = pre_tokenizers.Sequence(
        [
            backend.pre_tokenizer,
            # Otherwise the model would find our special tokens in a text.
            pre_tokenizers.Split(Regex(_SPECIAL_TOKEN), behavior="merged_with_previous"),
        ]
    )
    kept, has_bytes = [pieces[id] for id in words], model.get("byte_fallback", False)
    return _build(kept, backend.normalizer, splitter, has_bytes), order


def _build(
    pieces: Sequence[tuple[str, float]],
    normalizer: "Normalizer",
    splitter: "PreTokenizer",
    byte_fallback: bool,
) -> "Backend":
    """Return a tokenizer of pieces and their scores (natural logarithms of probabilities)."""
    from tokenizers import Tokenizer, decoders, models

    vocab = [*((token, 0.0) for token in FIRST_TOKENS), *((text, score) for text, score in pieces)]
    unknown = FIRST_TOKENS.index("<unk>")
    backend = Tokenizer(models.Unigram(vocab, unk_id=unknown, byte_fallback=byte_fallback))
    backend.normalizer = normalizer
    backend.pre_tokenizer = splitter
    # Not Metaspace, which removes the space before the first piece: a piece on its own keeps it.
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([*FIRST_TOKENS, MASK_TOKEN])
    return backend


def _normalizer(lowercase: bool) -> "Normalizer":
    from tokenizers import normalizers

    if not lowercase:
        return normalizers.NFKC()
    steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    # The last one composes Korean syllables again.
    return normalizers.Sequence([*steps, normalizers.NFKC()])


def _frequent_characters(runs: Mapping[str, int]) -> str:
    """Return the most frequent characters, which make up `COVERAGE` of those of the runs."""
    counts: Counter[str] = Counter()
    for run, count in runs.items():
        for character in run:
            counts[character] += count
    if not counts:
        raise ValueError("the texts have no characters")
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    sums = itertools.accumulate(map(counts.__getitem__, ordered))
    covered = sum(total < COVERAGE * counts.total() for total in sums)
    return "".join(ordered[: covered + 1])


def _training_text(runs: Mapping[str, int], characters: str) -> Iterator[str]:
    """Yield each run as often as it occurs, with white space in place of rare characters.

    The trainer starts from the strings that occur in two different runs, where SentencePiece starts
    from those that occur twice in the text. So frequent runs are repeated once with one more
    character; without that, a text such as WikiText-2 has 15 % more tokens.
    """
    rare = re.compile(f"[^{re.escape(characters)}]+")
    more = itertools.cycle(characters)
    for run, count in runs.items():
        kept = rare.sub(" ", run)
        for done in range(0, count, _BATCH):
            yield f"{kept} " * min(_BATCH, count - done)
        if count >= _FREQUENT and kept == run:
            yield run + next(more)


def content_of(backend: "Backend") -> dict[str, Any]:
    """Return the content of the `tokenizer.json` of a tokenizer."""
    import orjson

    return orjson.loads(backend.to_str())

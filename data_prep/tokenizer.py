"""Vocabularies: load, train, encode, identify.

The ids follow RoBERTa's order: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the vocabulary, and
`<mask>` last.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data_prep import gpt2_vocabulary, unigram
from data_prep.common import hub
from data_prep.common.files import named_errors, retried, write_atomically
from data_prep.gpt2_vocabulary import FIRST_TOKENS, MASK_TOKEN

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
FILE_NAMES = (
    *(FILE_NAME, *gpt2_vocabulary.HUGGING_FACE_FILES),
    *("added_tokens.json", "tokenizer_config.json", "special_tokens_map.json"),
)
"""Files of a repository that its vocabulary is in."""
_ACCEPTED = (
    f"a {FILE_NAME}; a folder with one (a prepared corpus, an exported model, the output of "
    f"train-tokenizer); a folder with {', '.join(gpt2_vocabulary.FAIRSEQ_FILES)}, or "
    f"{', '.join(gpt2_vocabulary.HUGGING_FACE_FILES)}"
)

_TEXTS = 4096
"""Encoded at a time: an encoding takes some kB beside its ids."""
_SPECIAL_TEXT = "<s> <pad> </s> <mask>"


class Tokenizer:
    """A vocabulary with its special ids. It can be pickled and forked."""

    bos_id = 0
    pad_id = 1
    eos_id = 2
    unk_id = 3

    def __init__(self, backend: "tokenizers.Tokenizer") -> None:
        """Wrap a `tokenizers.Tokenizer`.

        Raises:
            ValueError: The special tokens do not have the expected ids, or text could encode to
                them.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.mask_id = self.vocab_size - 1
        expected = {token: id for id, token in enumerate(FIRST_TOKENS)} | {MASK_TOKEN: self.mask_id}
        found = {token: backend.token_to_id(token) for token in expected}
        if found != expected:
            raise ValueError(
                f"special ids {found}; accepted: {expected} (RoBERTa's order, with <mask> last)"
            )
        # "</s>" within a document is text and must not end the document.
        if control := _control_ids(backend):
            raise ValueError(
                f"the text {_SPECIAL_TEXT!r} encodes to the special ids {control}; the vocabulary "
                "must mark its special tokens as special, so that no text encodes to them"
            )

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text, without special tokens; text never encodes to them.

        Raises:
            ValueError: A text is not valid Unicode, such as one of the command line may be.
        """
        encode = partial(self._backend.encode_batch_fast, add_special_tokens=False)
        parts = (list(texts[first : first + _TEXTS]) for first in range(0, len(texts), _TEXTS))
        try:
            return [np.array(each.ids, dtype=np.int32) for part in parts for each in encode(part)]
        except TypeError:
            "".join(texts).encode()  # says which character is not valid
            raise

    def lay_out(self, texts: Sequence[Sequence[int]], separators: int = 2) -> list[int]:
        """Return the input ids of one text, `<s> a </s>`, or more, `<s> a </s> </s> b </s>`.

        This is the layout of RoBERTa (Liu et al. 2019). With one separator it is that of BERT and
        ALBERT, `<s> a </s> b </s>`.
        """
        first, *others = texts
        ids = [self.bos_id, *first, self.eos_id]
        for other in others:
            ids += [*[self.eos_id] * (separators - 1), *other, self.eos_id]
        return ids

    @classmethod
    def segment_ids(cls, input_ids: npt.NDArray[Any], segments: int) -> npt.NDArray[np.int64]:
        """Return the number of the text that each token belongs to, from 0 to `segments` - 1.

        Args:
            input_ids: [..., T], laid out with one separator. `</s>` belongs to the text before it.
            segments: Number of segments of the model. The numbers at padding mean nothing.
        """
        ends = input_ids == cls.eos_id
        return np.minimum(np.cumsum(ends, axis=-1, dtype=np.int64) - ends, segments - 1)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, including special tokens."""
        ids = [int(id) for id in ids]
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def token_text(self, id: int) -> str:
        """Return the text of one id; part of a character becomes U+FFFD."""
        return self.decode([id])

    def digest(self) -> str:
        """Return the hex sha256 of everything that determines the ids of a text.

        It does not depend on the file layout: roberta-base from the hub and from fairseq's files
        have the same digest.
        """
        content = self.content()
        # Fields without a value are left out, so that later versions of `tokenizers` may add some.
        model = {name: value for name, value in content["model"].items() if value}
        # Files differ in whether the model's table lists the special tokens. Text never encodes to
        # these, so only their ids matter, and they are in the table of all ids.
        if isinstance(model.get("vocab"), dict):
            del model["vocab"]
        identity = {
            "ids": self._backend.get_vocab(with_added_tokens=True),
            "model": model,
            "normalizer": content["normalizer"],
            "pre_tokenizer": content["pre_tokenizer"],
            "added_tokens": [t for t in content["added_tokens"] if not t["special"]],
        }
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def content(self) -> dict[str, Any]:
        """Return the content of `tokenizer.json`."""
        return unigram.content_of(self._backend)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`."""
        write_atomically(path, self._backend.to_str(pretty=True).encode())

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple["tokenizers.Tokenizer"]]:
        """Wrap the backend anew, because its pickling loses `encode_special_tokens`."""
        return Tokenizer, (self._backend,)


def load(name_or_path: str | Path) -> Tokenizer:
    """Load a vocabulary from files in any layout, or from the Hugging Face hub.

    Args:
        name_or_path: A `tokenizer.json`, or a folder with one (a corpus, a model); a folder with
            GPT-2's `encoder.json` and `vocab.bpe` and fairseq's `dict.txt`; or a folder with
            Hugging Face's `vocab.json` and `merges.txt`. A string that is not a path but a possible
            model name, such as "roberta-base", is looked up on the hub; a `Path` never is.

    Raises:
        ValueError: It does not exist, cannot be read, or has unexpected special ids.
    """
    return load_with_order(name_or_path)[0]


def load_with_order(name_or_path: str | Path) -> tuple[Tokenizer, list[int]]:
    """Load a vocabulary as `load` does, and say how the ids differ from those in its files.

    Where the special tokens have other ids there, as where `<mask>` was trained as the fifth, all
    tokens are renumbered: the others keep their order.

    Returns:
        The vocabulary; and the files' id of each of its ids, empty where they are the same.

    Raises:
        ValueError: As `load`.
    """
    place = _find(name_or_path)
    folder = place if place.is_dir() else place.parent
    with named_errors(f"tokenizer {place}"):
        if place.is_dir():
            backend = _bpe(*gpt2_vocabulary.read_vocabulary(place))
        else:
            backend = _read_json(place)
        settings = gpt2_vocabulary.read_settings(folder)
        _apply(settings, backend)
        _check_every_text_has_ids(backend)
        return _with_our_ids(backend, gpt2_vocabulary.read_added_tokens(folder, settings))


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with GPT-2's pretokeniser; the same texts give the same vocabulary.

    Args:
        texts: Documents; consumed once.
        vocab_size: Number of ids, including special tokens. Little text may give fewer.

    Raises:
        ValueError: `vocab_size` is too small for the 256 bytes and the special tokens.
    """
    from tokenizers import models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(FIRST_TOKENS) + 1
    if vocab_size < smallest:
        raise ValueError(f"vocabulary size {vocab_size}: accepted: {smallest} or more")
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=list(FIRST_TOKENS),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([MASK_TOKEN])
    return Tokenizer(backend)


def train_characters(texts: Iterable[str]) -> Tokenizer:
    """Make a vocabulary of the characters (code points) of the texts.

    Ids: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the characters by code point, `<mask>` last.
    Other characters encode to `<unk>`.

    Args:
        texts: Documents; consumed once.

    Raises:
        ValueError: The texts have no characters.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    characters = set(chain.from_iterable(texts))
    if not characters:
        raise ValueError("the texts have no characters")
    vocab = {token: id for id, token in enumerate([*FIRST_TOKENS, *sorted(characters)])}
    # A byte-pair encoding without merges splits a text into characters.
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token=FIRST_TOKENS[3]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([*FIRST_TOKENS, MASK_TOKEN])
    return Tokenizer(backend)


def _apply(settings: Mapping[str, Any], backend: "tokenizers.Tokenizer") -> None:
    """Make a vocabulary encode as transformers does with these settings beside it.

    Raises:
        ValueError: Texts have other tokens around them, or for the mask, than ours or ALBERT's.
    """
    from tokenizers import models, pre_tokenizers

    ours, alberts = ("<s>", "</s>", MASK_TOKEN), unigram.ALBERT[::2]
    is_unigram = isinstance(backend.model, models.Unigram)
    names = ("cls_token", "sep_token", "mask_token")
    for name, accepted, other in zip(names, ours, alberts, strict=True):
        token = settings.get(name) or accepted
        text = token.get("content") if isinstance(token, dict) else token
        if text != accepted and not (is_unigram and text == other):
            raise ValueError(f"{name} is {text!r}; accepted: {accepted!r}")
    # RobertaTokenizer does not take this from tokenizer.json, as other classes do.
    is_roberta = str(settings.get("tokenizer_class", "Roberta")).startswith("Roberta")
    if settings and is_roberta and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        backend.pre_tokenizer.add_prefix_space = bool(settings.get("add_prefix_space"))


def _check_every_text_has_ids(backend: "tokenizers.Tokenizer") -> None:
    """Refuse a vocabulary whose library silently drops parts of a text, or fails at them.

    Raises:
        ValueError: Its unknown token is not in it; or, in a byte-pair encoding without one, not
            every byte or character has an id.
    """
    from tokenizers import models, pre_tokenizers

    vocab, model = backend.get_vocab(with_added_tokens=True), backend.model
    unknown = getattr(model, "unk_token", None)
    if unknown in vocab or isinstance(model, models.Unigram):
        return
    if "ByteLevel" in f"{backend.normalizer} {backend.pre_tokenizer}":
        if missing := sorted({*pre_tokenizers.ByteLevel.alphabet()} - vocab.keys()):
            raise ValueError(f"{len(missing)} of the 256 bytes have no id, such as {missing[0]!r}")
    elif not getattr(model, "byte_fallback", False):
        raise ValueError(f"its unknown token, {unknown!r}, is not in the vocabulary")


def _bpe(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> "tokenizers.Tokenizer":
    from tokenizers import models

    if sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError(f"{len(vocab)} tokens, but their ids are not 0 to {len(vocab) - 1}")
    backend = _byte_level(models.BPE(vocab=dict(vocab), merges=list(merges)))
    backend.add_special_tokens([*FIRST_TOKENS, MASK_TOKEN])
    return backend


def _byte_level(model: "tokenizers.models.Model") -> "tokenizers.Tokenizer":
    """Add GPT-2's pretokeniser and decoder to a model."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers

    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return backend


def _control_ids(backend: "tokenizers.Tokenizer") -> list[int]:
    """Return the special ids, in our order, that a text may encode to."""
    backend.encode_special_tokens = True
    texts = [_SPECIAL_TEXT, *_SPECIAL_TEXT.split()]
    written = {
        id for each in backend.encode_batch(texts, add_special_tokens=False) for id in each.ids
    }
    last = backend.get_vocab_size(with_added_tokens=True) - 1
    return sorted(written & {0, 1, 2, last})


def _with_our_ids(
    backend: "tokenizers.Tokenizer", more: Sequence[Mapping[str, Any]]
) -> tuple[Tokenizer, list[int]]:
    """Return the vocabulary, and the old id of each id where they change.

    Tokens that a user added are tokens in a text too, as in transformers, also those that are
    marked as special. Only our special tokens are not.

    Args:
        backend: A vocabulary of the library.
        more: Added tokens that are not in it, as `gpt2_vocabulary.read_added_tokens` returns them.

    Raises:
        ValueError: An added token has the id of another one.
    """
    import orjson
    import tokenizers

    content, ids = unigram.content_of(backend), backend.get_vocab(with_added_tokens=True)
    ours = {*FIRST_TOKENS, MASK_TOKEN}
    is_unigram, others_ids = content["model"]["type"] == "Unigram", unigram.ALBERT[0] in ids
    if is_unigram and (others_ids or _order(ids) or _control_ids(backend)):
        renamed, order = unigram.renumbered(backend)
        return Tokenizer(renamed), [] if order == [*range(len(order))] else order
    known = {token["content"] for token in content["added_tokens"]}
    added = [
        {**t, "special": t["special"] and t["content"] in ours} for t in content["added_tokens"]
    ]
    for token in (token for token in more if token["content"] not in known | ours):
        id = ids.setdefault(token["content"], len(ids))
        if token["id"] not in (None, id):
            raise ValueError(f"added token {token['content']!r} has id {token['id']}, not {id}")
        added.append({**token, "id": id, "special": False})
    if order := _order(ids) if content["model"]["type"] == "BPE" else []:
        new = {old: id for id, old in enumerate(order)}
        content["model"]["vocab"] = {token: new[id] for token, id in ids.items()}
        added = sorted(({**t, "id": new[t["id"]]} for t in added), key=lambda token: token["id"])
        content["post_processor"] = None  # it has ids of special tokens, which are not asked for
    if added != content["added_tokens"]:
        content["added_tokens"] = added
        backend = tokenizers.Tokenizer.from_buffer(orjson.dumps(content))
    return Tokenizer(backend), order


def _order(ids: Mapping[str, int]) -> list[int]:
    """Return the old id of each new one, or an empty list where nothing changes or can."""
    special = (*FIRST_TOKENS, MASK_TOKEN)
    if sorted(ids.values()) != [*range(len(ids))] or not ids.keys() >= {*special}:
        return []
    others = sorted(id for token, id in ids.items() if token not in special)
    order = [*(ids[token] for token in FIRST_TOKENS), *others, ids[MASK_TOKEN]]
    return order if order != [*range(len(ids))] else []


def _read_json(file: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    content = retried(file.read_bytes)
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception for any error in the file
        raise ValueError(f"not a {FILE_NAME} of the tokenizers library: {error}") from error
    if dropout := getattr(backend.model, "dropout", None):
        off = f"its dropout of {dropout:.3g}, which gives a text other ids each time, is off here"
        print(f"note: tokenizer {file}: {off}", file=sys.stderr, flush=True)
        backend.model.dropout = None
    return backend


def _find(name_or_path: str | Path) -> Path:
    """Return the path of the `tokenizer.json`, or of the folder in another layout."""
    path, reason = Path(name_or_path), "no such file"
    if isinstance(name_or_path, str) and hub.may_be_name(name_or_path):
        try:
            path = hub.fetch(name_or_path, FILE_NAMES)
        except ValueError as error:
            reason = str(error)
    if path.is_dir() and not (path / FILE_NAME).exists() and gpt2_vocabulary.is_layout(path):
        return path
    file = path / FILE_NAME if path.is_dir() else path
    if file.is_file():
        return file
    reason = f"has no {FILE_NAME}" if path.is_dir() else reason
    raise ValueError(f"tokenizer {name_or_path}: {reason}; accepted: {_ACCEPTED}")

"""Vocabularies: load, train, encode, identify.

The ids follow the original's order: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the vocabulary,
`<mask>` last.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data_prep.files import write_atomically

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
_FIRST_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
_MASK_TOKEN = "<mask>"


class Tokenizer:
    """A vocabulary with its special ids. Pickles and forks."""

    bos_id = 0
    pad_id = 1
    eos_id = 2
    unk_id = 3

    def __init__(self, backend: "tokenizers.Tokenizer") -> None:
        """Wrap a `tokenizers.Tokenizer`.

        Raises:
            ValueError: The special tokens are not where this project has them, or a document could
                write them.
        """
        backend.no_truncation()
        backend.no_padding()
        # What a document contains is text: "</s>" in it must not end the document.
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.mask_id = self.vocab_size - 1
        _check_special_tokens(backend, self.vocab_size)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Ids of each text; no special token is added and none can come from the text."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens shown."""
        return str(self._backend.decode([int(id) for id in ids], skip_special_tokens=False))

    def token_text(self, id: int) -> str:
        """Text of one id, decoded alone; part of a character shows as U+FFFD."""
        return self.decode([id])

    def digest(self) -> str:
        """Hex sha256 of what decides the ids of a text, whatever the layout of the file."""
        content = json.loads(self._backend.to_str())
        # Fields that are off are left out, so that a later version of `tokenizers` may add some.
        identity = {
            "model": {name: value for name, value in content["model"].items() if value},
            "normalizer": content["normalizer"],
            "pre_tokenizer": content["pre_tokenizer"],
            "added_tokens": content["added_tokens"],
        }
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`."""
        write_atomically(path, self._backend.to_str(pretty=True).encode())

    def __getstate__(self) -> dict[str, Any]:
        """The vocabulary as JSON."""
        return {"json": self._backend.to_str()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild from JSON (the backend's own pickling forgets `encode_special_tokens`)."""
        import tokenizers

        self.__init__(tokenizers.Tokenizer.from_str(state["json"]))  # type: ignore[misc]


def load(name_or_path: str | Path) -> Tokenizer:
    """Load a vocabulary from a `tokenizer.json` or from a folder holding one (a corpus, a model).

    Raises:
        ValueError: There is none, it cannot be read, or its special ids are not ours.
    """
    import tokenizers

    path = Path(name_or_path)
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"tokenizer {name_or_path}: no such file; accepted: a {FILE_NAME}, or a folder holding "
            "one (a prepared corpus, an exported model, what train-tokenizer wrote)"
        )
    try:
        # The library raises bare Exception for whatever is wrong with the file.
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:
        raise ValueError(
            f"tokenizer {file}: not a {FILE_NAME} of the tokenizers library: {error}"
        ) from error
    try:
        return Tokenizer(backend)
    except ValueError as error:
        raise ValueError(f"tokenizer {file}: {error}") from error


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with GPT-2's pretokeniser; the same texts give the same vocabulary.

    Args:
        texts: Documents; consumed once.
        vocab_size: Ids to have, all special ones included. Little text may give fewer.

    Raises:
        ValueError: No room for the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(_FIRST_TOKENS) + 1
    if vocab_size < smallest:
        raise ValueError(f"vocabulary size {vocab_size}: accepted: {smallest} or more")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=list(_FIRST_TOKENS),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([_MASK_TOKEN])
    return Tokenizer(backend)


def encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[npt.NDArray[np.int32]]]:
    """The bulk encoder for a vocabulary; the ids are those of `Tokenizer.encode_batch`."""
    return tokenizer.encode_batch


def _check_special_tokens(backend: "tokenizers.Tokenizer", vocab_size: int) -> None:
    expected = {token: id for id, token in enumerate(_FIRST_TOKENS)} | {_MASK_TOKEN: vocab_size - 1}
    found = {token: backend.token_to_id(token) for token in expected}
    if found != expected:
        raise ValueError(
            f"special ids {found}; accepted: {expected} (the order of the original, <mask> last)"
        )
    written = backend.encode("<s> <pad> </s> <mask>", add_special_tokens=False).ids
    if control := sorted(set(written) & {0, 1, 2, vocab_size - 1}):
        raise ValueError(
            f"the text '<s> <pad> </s> <mask>' encodes to the special ids {control}; accepted: a "
            "vocabulary that marks its special tokens as special, so that text cannot write them"
        )

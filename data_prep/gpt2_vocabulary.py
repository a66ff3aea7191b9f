"""Read GPT-2's byte-level BPE from the files in which it is published.

`tokenizer.load` makes a `Tokenizer` of the ids and merges. Two layouts are supported:

    encoder.json  vocab.bpe  dict.txt     GPT-2's files, and fairseq's order of the ids
    vocab.json    merges.txt              Hugging Face's slow RoBERTa tokenizer, in its final order
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.common.files import MALFORMED, named_errors, read_json

FAIRSEQ_FILES = ("encoder.json", "vocab.bpe", "dict.txt")
HUGGING_FACE_FILES = ("vocab.json", "merges.txt")
# The tokens before and after those of a fairseq dictionary.
FIRST_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"
# Prefix of the tokens with which fairseq pads a dictionary; no text encodes to them.
_FILLER = "madeupword"

Ids = dict[str, int]
Merges = list[tuple[str, str]]


def is_layout(folder: Path) -> bool:
    """Return whether a folder has a file of one of the two layouts."""
    return any((folder / name).exists() for name in (*FAIRSEQ_FILES, *HUGGING_FACE_FILES))


def read_vocabulary(folder: Path) -> tuple[Ids, Merges]:
    """Return the id of each token, and the merges in order, from a folder in either layout.

    Tokens are written in GPT-2's alphabet, which has a visible character for each byte.

    Raises:
        ValueError: A file is missing or damaged; the message names the file and the line.
    """
    is_fairseq = any((folder / name).exists() for name in FAIRSEQ_FILES)
    names = FAIRSEQ_FILES if is_fairseq else HUGGING_FACE_FILES
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder}: lacks {', '.join(missing)} of {', '.join(names)}")
    ids = _read_ids(folder / names[0])
    merges = _read_merges(folder / names[1], ids)
    return (_in_order_of(folder / "dict.txt", ids) if is_fairseq else ids), merges


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what transformers' files beside a vocabulary say; empty without them.

    Raises:
        ValueError: A file is damaged; it is named.
    """
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= read_json(folder / name)
    return settings


def read_added_tokens(folder: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that a user of transformers added to a vocabulary, in order.

    Args:
        folder: With added_tokens.json, or without.
        settings: As `read_settings` returns them.

    Returns:
        Each as in the `added_tokens` of a tokenizer.json; `id` is None where no file says it.

    Raises:
        ValueError: They are damaged.
    """
    listed: list[tuple[int | None, Any]] = []
    path = folder / "added_tokens.json"
    if path.is_file():
        listed += sorted((id, token) for token, id in _read_ids(path).items())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    found: dict[str, dict[str, Any]] = {}
    try:
        listed += [(int(i), t) for i, t in settings.get("added_tokens_decoder", {}).items()]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = settings.get(key) or ()
            listed += [(None, t) for t in (tokens.values() if isinstance(tokens, dict) else tokens)]
        for id, token in listed:
            given = token if isinstance(token, dict) else {"content": str(token)}
            text = given["content"]
            known = found.setdefault(text, {"id": id, "content": text, **flags})
            known |= {name: given[name] for name in flags if name in given}
    except MALFORMED as error:
        raise ValueError(f"{folder}: its added tokens are not transformers': {error}") from error
    return list(found.values())


def _read_ids(path: Path) -> Ids:
    ids: Ids = read_json(path)
    if not all(type(id) is int for id in ids.values()):  # isinstance would accept bool
        raise ValueError(f"{path}: is not one JSON object of tokens and their integer ids")
    return ids


def _read_merges(path: Path, ids: Mapping[str, int]) -> Merges:
    merges: Merges = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise ValueError(f"{path}: line {number}: {line!r} is not a pair of tokens to merge")
        merges.append((left, right))
    if len(set(merges)) < len(merges):
        raise ValueError(f"{path}: has the same line twice")
    return merges


def _in_order_of(path: Path, bpe_ids: Mapping[str, int]) -> Ids:
    """Return the ids of a fairseq dictionary; its lines are "BPE-ID COUNT", or fillers."""
    tokens = {str(id): token for token, id in bpe_ids.items()}
    symbols = []
    for number, line in enumerate(_text(path).removesuffix("\n").split("\n"), start=1):
        symbol, _, count = line.rpartition(" ")
        if not count.isdecimal() or not (symbol in tokens or symbol.startswith(_FILLER)):
            raise ValueError(f'{path}: line {number}: {line!r} is not "BPE-ID COUNT"')
        symbols.append(symbol)
    if len(set(symbols)) < len(symbols) or not tokens.keys() <= set(symbols):
        raise ValueError(f"{path}: does not have each id of encoder.json once")
    ordered = [*FIRST_TOKENS, *(tokens.get(symbol, symbol) for symbol in symbols), MASK_TOKEN]
    return {token: id for id, token in enumerate(ordered)}


def _text(path: Path) -> str:
    with named_errors(path):
        return path.read_text(encoding="utf-8")

"""Vocabularies whose tokens are single characters."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from data_prep.gpt2_vocabulary import FIRST_TOKENS, MASK_TOKEN

if TYPE_CHECKING:
    import tokenizers

_UNKNOWN = FIRST_TOKENS[3]


def character_vocabulary(texts: Iterable[str]) -> "tokenizers.Tokenizer":
    """A vocabulary of the characters (code points) of the texts.

    Ids: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the characters by code point, `<mask>` last.
    Any other character becomes `<unk>`. `data_prep.tokenizer.Tokenizer` takes it.

    Args:
        texts: Consumed once.

    Raises:
        ValueError: The texts hold no character.
    """
    from tokenizers import Tokenizer, decoders, models

    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise ValueError("the texts hold no character; accepted: at least one")
    tokens = [*FIRST_TOKENS, *sorted(characters)]
    # Byte-pair encoding without pairs: a text falls into its characters.
    backend = Tokenizer(
        models.BPE(
            vocab={token: id for id, token in enumerate(tokens)}, merges=[], unk_token=_UNKNOWN
        )
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([*FIRST_TOKENS, MASK_TOKEN])
    return backend

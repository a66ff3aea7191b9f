"""What has an order of its own in a run: each corpus, in each way in which phases cut it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Stream:
    """Blocks with an order of their own: a corpus, cut in one way."""

    name: str
    """The corpus's, with the length and where needed the packing if a run cuts it in several ways;
    empty where a run has a single one without a name."""
    path: str
    """Folder of the corpus."""
    sequence_length: int
    packing: str

    @cached_property
    def key(self) -> tuple[str, int, str]:
        """Equal where the blocks are the same."""
        return str(Path(self.path)), self.sequence_length, self.packing


def named(streams: Sequence[Stream]) -> list[Stream]:
    """Return streams with different names."""
    pairs = zip(streams, _names(streams), strict=True)
    return [dataclasses.replace(stream, name=name) for stream, name in pairs]


def _names(streams: Sequence[Stream]) -> list[str]:
    """Different names: of the corpora, and of one that is cut in several ways with the length."""
    if len(streams) == 1:
        return [streams[0].name]
    given = {s.key[0]: s.name for s in reversed(streams) if s.name}  # by a phase, to a path
    plain = [given.get(s.key[0], Path(s.path).name) for s in streams]
    longer = [f"{n}@{s.sequence_length}" for n, s in zip(plain, streams, strict=True)]
    packed = [f"{n}/{s.packing}" for n, s in zip(longer, streams, strict=True)]
    numbered = [f"{n}/{number}" for number, n in enumerate(longer)]
    forms = (plain, longer, packed)
    return [
        next((form[n] for form in forms if form.count(form[n]) == 1), numbered[n])
        for n in range(len(streams))
    ]

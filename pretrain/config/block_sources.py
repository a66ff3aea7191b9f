"""What has an order of its own in a run: each corpus, in each way in which phases cut it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class BlockSource:
    """Blocks with an order of their own: a corpus, cut in one way. Equal under any name."""

    path: str
    """Folder of the corpus, as `pathlib` writes it."""
    sequence_length: int
    packing: str
    name: str = dataclasses.field(compare=False)
    """The corpus's, with the length and where needed the packing if a run cuts it in several ways;
    empty where a run has a single one without a name."""


def named(sources: Sequence[BlockSource]) -> list[BlockSource]:
    """Return sources with different names: of the corpora, with the length where one has several.

    Where the length is the same, too, the packing or a number follows.
    """
    if len(sources) == 1:
        return [*sources]
    given = {s.path: s.name for s in reversed(sources) if s.name}  # by a phase, to a path
    plain = [given.get(s.path, Path(s.path).name) for s in sources]
    longer = [f"{n}@{s.sequence_length}" for n, s in zip(plain, sources, strict=True)]
    packed = [f"{n}/{s.packing}" for n, s in zip(longer, sources, strict=True)]
    found = []
    for number, source in enumerate(sources):
        forms = (form[number] for form in (plain, longer, packed) if form.count(form[number]) == 1)
        found.append(dataclasses.replace(source, name=next(forms, f"{longer[number]}/{number}")))
    return found

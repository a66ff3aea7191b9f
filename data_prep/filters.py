"""Filters of documents.

`filtered` judges documents by their subset and by the user's own functions, before they are
encoded; `judge` by their length in tokens.
"""

from collections.abc import Callable, Mapping
from importlib import import_module

import numpy as np
import numpy.typing as npt

from data_prep.documents import Document, Records, Reject
from data_prep.manifest import Settings

FILTERED = "filtered"
OTHER_SUBSET = "other-subset"
OwnFilter = Callable[[str, str], str | None]
"""Takes a document's text and subset; returns None to keep it, or why not in a few words."""


def filtered(records: Records, settings: Settings) -> Records:
    """Yield the records of an input, with the documents that are filtered out as rejects."""
    own = {name: own_filter(name) for name in settings.filters}
    for record in records:
        if isinstance(record, Document) and (reason := _reason(record, settings.subset, own)):
            text_bytes = len(record.text.encode())
            yield Reject(reason, record.subset, record.source_file, record.line, text_bytes)
        else:
            yield record


def own_filter(name: str) -> OwnFilter:
    """Import a filter of the user's own.

    Raises:
        ValueError: The name is not package.module:function, or cannot be imported.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except Exception as error:  # whatever a package raises
        accepted = "package.module:function, of an installed package or on PYTHONPATH"
        raise ValueError(f"--filter {name}: {error}; accepted: {accepted}") from error


def _reason(document: Document, subset: str, own: Mapping[str, OwnFilter]) -> str | None:
    if subset and document.subset != subset:
        return OTHER_SUBSET
    for name, each in own.items():
        place = f"filter {name}: {document.source_file}:{document.line}"
        try:
            reason = each(document.text, document.subset)
        except Exception as error:  # whatever a package raises
            raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
        if reason is not None and not (isinstance(reason, str) and reason):
            accepted = "None to keep the document, or the reason as text"
            raise ValueError(f"{place}: returned {reason!r}; accepted: {accepted}")
        if reason:
            return f"{FILTERED}: {name}: {reason}"
    return None


def judge(length: int, limits: Settings) -> str | None:
    """Return the reason why a document is rejected, or None.

    Args:
        length: Tokens of the document including `<s>` and `</s>`.
        limits: `min_tokens` and `max_tokens`, both inclusive.
    """
    if limits.max_tokens is not None and length > limits.max_tokens:
        return "too-long"
    if length < limits.min_tokens:
        return "too-short"
    return None


def windows(ids: npt.NDArray[np.int32], limits: Settings) -> list[npt.NDArray[np.int32]]:
    """Return the ids to write for a document: all, their beginning, or consecutive windows.

    Args:
        ids: Without `<s>` and `</s>`.
        limits: `long` applies to documents over `max_tokens`; "drop" returns them unchanged, so
            that `judge` rejects them.
    """
    room = len(ids) if limits.max_tokens is None else limits.max_tokens - 2
    if limits.long == "drop" or len(ids) <= room:
        return [ids]
    end = room if limits.long == "truncate" else len(ids)
    return [ids[start : start + room] for start in range(0, end, room)]

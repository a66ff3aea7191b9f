"""Filters of the user's own, from installed packages: `prepare --filter NAME`.

A filter is a function of a document's text and the name of its subset. It returns None to keep the
document, or in a few words the reason why it is dropped. A package registers it in the group
`zeroclap.filters` (see common/plugins.py), or the command line names it: `package.module:function`.
"""

import re
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint

from data_prep.common.plugins import Plugins, load, package_of
from data_prep.documents import Document, Verdict
from data_prep.task import ShardTask

REJECTED = "filtered"
_TABLE: Plugins[Callable[[str, str], str | None]] = Plugins("zeroclap.filters", {})


def packages(names: Iterable[str]) -> dict[str, str]:
    """Import filters; returns for each name the package, with its version, that it is from.

    Raises:
        ValueError: There is no such filter, or it cannot be imported.
    """
    entries = {name: _entry(name) for name in names}
    for entry in entries.values():
        load(entry)
    return {name: package_of(entry) for name, entry in entries.items()}


def own(task: ShardTask) -> Verdict:
    """Return the filters that the settings name, as one that gives the first reason."""
    judges = {name: load(_entry(name)) for name in task.settings.filters}

    def judge(_: int, document: Document) -> str | None:
        for name, each in judges.items():
            place = f"filter {name}: {document.source_file}:{document.line}"
            try:
                reason = each(document.text, document.subset)
            except Exception as error:  # whatever a package raises
                raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
            if reason is not None and not (isinstance(reason, str) and reason):
                accepted = "None to keep the document, or the reason as text"
                raise ValueError(f"{place}: returned {reason!r}; accepted: {accepted}")
            if reason:
                return f"{REJECTED}: {name}: {reason}"
        return None

    return judge


def _entry(name: str) -> EntryPoint:
    installed = _TABLE.installed()
    if name not in installed and not re.fullmatch(r"[\w.]+:[\w.]+", name):
        known = ", ".join(installed) or "none is installed"
        raise ValueError(f"filter {name!r}: accepted: {known}; or package.module:function")
    return installed.get(name) or EntryPoint(name, name, _TABLE.group)

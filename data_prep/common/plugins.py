"""What installed packages add to our tables: entry points.

A package registers a name in its pyproject.toml, in a group such as `zeroclap.objectives`:

    [project.entry-points."zeroclap.objectives"]
    shuffled = "my_package.shuffled:ShuffledConfig"

The names are metadata, which are read without importing anything. A package is imported only where
a name that it has registered is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from typing import Any, TypeVar

T = TypeVar("T")


class Plugins(dict[str, T]):
    """A table of our own, by name, in which names of installed packages are found too.

    Iterating over it yields ours alone, so that it imports nothing.
    """

    def __init__(self, group: str, ours: Mapping[str, T]) -> None:
        """Create the table.

        Args:
            group: Of the entry points.
            ours: Looked up first.
        """
        super().__init__(ours)
        self.group = group

    def installed(self) -> dict[str, EntryPoint]:
        """Return what installed packages register, by name; nothing is imported."""
        found = {entry.name: entry for entry in entry_points(group=self.group)}
        return {name: found[name] for name in sorted(found.keys() - self.keys())}

    def package(self, name: str) -> list[str]:
        """Return the package that registers a name, without its version; nothing for ours."""
        entry = None if name in self.keys() else self.installed().get(name)
        return [entry.dist.name] if entry and entry.dist else []

    def __contains__(self, name: object) -> bool:
        """Whether a name is ours or installed."""
        return super().__contains__(name) or name in self.installed()

    def __missing__(self, name: str) -> T:
        """Import what a package registers.

        Raises:
            ValueError: It cannot be imported; names the package.
            KeyError: No package registers the name.
        """
        found: T = load(self.installed()[name])
        return found


def names_of(table: Iterable[str]) -> list[str]:
    """Return all names of a table: ours, then the installed ones."""
    return [*table, *(table.installed() if isinstance(table, Plugins) else ())]


def load(entry: EntryPoint) -> Any:  # noqa: ANN401 - a class or a function
    """Import what an entry point names.

    Raises:
        ValueError: That fails, or it is neither a class nor a function, or another package has
            registered the name for something else.
    """
    same = {each.value: each for each in entry_points(group=entry.group, name=entry.name)}
    if len(same) > 1:
        packages = ", ".join(f"{package_of(each)} ({each.value})" for each in same.values())
        raise ValueError(
            f"{entry.group}: {entry.name} is registered twice: {packages}; uninstall one"
        )
    value = "" if entry.name == entry.value else f" ({entry.value})"
    named = f"{entry.group}: {entry.name}{value}"
    try:
        found = entry.load()
    except ModuleNotFoundError as error:
        places = "only installed packages and PYTHONPATH are searched, not the working directory"
        raise ValueError(f"{named}: cannot be imported: {error}; {places}") from error
    except Exception as error:  # whatever a package raises
        raise ValueError(f"{named}: cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{named}: {found!r} is neither a class nor a function")
    return found


def package_of(entry: EntryPoint) -> str:
    """Return the name and version of the package that an entry point is of; "" if unknown."""
    if entry.dist:
        return f"{entry.dist.name} {entry.dist.version}"
    names = packages_distributions().get(entry.module.partition(".")[0], [])
    return f"{names[0]} {version(names[0])}" if names else ""

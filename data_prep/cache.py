"""Folders of what is derived from a corpus, such as how it is cut into blocks.

They are made once for all processes: in the corpus's folder or, where that cannot be written, in
the user's cache folder ($XDG_CACHE_HOME, or ~/.cache).
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.common.files import (
    alone_in,
    naming,
    new_folder,
    remove_partial_folders,
    sha256_of,
    write_atomically,
)

Table = npt.NDArray[np.integer[Any]]
Tables = dict[str, Table]
HASHES = "SHA256SUMS"
"""File in a folder with the sha256 of its other files, as the program `sha256sum` writes them."""


def folders(corpus: Path, digest: str) -> tuple[Path, Path]:
    """Return the folder beside a corpus, and that of the user.

    Args:
        corpus: The corpus's folder.
        digest: `CorpusManifest.digest`.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return corpus / "blocks", Path(home) / "zeroclap" / digest[:32]


def kept(corpus: Path, digest: str) -> list[Path]:
    """Return the folders derived from this corpus, in both caches."""
    return sorted(
        each for place in folders(corpus, digest) for each in place.glob(f"*-{digest[:16]}")
    )


def differences(tables: Path) -> Iterator[str]:
    """Yield a line for each table in a folder that differs from its hash: damage, not forgery."""
    found = [f"{sha256_of(file)}  {file.name}" for file in tables.glob("*.npy")]
    for name in sorted({_name_in(line) for line in {*_hashes(tables)} ^ {*found}}):
        yield f"{tables / name}: is damaged; delete {tables}, and training makes it again"


def _hashes(tables: Path) -> list[str]:
    """Return the lines of a folder's HASHES, if it is there."""
    sums = tables / HASHES
    return sums.read_text(errors="replace").splitlines() if sums.is_file() else []


def _name_in(line: str) -> str:
    """Return the name of the file in a line of HASHES; its own if the line is damaged."""
    return line.partition("  ")[2] or HASHES


def tables(corpus: Path, digest: str, name: str, make: Callable[[], Tables]) -> Tables:
    """Return arrays derived from a corpus, memory-mapped, and make them where they are missing.

    The processes of a machine share their memory, and a restart takes no time.

    Args:
        corpus: The corpus's folder.
        digest: As in `folders`.
        name: Unique for everything that the arrays depend on besides the corpus.
        make: Computes them.

    Raises:
        ValueError: They can be kept nowhere, or a file is damaged.
    """

    def save(folder: Path) -> None:
        for key, array in make().items():
            np.save(folder / f"{key}.npy", array)
        hashes = "".join(f"{sha256_of(file)}  {file.name}\n" for file in sorted(folder.iterdir()))
        write_atomically(folder / HASHES, hashes.encode())

    folder, found = made(corpus, digest, f"{name}-{digest[:16]}", save), {}
    names = [*map(_name_in, _hashes(folder))]
    if {file.name for file in folder.glob("*.npy")} - {*names}:
        names = [HASHES]  # which is refused below
    for path in (folder / name for name in names):
        try:
            with naming(path):
                table = np.load(path, mmap_mode="r")
            if table.dtype.kind not in "iu":
                raise ValueError(f"numbers of the type {table.dtype}")
        except (EOFError, ValueError, FileNotFoundError) as error:
            raise ValueError(
                f"{path}: is damaged ({error}); delete {folder}, and it is made again"
            ) from None
        found[path.stem] = table
    return found


def made(corpus: Path, digest: str, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` of a corpus's cache, and make it where it is missing.

    Other processes of the machine that ask for it meanwhile wait.

    Args:
        corpus: The corpus's folder.
        digest: As in `folders`.
        name: Unique for everything that the content depends on besides the corpus.
        make: Writes the content into a new folder.

    Raises:
        ValueError: No folder can be written.
    """
    errors = []
    for folder in folders(corpus, digest):
        path = folder / name
        try:
            if not os.path.isdir(path):
                _make_alone(path, make)
        except OSError as error:
            errors.append(str(error))
        except ValueError:
            if not os.path.isdir(path):
                raise
        if os.path.isdir(path):  # or another machine was faster
            return path
    raise ValueError(
        f"{corpus}: its blocks cannot be cached: {'; '.join(errors)}; make the corpus's folder "
        "writable, or set XDG_CACHE_HOME to a folder that is"
    )


def _make_alone(path: Path, make: Callable[[Path], None]) -> None:
    """Make a folder unless another process does so meanwhile, where its parent can be locked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(path.parent) as is_alone:
        if is_alone:
            remove_partial_folders(path)  # left by a killed process
        if not path.is_dir():
            with new_folder(path) as partial:
                make(partial)

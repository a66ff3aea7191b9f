"""A share of a corpus's shards, and the locks that keep two runs from making the same one.

The locks lie in the corpus folder: `.lock` is held alone by a run of all shards and in common by
runs of parts, and each part holds one of its own.
"""

import errno
import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOCK = ".lock"


@dataclass(frozen=True)
class Part:
    """Every `count`-th shard, from number `index` on; both count from 0."""

    index: int
    count: int

    def __post_init__(self) -> None:
        """Refuse what is no part."""
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"--shard {self}: accepted: I/N, I from 0 to N - 1, such as 0/{max(self.count, 1)}"
            )

    def __str__(self) -> str:
        """As the user writes it."""
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Read "I/N".

        Raises:
            ValueError: It is something else.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ValueError(f"--shard {text}: accepted: I/N, I from 0 to N - 1, such as 0/4")
        return cls(int(index), int(count))


@contextmanager
def hold(output: Path, part: Part | None = None) -> Iterator[None]:
    """Keep other runs out: all of them, or those of the same part and those of the whole.

    Where the file system has no locks, stderr says so.

    Raises:
        ValueError: Another run is at work.
    """
    if part is None:
        with _locked(output / LOCK, fcntl.LOCK_EX, f"{output}: another prepare is at work"):
            yield
        return
    own = output / f"{LOCK}-{part.index}-of-{part.count}"
    with (
        _locked(output / LOCK, fcntl.LOCK_SH, f"{output}: a prepare of all shards is at work"),
        _locked(own, fcntl.LOCK_EX, f"{output}: another prepare of --shard {part} is at work"),
    ):
        yield


@contextmanager
def _locked(file: Path, kind: int, refusal: str) -> Iterator[None]:
    """Hold a lock; the system lets go when this process ends, however it ends."""
    with file.open("w") as descriptor:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{refusal} in this folder; wait for it or name another --output"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            message = "this file system has no locks; let no other prepare write here"
            print(f"prepare: {file}: {message}", file=sys.stderr, flush=True)
        yield

"""Parts of a corpus's shards, and the locks that keep two runs from making the same one.

The locks are files in the corpus folder. A run of all shards holds `.lock` exclusively; runs of
parts share it, and each holds a lock of its own part exclusively.
"""

import errno
import fcntl
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_prep.common.files import lock

LOCK = ".lock"


@dataclass(frozen=True)
class Part:
    """Every `count`-th shard, starting with number `index`; both count from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        """Return the form that a user writes, such as "0/4"."""
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Read "I/N".

        Raises:
            ValueError: The text has another form, or I is not below N.
        """
        found = re.fullmatch("([0-9]+)/([0-9]+)", text)
        if not found or int(found[1]) >= int(found[2]):
            raise ValueError(f"--shard {text}: accepted: I/N, I from 0 to N - 1, such as 0/4")
        return cls(int(found[1]), int(found[2]))


@contextmanager
def hold(output: Path, part: Part | None = None) -> Iterator[None]:
    """Lock a corpus folder: all of it, or one part of its shards.

    Where the file system does not support locks, a warning is printed to stderr.

    Raises:
        ValueError: Another run holds the lock.
    """
    if part is None:
        wanted = [(LOCK, "another prepare is at work", fcntl.LOCK_EX)]
    else:
        own = f"{LOCK}-{part.index}-of-{part.count}"
        wanted = [
            (LOCK, "a prepare of all shards is at work", fcntl.LOCK_SH),
            (own, f"another prepare of --shard {part} is at work", fcntl.LOCK_EX),
        ]
    with ExitStack() as held:
        for name, busy, kind in wanted:
            try:
                held.enter_context(lock(output / name, busy, kind))
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                message = "this file system has no locks; let no other prepare write here"
                print(f"prepare: {output / name}: {message}", file=sys.stderr, flush=True)
        yield

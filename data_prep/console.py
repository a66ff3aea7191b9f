"""Standard output and error that survive the end of a terminal and of a pipe's reader.

A command that runs for days is often started in a terminal that is closed, or piped into a program
that ends. Then every write fails, the interpreter's last flush included (exit code 120), and the
command's own exit code is lost. Every command of ours runs in `lasting`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

_GONE = {errno.EPIPE, errno.EIO, errno.ENXIO}
"""A write fails with one of these where nobody reads: a pipe, a terminal, a device."""


class _LastingStream:
    """A text stream that goes on as /dev/null once nobody can read it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        self._survive(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        self._survive(self._stream.flush)

    def finish(self) -> None:
        """Flush at a command's end, whatever is wrong with the file below."""
        try:
            self.flush()
        except OSError:
            self._discard()  # the command has reported it, or has its own exit code

    def _survive(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self._discard()

    def _discard(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        self._stream.flush()  # what was buffered

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the stream below
        return getattr(self._stream, name)


def install() -> None:
    """Let nothing in this process fail any more because nobody reads what it prints."""
    sys.stdout, sys.stderr = (
        cast(TextIO, _LastingStream(stream)) for stream in (sys.stdout, sys.stderr)
    )


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Let no command in the block fail because nobody reads what it prints.

    What cannot be read is dropped, and the command does its work to the end with its own exit code:
    it may have files to write yet. An error of another kind, such as a full disk below a file that
    output goes to, is raised as ever.
    """
    before = sys.stdout, sys.stderr
    install()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _LastingStream):
                stream.finish()
        sys.stdout, sys.stderr = before

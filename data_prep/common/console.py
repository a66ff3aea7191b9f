"""Standard output and error that keep working after the terminal or the pipe's reader is gone.

A command that runs for days is often started in a terminal that is closed later, or piped into a
program that ends first. From then on every write fails, including the interpreter's final flush
(exit code 120), and the command's own exit code is lost. All commands therefore run in
`survive_broken_pipe`. A character that the stream's encoding lacks is written as a Python escape;
raising an error would lose its text and everything after it.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

from data_prep.common.files import allow_open_files

_GONE = {errno.EPIPE, errno.EIO, errno.ENXIO}
"""Errors of a write to a pipe, terminal or device that nobody reads."""


class _LastingStream:
    """A text stream that is redirected to /dev/null when its reader is gone."""

    def __init__(self, stream: TextIO, name: str, is_result: bool) -> None:
        self._stream, self._name, self._is_result = stream, name, is_result

    def write(self, text: str) -> int:
        """Write or drop a text."""
        self._survive(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write or drop several texts."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Write or drop what is buffered."""
        self._survive(self._stream.flush)

    def finish(self) -> None:
        """Flush at the end of a command and ignore all errors of the underlying file."""
        try:
            self._stream.flush()
        except OSError:
            self._discard()  # the command has reported the error, or has its own exit code

    def _survive(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno in _GONE:
                self._discard()
            elif self._is_result:
                error.filename = self._name
                raise

    def _discard(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        self._stream.flush()  # what was buffered

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the wrapped stream
        return getattr(self._stream, name)


def install(is_result: bool = True) -> None:
    """Replace stdout and stderr of this process by lasting streams; see `survive_broken_pipe`."""
    # The number of a standard stream that was closed (`>&-`) must not become that of another file.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # a terminal took the place of a file
                stream.reconfigure(errors="backslashreplace")
    sys.stdout = cast(TextIO, _LastingStream(sys.stdout, "standard output", is_result))
    sys.stderr = cast(TextIO, _LastingStream(sys.stderr, "standard error", is_result))


@contextlib.contextmanager
def survive_broken_pipe(is_result: bool = True) -> Iterator[None]:
    """Make stdout and stderr lasting streams within the block, and allow many open files.

    Output that nobody can read is dropped, so that the command finishes its work, such as writing
    files, and returns its own exit code.

    Args:
        is_result: whether the output is what the command is for. Other errors than a reader's end,
            such as a full disk, are raised then, with the stream's name; else output is lost.
    """
    allow_open_files()  # here, because every command begins with it
    before = sys.stdout, sys.stderr
    install(is_result)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _LastingStream):
                stream.finish()
        sys.stdout, sys.stderr = before

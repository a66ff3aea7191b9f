"""Remove documents that contain texts of test sets, named by `--decontaminate`.

A document is contaminated if it contains an n-gram of 13 words of a test set (Brown et al. 2020,
appendix C, who cut such places out and keep the rest), by the words of words.py. A text of fewer
words is looked for as a whole if it has at least `LEAST_WORDS`, their lower limit too. Shorter
ones, such as the ids and labels of `.tsv` files, occur by chance and are left out.

1. `texts_of` reads the texts of a file: the cells of each line, divided by tabs, or the strings of
   each line of `.jsonl`. `digests` reads all files in advance, so that errors come before any work.
2. `write_ngrams`, once per corpus, writes the hashes of all n-grams to shards/contamination.ngrams.
3. `contaminated`, while a shard is made, tells which documents contain one. The reason names the
   first of the files, in the order of their names.

Memory of each worker: about 70 bytes per n-gram of the test sets.
"""

import glob
import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.common.files import sha256_of, strict_json, write_atomically
from data_prep.compressed import open_stream
from data_prep.documents import Document, Verdict
from data_prep.duplicates import STAMP_BYTES
from data_prep.inputs import suffix
from data_prep.json_lines import BadLine, parse
from data_prep.manifest import Settings
from data_prep.task import ShardTask
from data_prep.words import Hashes, ngram_hashes, ngrams_at, word_hashes

NGRAMS_SUFFIX = ".ngrams"
REASON = "contaminated"
LEAST_WORDS = 8
_TEXTS = 10_000  # hashed at once
_BOUNDARY = "\ue000"  # between texts: a word that no text has
_NGRAM = np.dtype([("words", "<u2"), ("hash", "<u8"), ("first", "<u8"), ("file", "<u2")])
"""Its number of words, its hash, that of its first words (as many as in the shortest), its file."""


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Return the files that match, sorted by name and without duplicates.

    Args:
        patterns: Files or glob patterns. A folder stands for the `.tsv` files in it, at any depth,
            except training sets (train*) and lists of ids (*_ids*): GLUE's development and test
            sets in a folder of TASK/dev.tsv or in one of these.

    Raises:
        ValueError: A pattern matches nothing.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matches = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)
        files = [file for match in matches for file in _files_of(Path(match))]
        if not files:
            raise ValueError(
                f"--decontaminate {pattern}: no such file; accepted: files of lines (.tsv, .txt, "
                ".jsonl, plain, .zst or .gz), or folders of .tsv files other than train*.tsv"
            )
        found.update(files)
    return sorted(found)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [
        file
        for file in path.rglob("*.tsv")
        if not file.name.startswith("train") and "_ids" not in file.name
    ]


def digests(files: Sequence[Path], size: int) -> dict[str, str]:
    """Read all files and return their hex sha256, by name.

    Raises:
        ValueError: A file cannot be read, or has no text of enough words.
    """
    for file in files:
        found = False
        for text in texts_of(file):
            found = found or len(word_hashes(text)) >= least_words(size)
        if not found:
            raise ValueError(
                f"{file}: no text of {least_words(size)} or more words, so there is nothing to "
                "look for"
            )
    return {str(file): sha256_of(file) for file in files}


def least_words(size: int) -> int:
    """Return the number of words of the shortest text that is looked for."""
    return min(size, LEAST_WORDS)


def texts_of(file: Path) -> Iterator[str]:
    """Yield the texts of a file of lines.

    Raises:
        ValueError: It is empty, not UTF-8, or a `.jsonl` file with a line that is not JSON.
    """
    number = 0
    with open_stream(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            try:
                yield from _strings(parse(line)) if suffix(file) == ".jsonl" else _cells(line)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: line {number}: not UTF-8") from error
            except BadLine as error:
                raise ValueError(
                    f"{file}: line {number}: {error}; each line must be a JSON value in UTF-8"
                ) from error
    if not number:
        raise ValueError(f"{file}: is empty")


def _cells(line: bytes) -> list[str]:
    return line.decode("utf-8-sig").split("\t")


def _strings(value: object) -> Iterator[str]:
    """Yield the strings in a value of JSON in their order; it may be nested deeply."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            left += reversed([*(value.values() if isinstance(value, dict) else value)])


def write_ngrams(tasks: Sequence[ShardTask]) -> None:
    """Write the n-grams of the files that the settings name, if they are missing or outdated.

    Raises:
        ValueError: A file has changed since its digest was taken.
    """
    settings = tasks[0].settings
    files, output = settings.decontaminate or {}, _file(tasks[0])
    if output.is_file() and output.read_bytes()[:STAMP_BYTES] == _stamp(settings):
        return
    found = [np.empty(0, _NGRAM)]
    for number, name in enumerate(sorted(files)):
        texts = texts_of(Path(name))
        while batch := list(islice(texts, _TEXTS)):
            found.append(_ngrams(batch, settings.decontaminate_ngram, number))
        if sha256_of(Path(name)) != files[name]:
            raise ValueError(f"{name}: changed since the start; run prepare again")
    ngrams = np.concatenate(found)
    ngrams = ngrams[np.lexsort((ngrams["hash"], ngrams["words"]))]  # stable: the first file stays
    is_repeat = ngrams["hash"][1:] == ngrams["hash"][:-1]
    is_repeat &= ngrams["words"][1:] == ngrams["words"][:-1]
    write_atomically(
        output, _stamp(settings) + np.delete(ngrams, 1 + np.flatnonzero(is_repeat)).tobytes()
    )


def contaminated(task: ShardTask) -> Verdict:
    """Return the filter of a task's documents.

    Raises:
        ValueError: The n-grams were not written, or are those of other files.
    """
    settings = task.settings
    reasons = [f"{REASON}:{label}" for label in labels(sorted(settings.decontaminate or {}))]
    ngrams = _load(_file(task), _stamp(settings), least_words(settings.decontaminate_ngram))

    def verdict(_: int, document: Document) -> str | None:
        found = ngrams.first_file(word_hashes(document.text))
        return None if found is None else reasons[found]

    return verdict


def labels(names: Sequence[str]) -> list[str]:
    """Return the names of files in short, such as "RTE/dev.tsv", if these differ."""
    short = ["/".join(Path(name).parts[-2:]) for name in names]
    return short if len(set(short)) == len(short) else list(names)


class _Ngrams:
    """The n-grams of the test sets, as a worker looks them up."""

    def __init__(self, ngrams: npt.NDArray[np.void], least: int) -> None:
        self._least = least
        self._firsts = np.unique(ngrams["first"])
        # Nearly all of a document's n-grams are found to be none of these by one look into a table.
        self._shift = np.uint64(64 - max(16 * len(self._firsts), 256).bit_length())
        self._may_be_first = np.zeros(1 << 64 - int(self._shift), dtype=bool)
        self._may_be_first[self._firsts >> self._shift] = True
        self._by_words = {
            int(words): (chosen["hash"].copy(), chosen["file"].copy())
            for words in np.unique(ngrams["words"])
            for chosen in [ngrams[ngrams["words"] == words]]
        }

    def first_file(self, words: Hashes) -> int | None:
        """Return the number of the first file with an n-gram of a text, or None."""
        files: list[int] = []
        start = 0
        for hashes in ngram_hashes(words, self._least):
            places = np.flatnonzero(self._may_be_first[hashes >> self._shift])
            places = start + places[_places_in(self._firsts, hashes[places]) >= 0]
            start += len(hashes)
            if not len(places):
                continue
            for size, (sought, file_of) in self._by_words.items():
                inside = places[places + size <= len(words)]
                found = _places_in(sought, ngrams_at(words, inside, size))
                files += file_of[found[found >= 0]].tolist()
        return min(files, default=None)


def _places_in(ordered: Hashes, hashes: Hashes) -> npt.NDArray[np.int64]:
    """Return the index of each hash among the ordered ones, or -1."""
    places = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    return np.where(ordered[places] == hashes, places, -1)


def _ngrams(texts: Sequence[str], size: int, file: int) -> npt.NDArray[np.void]:
    """Return the n-grams of texts; a text of fewer words is one, and a short one has none."""
    words = word_hashes("".join(f"{text}\n{_BOUNDARY}\n" for text in texts))
    ends = np.flatnonzero(words == word_hashes(_BOUNDARY))
    starts = np.append(-1, ends[:-1]) + 1
    lengths = ends - starts
    left = np.repeat(ends, lengths + 1) - np.arange(len(words))  # words of the text from each on
    least = least_words(size)
    found = [np.empty(0, _NGRAM)]
    for count in range(least, size + 1):
        places = np.flatnonzero(left >= size) if count == size else starts[lengths == count]
        ngrams = np.empty(len(places), _NGRAM)
        ngrams["words"], ngrams["file"] = count, file
        ngrams["hash"] = ngrams_at(words, places, count)
        ngrams["first"] = ngrams_at(words, places, least)
        found.append(ngrams)
    return np.concatenate(found)


def _stamp(settings: Settings) -> bytes:
    content = strict_json([settings.decontaminate, settings.decontaminate_ngram], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=STAMP_BYTES).digest()


def _file(task: ShardTask) -> Path:
    return task.corpus / "shards" / f"contamination{NGRAMS_SUFFIX}"


@lru_cache(maxsize=1)
def _load(file: Path, stamp: bytes, least: int) -> _Ngrams:
    content = file.read_bytes() if file.is_file() else b""
    if content[:STAMP_BYTES] != stamp:
        raise ValueError(f"{file}: missing or outdated; run prepare from its beginning")
    return _Ngrams(np.frombuffer(content, _NGRAM, offset=STAMP_BYTES), least)

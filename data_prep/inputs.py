"""What a user names as inputs, and how to tell whether an input is still the same.

    text/*.zst                     -> Path("text/00.jsonl.zst"), Path("text/01.jsonl.zst")
    lines:notes.txt                -> "lines:notes.txt"
    datasets:wikitext:default      -> "datasets:wikitext@COMMIT:default"

`documents.read` reads them.
"""

import glob
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data_prep.files import sha256_of

ACCEPTED = (
    "a .jsonl or .txt file (plain, .zst or .gz), a .parquet file, a folder written by "
    "datasets.Dataset.save_to_disk, lines:FILE, wikitext:FILE, datasets:NAME[:CONFIG[:SPLIT]]"
)
_PREFIXES = ("lines", "wikitext", "datasets")

# A path, or a string with a prefix: see `find_inputs`. A `Path` never has a prefix.
Input = Path | str


def find_inputs(words: Sequence[str]) -> list[Input]:
    """The inputs that a user names, in the order of their names, each once.

    Args:
        words: Files, folders or glob patterns, read as their names say; or one of these after a
            prefix: "lines:" makes a document of each line, blank ones too, as fairseq has it;
            "wikitext:" makes one of each article, which begins at " = Title = " between blank
            lines. Or "datasets:NAME:CONFIG:SPLIT", a dataset of the Hugging Face hub or a local
            folder of data files; without them its default configuration and its "train" split.
            NAME may end in "@REVISION"; where it does not, today's commit is added, so that what
            is read cannot change on the way.

    Raises:
        ValueError: A pattern matches nothing, or the hub does not know the dataset.
    """
    found: set[Input] = set()
    for word in words:
        prefix, place = split_prefix(word)
        if prefix == "datasets":
            found.add(_with_commit(word, place))
            continue
        matches = [place] if Path(place).exists() else glob.glob(place, recursive=True)
        if not matches:
            raise ValueError(f"--input {word}: no such file; accepted: files or glob patterns")
        found.update(f"{prefix}:{match}" if prefix else Path(match) for match in matches)
    return sorted(found, key=str)


def layout_of(source: Input) -> str:
    """How an input is read: the same bytes read otherwise are another input."""
    prefix, place = split_prefix(source)
    if prefix != "datasets":
        return prefix or suffix(Path(place))
    _, config, split = split_dataset(place)
    return f"{prefix}:{config}:{split}"


def input_state(source: Input) -> tuple[int, int]:
    """Size in bytes and time of the last change in ns, over all files; zeros for a dataset by name.

    A cheap sign that an input may have changed.
    """
    states = [file.stat() for file in _files(source)]
    return sum(s.st_size for s in states), max((s.st_mtime_ns for s in states), default=0)


def input_sha256(source: Input) -> str:
    """Hex sha256 of an input's bytes; of a dataset by name, of that name, which says its commit."""
    path = _local_path(source)
    if path is None:
        return hashlib.sha256(str(source).encode()).hexdigest()
    if not path.is_dir():
        return sha256_of(path)
    digest = hashlib.sha256()
    for file in _files(source):
        digest.update(f"{file.relative_to(path)} {sha256_of(file)}\n".encode())
    return digest.hexdigest()


def split_prefix(source: Input) -> tuple[str, str]:
    """The prefix of an input, or "", and the rest."""
    prefix, colon, place = str(source).partition(":")
    is_prefixed = isinstance(source, str) and colon and prefix in _PREFIXES
    return (prefix, place) if is_prefixed else ("", str(source))


def split_dataset(place: str) -> tuple[str, str, str]:
    """Name, configuration and split of what stands after "datasets:".

    Raises:
        ValueError: It has no name, or too many parts.
    """
    parts = place.split(":")
    if not parts[0] or len(parts) > 3:
        raise ValueError(f"datasets:{place}: accepted: datasets:NAME[:CONFIG[:SPLIT]]")
    name, config, split = (*parts, "", "")[:3]
    return name, config, split or "train"


def suffix(path: Path) -> str:
    """The suffix of a file's name, before that of its packing."""
    return path.with_suffix("").suffix if path.suffix in (".zst", ".gz") else path.suffix


@contextmanager
def blaming(source: str, kind: type[ValueError]) -> Iterator[None]:
    """Name the input in what libraries raise, which have errors of all kinds for damaged data."""
    try:
        yield
    except Exception as error:
        raise kind(f"{source}: cannot be read: {type(error).__name__}: {error}") from error


def _local_path(source: Input) -> Path | None:
    """The file or folder that is read; None for a dataset of the hub."""
    prefix, place = split_prefix(source)
    if prefix != "datasets":
        return Path(place)
    folder = Path(split_dataset(place)[0])
    return folder if folder.is_dir() else None


def _files(source: Input) -> list[Path]:
    path = _local_path(source)
    if path is None:
        return []
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _with_commit(word: str, place: str) -> str:
    """The name of a dataset with the commit that the hub has now; a local folder as it is."""
    name = split_dataset(place)[0]
    if "@" in name or Path(name).is_dir():
        return word
    from huggingface_hub import dataset_info

    with blaming(f"--input {word}: no folder {name}, and on the Hugging Face hub", ValueError):
        commit = dataset_info(name).sha
    return word.replace(name, f"{name}@{commit}", 1)

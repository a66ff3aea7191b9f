"""Find the inputs that a user names, and detect whether an input has changed.

    text/*.zst                     -> Path("text/00.jsonl.zst"), Path("text/01.jsonl.zst")
    lines:notes.txt                -> "lines:notes.txt"
    datasets:wikitext:default      -> "datasets:wikitext@COMMIT:default"

`documents.read_documents` reads them.
"""

import glob
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data_prep.common.files import sha256_of

ACCEPTED = (
    "a .jsonl, .ndjson, .json (an object a line) or .txt file (plain, .zst or .gz), a .parquet "
    "file, a folder of datasets.Dataset.save_to_disk, lines:FILE (a document per line), "
    "wikitext:FILE (a document per article), datasets:NAME[@REVISION][:CONFIG[:SPLIT]] (from the "
    "Hugging Face hub or a local folder)"
)
_PREFIXES = ("lines", "wikitext", "datasets")

# A path, or a string with a prefix (see `find_inputs`). A `Path` never has a prefix.
Input = Path | str


def find_inputs(patterns: Sequence[str]) -> list[Input]:
    """Return the inputs that match, sorted by name and without duplicates.

    A file that matches under several names (by ".." or links) and is read in the same way is one
    input, under the first name.

    Args:
        patterns: Files, folders or glob patterns, whose format follows from the name, or one of
            these after a prefix: "lines:" makes a document of each line, including blank lines as
            in fairseq; "wikitext:" makes one of each article, which begins at " = Title = " between
            blank lines. "datasets:NAME:CONFIG:SPLIT" is a dataset on the Hugging Face hub or a
            local folder of data files, by default its default configuration and "train" split. NAME
            may end in "@REVISION"; otherwise the current commit is added, so that later reads
            return the same data.

    Raises:
        ValueError: A pattern matches nothing, or the hub does not have the dataset.
    """
    found: set[Input] = set()
    for pattern in patterns:
        prefix, place = split_prefix(pattern)
        if prefix == "datasets":
            found.add(_with_commit(pattern, place))
            continue
        matches = [place] if Path(place).exists() else glob.glob(place, recursive=True)
        if not matches:
            raise ValueError(f"{pattern}: no such file, and no file fits the pattern")
        found.update(f"{prefix}:{match}" if prefix else Path(match) for match in matches)
    named = sorted(found, key=str, reverse=True)
    return sorted({(layout_of(s), place_of(s)): s for s in named}.values(), key=str)


def layout_of(source: Input) -> str:
    """Return the format that an input is read as."""
    prefix, place = split_prefix(source)
    if prefix != "datasets":
        return prefix or suffix(Path(place))
    _, config, split = split_dataset(place)
    return f"{prefix}:{config}:{split}"


def place_of(source: Input) -> Input:
    """Return the resolved path of an input, however it is read; of a dataset all that names it."""
    prefix, place = split_prefix(source)
    if prefix != "datasets":
        return Path(place).resolve()
    name, config, split = split_dataset(place)
    folder = _local_path(source)
    return f"{prefix}:{folder.resolve() if folder else name}:{config}:{split}"


def input_state(source: Input) -> tuple[int, int]:
    """Return total size in bytes and latest modification time in ns of an input's files.

    Both are zero for a dataset on the hub. A different state means that the input may have changed.
    """
    states = [file.stat() for file in _files(source)]
    return sum(s.st_size for s in states), max((s.st_mtime_ns for s in states), default=0)


def input_sha256(source: Input) -> str:
    """Return the hex sha256 of an input's bytes, or of the name of a dataset on the hub."""
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
    """Split an input into its prefix, or "", and the rest."""
    prefix, colon, place = str(source).partition(":")
    is_prefixed = isinstance(source, str) and colon and prefix in _PREFIXES
    return (prefix, place) if is_prefixed else ("", str(source))


def split_dataset(place: str) -> tuple[str, str, str]:
    """Split the text after "datasets:" into name, configuration and split.

    Raises:
        ValueError: It has no name, or too many parts.
    """
    parts = place.split(":")
    if not parts[0] or len(parts) > 3:
        raise ValueError(f"datasets:{place}: is not of the form datasets:NAME[:CONFIG[:SPLIT]]")
    name, config, split = (*parts, "", "")[:3]
    return name, config, split or "train"


def suffix(path: Path) -> str:
    """Return the suffix of a file name, without that of its compression."""
    return path.with_suffix("").suffix if path.suffix in (".zst", ".gz") else path.suffix


@contextmanager
def naming_input(source: str, kind: type[ValueError]) -> Iterator[None]:
    """Convert any exception of a library into `kind` with the name of the input.

    Libraries raise exceptions of many types for damaged data.
    """
    try:
        yield
    except Exception as error:
        raise kind(f"{source}: cannot be read: {type(error).__name__}: {error}") from error


def _local_path(source: Input) -> Path | None:
    """Return the file or folder of an input; None for a dataset on the hub."""
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


def _with_commit(pattern: str, place: str) -> str:
    """Add the current commit to the name of a dataset on the hub."""
    name = split_dataset(place)[0]
    if "@" in name or Path(name).is_dir():
        return pattern
    from huggingface_hub import dataset_info

    with naming_input(f"{pattern}: no folder {name}, and on the hub", ValueError):
        commit = dataset_info(name).sha
    return f"datasets:{name}@{commit}{place.removeprefix(name)}"

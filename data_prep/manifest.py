"""What was made, from what, with what: the records that stand beside the data.

A `ShardManifest` is written when a shard is whole, the `CorpusManifest` when all are. Both are
plain JSON.
"""

import hashlib
import json
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TypeVar, cast, get_args, get_origin, get_type_hints

from data_prep.files import strict_json, write_atomically

FORMAT_VERSION = 2
FILE_NAME = "manifest.json"
SPLITS = ("train", "valid")
CHOICES = {
    "long": ("drop", "truncate", "split"),
    "duplicates": ("keep", "drop"),
    "damaged": ("fail", "keep"),
    "unit": ("document", "sentence"),
}
ROLES = ("both", "train", "valid")

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What a user decides about a corpus; lengths count `<s>`, the ids and `</s>`."""

    max_tokens: int = 2048
    long: str = "drop"  # what happens to longer documents
    min_tokens: int = 0
    valid_fraction: float = 0.001
    duplicates: str = "keep"  # what happens to a text that came before, in whatever input
    damaged: str = "fail"  # what happens to an input cut short: no shard, or what was whole
    unit: str = "document"  # what a sequence of the binaries is

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        object.__setattr__(self, "valid_fraction", float(self.valid_fraction))  # 0 is a fraction
        if self.max_tokens < 3:
            raise ValueError(
                f"max-tokens {self.max_tokens}: accepted: 3 (<s>, one id, </s>) or more"
            )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min-tokens {self.min_tokens}: accepted: 0 to max-tokens ({self.max_tokens})"
            )
        for name, accepted in CHOICES.items():
            if getattr(self, name) not in accepted:
                value = getattr(self, name)
                raise ValueError(f"{name} {value!r}: accepted: {', '.join(accepted)}")
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(
                f"valid-fraction {self.valid_fraction}: accepted: 0 or more, and less than 1"
            )


@dataclass(frozen=True)
class InputFile:
    """An input as it was when it was read."""

    path: str
    size_bytes: int
    sha256: str
    role: str = "both"  # the splits that its documents go to: one of ROLES


@dataclass
class Count:
    """Documents, the ids written for them (`</s>` included) and the UTF-8 bytes of their text."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, other: "Count") -> None:
        """Add `other` to this."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes


@dataclass
class Rejects:
    """Documents rejected for one reason: how many by subset, and where the first were."""

    by_subset: dict[str, int]
    places: list[str]

    @property
    def count(self) -> int:
        """Documents rejected for this reason."""
        return sum(self.by_subset.values())


@dataclass(frozen=True)
class ShardFiles:
    """One split of one shard: `stem.bin`, `stem.idx`, `stem.subsets`, `stem.counts`.

    `.subsets` holds a uint8 for each document, an index into `subsets`; `.counts` says how often
    each id occurs (see statistics.py).
    """

    stem: str  # relative to the corpus folder, as "train/shard-00000"
    documents: int
    sequences: int  # as many as documents, or their sentences
    tokens: int
    size_bytes: int  # of the .bin
    bin_sha256: str
    idx_sha256: str
    subsets_sha256: str
    counts_sha256: str
    subsets: list[str]


@dataclass(frozen=True)
class LengthHistogram:
    """Document lengths before filtering, counting `<s>`, the ids and `</s>`.

    counts[i] documents have upper_edges[i-1] < length <= upper_edges[i] tokens.
    """

    upper_edges: list[int]
    counts: list[int]
    share_over_1024: float
    share_over_2048: float


@dataclass(frozen=True)
class ShardManifest:
    """One input and what became of it."""

    format_version: int
    input: InputFile
    input_modified_ns: int
    settings: Settings
    tokenizer_digest: str
    encoder: str  # library and version that gave the ids; for the record, ids do not depend on it
    damage: str | None  # what was wrong with an input that was kept as far as it was whole
    files: dict[str, ShardFiles]  # by split; a split without documents has no files
    kept: dict[str, dict[str, Count]]  # by split and subset
    cut: int  # documents shortened or made into windows, as settings.long says
    rejects: dict[str, Rejects]  # by reason
    length_counts: list[int]


@dataclass(frozen=True)
class CorpusManifest:
    """A prepared folder."""

    format_version: int
    tokenizer_digest: str
    vocab_size: int
    special_ids: dict[str, int]
    dtype: str
    encoders: list[str]
    settings: Settings
    damages: list[str]
    inputs: list[InputFile]
    shards: dict[str, list[ShardFiles]]  # by split, in the order of the inputs
    subsets: list[str]
    totals: dict[str, Count]  # by split
    kept: dict[str, dict[str, Count]]  # by split and subset
    cut: int
    rejects: dict[str, Rejects]  # by reason
    length_histogram: LengthHistogram
    unigram_perplexity: float | None  # None where a split is empty

    def digest(self) -> str:
        """Hex sha256 that identifies the documents, their order and their ids."""
        identity = {
            "tokenizer": self.tokenizer_digest,
            "shards": {
                split: [[files.bin_sha256, files.idx_sha256] for files in shards]
                for split, shards in self.shards.items()
            },
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def load_manifest(folder: Path) -> CorpusManifest:
    """Read the manifest of a prepared folder.

    Raises:
        ValueError: The folder is missing, is no corpus, was not finished, or its manifest is
        damaged.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder; accepted: a folder written by `data_prep prepare`"
        )
    file = folder / FILE_NAME
    if not file.is_file():
        if (folder / "shards").is_dir():
            raise ValueError(
                f"{folder}: its prepare is not finished (no {FILE_NAME}); run the same command "
                "again: it goes on where it stopped"
            )
        raise ValueError(
            f"{folder}: no {FILE_NAME}; accepted: a folder written by `data_prep prepare`"
        )
    return read_record(CorpusManifest, file)


def write_record(file: Path, record: CorpusManifest | ShardManifest) -> None:
    """Write a manifest, complete or not at all."""
    text = strict_json(asdict(record), indent=1, ensure_ascii=False, sort_keys=True)
    write_atomically(file, (text + "\n").encode())


def read_record(kind: type[T], file: Path) -> T:
    """Read a manifest of the given kind.

    Raises:
        ValueError: Not JSON, of another format version, or a field is missing, unknown or mistyped.
    """
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: damaged, not JSON: {error}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"{file}: format version {version!r}; accepted: {FORMAT_VERSION}")
    return cast(T, _decode(kind, content, str(file)))


def _decode(kind: object, value: object, where: str) -> object:
    """Build a value of the annotated type `kind` from what JSON gave."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _decode(arguments[0], value, where)
    if origin is list and isinstance(value, list):
        return [_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise ValueError(f"{where}: {value!r}; accepted: {kind}")


def _decode_dataclass(kind: type, value: object, where: str) -> object:
    """A field with a default may be missing: an earlier version did not write it."""
    names = [field.name for field in fields(kind)]
    accepted = f"accepted: an object with {', '.join(names)}"
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r}; {accepted}")
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    if not needed <= set(value) <= set(names):
        missing, unknown = sorted(needed - set(value)), sorted(set(value) - set(names))
        raise ValueError(f"{where}: missing {missing}, unknown {unknown}; {accepted}")
    hints = get_type_hints(kind)
    return kind(
        **{key: _decode(hints[key], item, f"{where}: {key}") for key, item in value.items()}
    )

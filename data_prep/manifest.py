"""Manifests of a corpus: its inputs, settings, files and counts, as JSON beside the data.

A `ShardTask` says what to make; its `ShardManifest` is written when the shard is complete, the
`CorpusManifest` when all are.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from data_prep.common.files import (
    check_format,
    named_errors,
    read_json,
    strict_json,
    write_atomically,
)
from data_prep.common.records import decode
from data_prep.inputs import Input

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"
SPLITS = ("train", "valid")
ROLES = ("both", "train", "valid")
BLANK_LINES = "blank-lines"
NO_SEPARATOR = "none"
"""Values of `--document-separator`; another one is the text of a line."""
PLACES_KEPT = 5  # examples per reject reason

T = TypeVar("T")
N = TypeVar("N", int, "Count")


@dataclass(frozen=True)
class Settings:
    """Settings of a corpus; lengths count `<s>`, the ids and `</s>`."""

    max_tokens: int | None = None  # None: no limit
    long: Literal["drop", "truncate", "split"] = "drop"  # what happens to longer documents
    min_tokens: int = 0
    valid_fraction: float = 0.001
    # a truncated input: refuse it, or keep its complete records
    damaged: Literal["fail", "keep"] = "fail"
    unit: Literal["document", "sentence"] = "document"  # what one sequence of the binaries is
    text_key: str = "text"  # of JSON objects and tables; dots separate the keys of nested objects
    subset_key: str = "meta.pile_set_name"
    document_separator: str = BLANK_LINES  # of .txt files
    subset: str = ""  # the only subset whose documents are kept; empty: all are
    filters: list[str] = field(default_factory=list)  # the user's own, package.module:function

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        object.__setattr__(self, "valid_fraction", float(self.valid_fraction))  # 0 is a fraction
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(f"valid-fraction {self.valid_fraction}: accepted: 0 to below 1")
        if self.max_tokens is None and self.long != "drop":
            raise ValueError(f"long {self.long!r} needs max-tokens, the longest piece's length")
        if self.max_tokens is not None and self.max_tokens < 3:
            raise ValueError(f"max-tokens {self.max_tokens}: accepted: 3 (<s>, id, </s>) or more")
        if self.min_tokens < 0 or self.min_tokens > (self.max_tokens or self.min_tokens):
            most = "or more" if self.max_tokens is None else f"to max-tokens ({self.max_tokens})"
            raise ValueError(f"min-tokens {self.min_tokens}: accepted: 0 {most}")


@dataclass(frozen=True)
class ShardTask:
    """Description of the work on one shard, small enough to send to any process.

    The vocabulary is read from the corpus folder.
    """

    index: int
    input: Input
    corpus: Path
    settings: Settings
    tokenizer_digest: str
    role: str = "both"

    @property
    def name(self) -> str:
        """File stem of the shard."""
        return f"shard-{self.index:05d}"

    @property
    def manifest_file(self) -> Path:
        """The shard's manifest, which is written last and marks the shard as finished."""
        return self.corpus / "shards" / f"{self.name}.json"


@dataclass(frozen=True)
class InputFile:
    """An input file as it was when it was read."""

    path: str
    size_bytes: int
    sha256: str
    role: str = "both"  # one of ROLES: the splits that its documents go to


@dataclass(frozen=True)
class Count:
    """Documents, their ids (`</s>` included) and the UTF-8 bytes of their text."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def __add__(self, other: "Count") -> "Count":
        """Return the sum, so that `sum(counts, Count())` gives that of several."""
        return Count(
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.text_bytes + other.text_bytes,
        )


@dataclass
class Rejects:
    """Documents rejected for one reason, by subset, and the places of the first ones.

    All bytes of a broken record count as `text_bytes`.
    """

    by_subset: dict[str, int]
    places: list[str]
    text_bytes: dict[str, int]
    tokens: dict[str, int] | None = None  # None: not encoded

    @property
    def count(self) -> int:
        """Documents rejected for this reason."""
        return sum(self.by_subset.values())

    @property
    def total(self) -> Count:
        """All of them; without tokens where they were not encoded."""
        tokens = sum((self.tokens or {}).values())
        return Count(self.count, tokens, sum(self.text_bytes.values()))

    def add(self, other: "Rejects") -> None:
        """Add the documents of `other`, which come later."""
        add_counts(self.by_subset, other.by_subset)
        add_counts(self.text_bytes, other.text_bytes)
        if self.tokens is None or other.tokens is None:
            self.tokens = None
        else:
            add_counts(self.tokens, other.tokens)
        self.places += other.places[: PLACES_KEPT - len(self.places)]


def add_counts(counts: dict[str, N], more: Mapping[str, N]) -> None:
    """Add the counts `more`, by name, to `counts`."""
    for name, number in more.items():
        counts[name] = counts[name] + number if name in counts else number


@dataclass
class Tally:
    """What became of the documents of a shard or a corpus."""

    kept: dict[str, dict[str, Count]]  # by split and subset
    rejects: dict[str, Rejects]  # by reason
    cut: int  # documents truncated or split, as settings.long says
    cut_tokens: int  # removed from truncated documents
    cut_bytes: int = field(default=0, kw_only=True)  # of text, estimated from the share of tokens

    def keep(self, split: str, subset: str, count: Count) -> None:
        """Count documents written to a split."""
        add_counts(self.kept.setdefault(split, {}), {subset: count})

    def reject(self, reason: str, rejects: Rejects) -> None:
        """Count rejected documents."""
        self.rejects.setdefault(reason, Rejects({}, [], {}, {})).add(rejects)

    def add(self, other: "Tally") -> None:
        """Add the counts of a later shard."""
        for split, subsets in other.kept.items():
            add_counts(self.kept.setdefault(split, {}), subsets)
        for reason, rejects in other.rejects.items():
            self.reject(reason, rejects)
        self.cut += other.cut
        self.cut_tokens += other.cut_tokens
        self.cut_bytes += other.cut_bytes

    def rejects_summary(self) -> str:
        """Return the rejects as "3 too-long (first at a.jsonl:7), 1 not-json (first at ...)"."""
        parts = self.by_frequency()
        return ", ".join(f"{r.count} {reason} (first at {r.places[0]})" for reason, r in parts)

    def by_frequency(self) -> list[tuple[str, Rejects]]:
        """Return the reasons and their rejects, most frequent first."""
        return sorted(self.rejects.items(), key=lambda item: (-item[1].count, item[0]))


@dataclass(frozen=True)
class ShardFiles:
    """One split of one shard: `stem.bin`, `stem.idx`, `stem.subsets`, `stem.counts`.

    `.subsets` holds a uint8 for each document, an index into `subsets`; `.counts` holds the
    number of occurrences of each id (see statistics.py).
    """

    stem: str  # relative to the corpus folder, such as "train/shard-00000"
    documents: int
    sequences: int  # as many as documents, or their sentences
    tokens: int
    size_bytes: int  # of the .bin
    bin_sha256: str
    idx_sha256: str
    subsets_sha256: str
    counts_sha256: str
    subsets: list[str]

    def __post_init__(self) -> None:
        """Refuse the name of a file that is not of a corpus."""
        if not re.fullmatch(rf"({'|'.join(SPLITS)})/shard-\d+", self.stem, re.ASCII):
            raise ValueError(f"stem {self.stem!r}: accepted: such as train/shard-00000")

    @property
    def hashes(self) -> dict[str, str]:
        """Hex sha256 of each file, by its name relative to the corpus folder."""
        suffixes = ("bin", "idx", "subsets", "counts")
        return {f"{self.stem}.{each}": getattr(self, f"{each}_sha256") for each in suffixes}


@dataclass(frozen=True)
class LengthHistogram:
    """Lengths of encoded documents before filtering by length, with `<s>` and `</s>`.

    counts[i] documents have upper_edges[i-1] < length <= upper_edges[i] tokens.
    """

    upper_edges: list[int]
    counts: list[int]
    share_over_1024: float
    share_over_2048: float


@dataclass
class ShardManifest(Tally):
    """One input, and the shard made from it."""

    format_version: int
    input: InputFile
    input_modified_ns: int
    settings: Settings
    tokenizer_digest: str
    encoder: str  # library and version that made the ids, which do not depend on it
    damage: str | None  # of an input whose complete records were kept
    files: dict[str, ShardFiles]  # by split; a split without documents has no files
    length_counts: list[int]


@dataclass
class CorpusManifest(Tally):
    """A prepared corpus."""

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
    length_histogram: LengthHistogram
    unigram_perplexity: float | None  # None where a split is empty

    def __post_init__(self) -> None:
        """Refuse other splits."""
        if not self.shards.keys() == self.totals.keys() == {*SPLITS}:
            raise ValueError(f"shards and totals: their keys must be {' and '.join(SPLITS)}")

    @property
    def hashes(self) -> dict[str, str]:
        """Hex sha256 of each of the shards' files, by its name relative to the corpus folder."""
        shards = [files for split in self.shards.values() for files in split]
        return {name: digest for files in shards for name, digest in files.hashes.items()}

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
        ValueError: The folder is missing, is not a corpus, is not finished, or its manifest is
            damaged.
    """
    remedy = "choose a folder that `zeroclap prepare` wrote"
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; {remedy}")
    file = folder / FILE_NAME
    if not file.is_file():
        if (folder / "shards").is_dir():
            raise ValueError(
                f"{folder}: its prepare is not finished (no {FILE_NAME}); run the same command "
                "again: it continues where it stopped"
            )
        raise ValueError(f"{folder}: no {FILE_NAME}; {remedy}")
    return read_record(CorpusManifest, file)


def write_record(file: Path, record: CorpusManifest | ShardManifest) -> None:
    """Write a manifest, complete or not at all."""
    text = strict_json(asdict(record), indent=1, ensure_ascii=False, sort_keys=True)
    # The name of an input need not be UTF-8: "?" stands for a byte of it that is not.
    write_atomically(file, (text + "\n").encode(errors="replace"))


def read_record(kind: type[T], file: Path) -> T:
    """Read a manifest of the given kind.

    Raises:
        ValueError: Not JSON, of another format version, or a field is missing, unknown or of
            another type.
    """
    content = read_json(file)
    check_format(content.get("format_version", 1), FORMAT_VERSION, file)
    with named_errors(file):
        return decode(kind, content)

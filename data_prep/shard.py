"""Make one shard from one input: read, encode, filter, split, write.

The task is idempotent: the same input, settings and vocabulary give the same bytes. An engine may
therefore run it on any machine and any number of times. `run` does not ask for a finished shard.

`prepare_shard` reads top to bottom; the classes below it hold its state.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from data_prep.common.files import write_atomically
from data_prep.common.wording import changes
from data_prep.documents import Document, Reject, content_share, read_documents
from data_prep.encoders import Encoder, Ids
from data_prep.filters import filtered, judge, windows
from data_prep.indexed import IndexedWriter
from data_prep.inputs import Input, input_sha256, input_state, layout_of
from data_prep.manifest import (
    FORMAT_VERSION,
    SPLITS,
    Count,
    InputFile,
    Rejects,
    ShardFiles,
    ShardManifest,
    ShardTask,
    Tally,
    read_record,
    write_record,
)
from data_prep.progress import Done, Progress
from data_prep.sentences import cut_lengths, encode_sentences
from data_prep.statistics import UPPER_EDGES, count_lengths, write_counts
from data_prep.tokenizer import FILE_NAME as TOKENIZER_FILE
from data_prep.tokenizer import Tokenizer, load

_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 4_000_000  # bounds memory if documents are long
MAX_SUBSETS = 256  # a uint8 numbers them


def existing_manifest(task: ShardTask) -> ShardManifest | None:
    """Return the manifest of a finished shard, or None if the shard has to be made.

    Raises:
        ValueError: The shard was made from another input, with other settings or another
            vocabulary.
    """
    if not task.manifest_file.is_file():
        return None
    manifest = read_record(ShardManifest, task.manifest_file)
    if changed := _changed(task, manifest):
        if not manifest.kept:
            return None  # what was changed may be the reason
        raise ValueError(
            f"{task.corpus}: {task.name} was prepared differently: {'; '.join(changed)}. "
            "Name another --output, or use --overwrite to make the corpus again"
        )
    for files in manifest.files.values():
        paths = [task.corpus / name for name in files.hashes]
        if not all(map(Path.is_file, paths)) or paths[0].stat().st_size != files.size_bytes:
            return None
    return manifest


def prepare_shard(task: ShardTask, progress: Progress = lambda _: None) -> ShardManifest:
    """Make one shard, in place of an existing one.

    Raises:
        ValueError: The input is damaged, or changed while it was read. No files are left then.
    """
    before = input_state(task.input)
    input_file = InputFile(str(task.input), before[0], input_sha256(task.input), task.role)
    tokenizer, encoder = _vocabulary(task.corpus, task.tokenizer_digest)
    shard = _Shard(task, tokenizer)
    damages: list[str] = []
    settings = task.settings
    kept_damages = damages if settings.damaged == "keep" else None
    records = read_documents(task.input, settings, kept_damages)
    try:
        for batch in _batches(shard.take_documents(filtered(records, settings))):
            texts = [document.text for document in batch]
            if settings.unit == "sentence":
                shard.add(batch, *encode_sentences(texts, encoder.encode))
            else:
                encoded = encoder.encode(texts)
                shard.add(batch, encoded, [[len(ids)] for ids in encoded])
            progress(Done(shard.documents, shard.text_bytes, shard.tokens))
        if input_state(task.input) != before:
            raise ValueError(f"{task.input}: changed while it was read")
        progress(Done(shard.documents, shard.text_bytes, shard.tokens, before[0]))
        manifest = ShardManifest(
            format_version=FORMAT_VERSION,
            input=input_file,
            input_modified_ns=before[1],
            settings=settings,
            tokenizer_digest=task.tokenizer_digest,
            encoder=encoder.name,
            damage="; ".join(damages) or None,
            files=shard.close(),
            **vars(shard.tally),
            length_counts=shard.length_counts.tolist(),
        )
        write_record(task.manifest_file, manifest)
    finally:
        shard.discard()
    return manifest


@lru_cache(maxsize=1)  # building an encoder takes as long as encoding 20 MB of text
def _vocabulary(corpus: Path, digest: str) -> tuple[Tokenizer, Encoder]:
    tokenizer = load(corpus / TOKENIZER_FILE)
    return tokenizer, Encoder(tokenizer)


class _Shard:
    """A shard in the making: one writer per split, and the counts."""

    def __init__(self, task: ShardTask, tokenizer: Tokenizer) -> None:
        self._settings = task.settings
        self._role = task.role
        self._splits = {split: _SplitWriter(task, split, tokenizer) for split in SPLITS}
        self.tally = Tally({}, {}, 0, 0)
        self.length_counts = np.zeros(len(UPPER_EDGES), dtype=np.int64)
        self.documents = 0
        self.text_bytes = 0
        self.tokens = 0

    def take_documents(self, records: Iterable[Document | Reject]) -> Iterator[Document]:
        """Yield the documents and count the rejects."""
        for record in records:
            self.documents += 1
            if isinstance(record, Document):
                yield record
            else:
                self.text_bytes += record.text_bytes
                self._reject(record.reason, record, record.text_bytes)

    def add(self, batch: list[Document], encoded: list[Ids], lengths: list[list[int]]) -> None:
        """Filter encoded documents with these sequence lengths, and write those that are kept."""
        self.length_counts += count_lengths([len(ids) + 2 for ids in encoded])
        self.tokens += sum(map(len, encoded))
        for document, ids, of_sequences in zip(batch, encoded, lengths, strict=True):
            self._add_one(document, ids, of_sequences)
        for writer in self._splits.values():
            writer.flush()

    def _add_one(self, document: Document, ids: Ids, lengths: list[int]) -> None:
        text = document.text.encode()
        self.text_bytes += len(text)
        if (split := self._role) == "both":  # of the document and all its windows
            is_valid = content_share(text, "valid") < self._settings.valid_fraction
            split = "valid" if is_valid else "train"
        pieces = windows(ids, self._settings)
        self.tally.cut += pieces[0].size < ids.size
        left, left_bytes = ids.size, len(text)
        lengths_of_pieces = cut_lengths(lengths, [len(piece) for piece in pieces])
        for piece, of_sequences in zip(pieces, lengths_of_pieces, strict=True):
            # Estimated from the share of the ids; the bytes of all pieces add up to the text's.
            text_bytes = left_bytes * piece.size // left if left else left_bytes
            left, left_bytes = left - piece.size, left_bytes - text_bytes
            if reason := judge(len(piece) + 2, self._settings):
                self._reject(reason, document, text_bytes, len(piece) + 1)
            else:
                self._splits[split].append(piece, of_sequences, document)
                self.tally.keep(split, document.subset, Count(1, len(piece) + 1, text_bytes))
        self.tally.cut_tokens += left
        self.tally.cut_bytes += left_bytes

    def close(self) -> dict[str, ShardFiles]:
        """Finish the files; splits without documents have none."""
        return {split: files for split in SPLITS if (files := self._splits[split].close())}

    def discard(self) -> None:
        """Remove what was not closed."""
        for writer in self._splits.values():
            writer.indexed.discard()

    def _reject(
        self, reason: str, record: Document | Reject, text_bytes: int, tokens: int | None = None
    ) -> None:
        subset = record.subset
        rejects = Rejects(
            by_subset={subset: 1},
            places=[f"{record.source_file}:{record.line}"],
            text_bytes={subset: text_bytes},
            tokens=None if tokens is None else {subset: tokens},
        )
        self.tally.reject(reason, rejects)


class _SplitWriter:
    """Writes the files of one split: ids, index, subsets, counts. `flush` writes appended ids."""

    def __init__(self, task: ShardTask, split: str, tokenizer: Tokenizer) -> None:
        self._stem = f"{split}/{task.name}"
        self._prefix = task.corpus / self._stem
        self._subset_key = task.settings.subset_key
        self.indexed = IndexedWriter(self._prefix, tokenizer.vocab_size)
        self._subsets: dict[str, int] = {}
        self._subset_numbers = bytearray()
        self._end = np.array([tokenizer.eos_id], dtype=np.int32)
        self._counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)

    def append(self, ids: Ids, lengths: Sequence[int], document: Document) -> None:
        number = self._subsets.setdefault(document.subset, len(self._subsets))
        if number >= MAX_SUBSETS:
            raise ValueError(
                f"{document.source_file}:{document.line}: subset {document.subset!r} is one too "
                f"many; accepted: {MAX_SUBSETS} different values of {self._subset_key}"
            )
        *others, last = lengths or [0]
        # The last sequence includes `</s>`.
        self.indexed.append((ids, self._end), [*others, last + 1])
        self._subset_numbers.append(number)

    def flush(self) -> None:
        self._counts += np.bincount(self.indexed.flush(), minlength=len(self._counts))

    def close(self) -> ShardFiles | None:
        if not self._subset_numbers:
            return None
        data, index = self.indexed.close()
        subsets = write_atomically(Path(f"{self._prefix}.subsets"), bytes(self._subset_numbers))
        return ShardFiles(
            stem=self._stem,
            documents=len(self._subset_numbers),
            sequences=len(self.indexed.lengths),
            tokens=int(self._counts.sum()),
            size_bytes=data.size_bytes,
            bin_sha256=data.sha256,
            idx_sha256=index.sha256,
            subsets_sha256=subsets.sha256,
            counts_sha256=write_counts(self._prefix, self._counts).sha256,
            subsets=list(self._subsets),
        )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _changed(task: ShardTask, manifest: ShardManifest) -> list[str]:
    """Say how an existing shard differs from the one that the task describes."""
    then = {**vars(manifest.settings), "tokenizer": manifest.tokenizer_digest[:12]}
    now = {**vars(task.settings), "tokenizer": task.tokenizer_digest[:12]}
    then["role"], now["role"] = manifest.input.role, task.role
    changed = [
        f"{name.replace('_', '-')} was {_shown(was)} and is {_shown(is_now)}"
        for name, was, is_now in changes(then, now)
    ]
    if not _is_same_input(task.input, manifest):
        changed.append(f"input {task.input} differs from what was read ({manifest.input.path})")
    return changed


def _shown(setting: object) -> object:
    return "not given" if setting in (None, "") else setting


def _is_same_input(source: Input, manifest: ShardManifest) -> bool:
    size_bytes, modified_ns = input_state(source)
    if size_bytes != manifest.input.size_bytes:
        return False
    if str(source) == manifest.input.path and modified_ns == manifest.input_modified_ns:
        return True
    is_same_layout = layout_of(source) == layout_of(manifest.input.path)
    return is_same_layout and input_sha256(source) == manifest.input.sha256

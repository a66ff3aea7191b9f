"""Is a corpus folder what its manifest says?"""

from collections.abc import Iterator
from pathlib import Path

from data_prep.files import sha256_of
from data_prep.indexed import check_indexed, read_ids, read_lengths
from data_prep.manifest import CorpusManifest, ShardFiles, load_manifest
from data_prep.tokenizer import FILE_NAME as TOKENIZER_FILE
from data_prep.tokenizer import load


def verify(folder: Path) -> Iterator[str]:
    """What is wrong, a line each, naming the file; nothing when all is well.

    Checks the vocabulary against its digest, every checksum, every index against its data, every id
    against the vocabulary size, and that every document ends with `</s>`.

    Raises:
        ValueError: There is no manifest to check against.
    """
    manifest = load_manifest(folder)
    yield from _check_tokenizer(folder, manifest)
    for shards in manifest.shards.values():
        for files in shards:
            problem = _checksum_problem(folder, files) or _content_problem(folder, files, manifest)
            if problem:
                yield problem


def _check_tokenizer(folder: Path, manifest: CorpusManifest) -> Iterator[str]:
    try:
        digest = load(folder).digest()
    except ValueError as error:
        yield str(error)
        return
    if digest != manifest.tokenizer_digest:
        yield f"{folder / TOKENIZER_FILE}: not the vocabulary that the corpus was made with"


def _checksum_problem(folder: Path, files: ShardFiles) -> str | None:
    for suffix, expected in (
        (".bin", files.bin_sha256),
        (".idx", files.idx_sha256),
        (".subsets", files.subsets_sha256),
    ):
        file = folder / f"{files.stem}{suffix}"
        if not file.is_file():
            return f"{file}: no such file"
        if (found := sha256_of(file)) != expected:
            return f"{file}: sha256 is {found}, but the manifest speaks of {expected}"
    return None


def _content_problem(folder: Path, files: ShardFiles, manifest: CorpusManifest) -> str | None:
    prefix = folder / files.stem
    try:
        check_indexed(prefix)
    except ValueError as error:
        return str(error)
    lengths, ids = read_lengths(prefix), read_ids(prefix)
    if (len(lengths), len(ids)) != (files.documents, files.tokens):
        return (
            f"{prefix}.idx: {len(lengths)} documents and {len(ids)} tokens, but the manifest "
            f"speaks of {files.documents} and {files.tokens}"
        )
    if int(ids.max()) >= manifest.vocab_size:
        return f"{prefix}.bin: id {ids.max()} in a vocabulary of {manifest.vocab_size}"
    if (ids[lengths.cumsum(dtype="int64") - 1] != manifest.special_ids["eos"]).any():
        return f"{prefix}.bin: a document does not end with </s>"
    return None

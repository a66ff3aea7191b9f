"""The command `train-tokenizer`: train a vocabulary on the documents of some inputs."""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from data_prep import unigram
from data_prep.common.files import check_new
from data_prep.documents import Document, Reject, read_documents
from data_prep.fields import add_reading_arguments
from data_prep.inputs import find_inputs
from data_prep.manifest import Settings
from data_prep.progress import Done, ProgressReport
from data_prep.tokenizer import FILE_NAME, Tokenizer, train, train_characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_reading_arguments(parser)
    kind = parser.add_mutually_exclusive_group(required=True)
    size = "number of ids, including special tokens. Training holds all different words in memory "
    size += "(1.2 GB for 223 MB of text): of a large corpus name some inputs only"
    kind.add_argument("--vocab-size", type=int, help=size)
    kind.add_argument("--characters", action="store_true", help="use one id per character instead")
    unigram = "train a unigram model, as SentencePiece does for ALBERT, instead of byte-level BPE: "
    unigram += "text is normalised (NFKC), and white space between words becomes one space"
    parser.add_argument("--unigram", action="store_true", help=unigram)
    lowercase = "with --unigram: convert to lower case and remove accents, as ALBERT does"
    parser.add_argument("--lowercase", action="store_true", help=lowercase)
    parser.add_argument("--output", type=Path, required=True, help="folder or .json file")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    file = options.output if options.output.suffix == ".json" else options.output / FILE_NAME
    check_new(options.output)
    inputs = find_inputs(options.input)
    settings = Settings(text_key=options.text_key, document_separator=options.document_separator)
    counts: Counter[type] = Counter()

    def texts() -> Iterator[str]:
        text_bytes = 0
        for path in inputs:
            for record in read_documents(path, settings):
                counts[type(record)] += 1
                if isinstance(record, Document):
                    yield record.text
                    text_bytes += len(record.text.encode())
                    report.update(Done(counts[Document], text_bytes))
            report.finish_part()
        report.say("all inputs are read; making the vocabulary")

    with closing(ProgressReport("train-tokenizer", len(inputs), unit="inputs")) as report:
        tokenizer = _train(texts(), options)
    used, rejected = counts[Document], counts[Reject]
    if not used:
        raise ValueError(f"--input {' '.join(options.input)}: no document ({rejected} rejected)")
    tokenizer.save(file)
    if options.vocab_size and tokenizer.vocab_size < options.vocab_size:
        print(f"too little text for {options.vocab_size} ids: the vocabulary has fewer")
    print(f"{file}: {tokenizer.vocab_size} ids from {used:,} documents ({rejected:,} rejected)")


def _train(texts: Iterator[str], options: argparse.Namespace) -> Tokenizer:
    if options.unigram and options.characters:
        raise ValueError("--unigram: needs --vocab-size, not --characters")
    if options.lowercase and not options.unigram:
        raise ValueError("--lowercase: needs --unigram")
    if options.characters:
        return train_characters(texts)
    if options.vocab_size > 10**9:  # ids have 32 bits
        raise ValueError(f"--vocab-size {options.vocab_size}: accepted: at most {10**9}")
    if options.unigram:
        return Tokenizer(unigram.train(texts, options.vocab_size, lowercase=options.lowercase))
    return train(texts, options.vocab_size)

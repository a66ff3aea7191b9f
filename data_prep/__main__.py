"""The command line, `python -m data_prep`; what a command needs is imported when it runs."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from data_prep import console
from data_prep.arguments import Parser

if TYPE_CHECKING:
    from data_prep.manifest import Settings
    from data_prep.parts import Part

_EXIT_PROBLEM_FOUND = 1
_EXIT_WRITTEN_WRONGLY = 2
_EXIT_INTERRUPTED = 130


@console.lasting()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        code = command(options)
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        print(f"data_prep {options.command}: error: {_in_one_line(error)}", file=sys.stderr)
        return _EXIT_WRITTEN_WRONGLY
    except KeyboardInterrupt:
        print(f"data_prep {options.command}: stopped", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return code


def _sample(options: argparse.Namespace) -> int:
    from data_prep.sample import write_sample

    summary = write_sample(options.output, options.files, options.held_out_fraction)
    print(f"{options.output}: {options.files} files and held-out/")
    for (group, subset), documents in summary.documents.items():
        megabytes = summary.text_bytes[group, subset] / 1e6
        print(f"  {group:10}{subset:16}{documents:8,} documents{megabytes:8.2f} MB")
    return 0


def _train_tokenizer(options: argparse.Namespace) -> int:
    from data_prep.characters import character_vocabulary
    from data_prep.documents import Document, read
    from data_prep.inputs import find_inputs
    from data_prep.tokenizer import FILE_NAME, Tokenizer, train

    file = options.output if options.output.suffix == ".json" else options.output / FILE_NAME
    inputs = find_inputs(options.input)
    rejected = 0
    used = 0

    def texts() -> Iterator[str]:
        nonlocal rejected, used
        for path in inputs:
            for record in read(path):
                if isinstance(record, Document):
                    used += 1
                    yield record.text
                else:
                    rejected += 1

    if options.characters:
        tokenizer = Tokenizer(character_vocabulary(texts()))
    else:
        tokenizer = train(texts(), options.vocab_size)
    if not used:
        raise ValueError(f"--input {' '.join(options.input)}: no document ({rejected} rejected)")
    tokenizer.save(file)
    if options.vocab_size and tokenizer.vocab_size < options.vocab_size:
        print(f"too little text for {options.vocab_size} ids: the vocabulary has fewer")
    print(f"{file}: {tokenizer.vocab_size} ids from {used:,} documents ({rejected:,} rejected)")
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from data_prep.engines import WorkerDied
    from data_prep.inputs import find_inputs
    from data_prep.parts import Part
    from data_prep.run import prepare, prepare_part

    part = None if options.shard is None else Part.parse(options.shard)
    if part and options.overwrite:
        raise ValueError(
            "--overwrite with --shard: it would remove what the other parts make; accepted: "
            "another --output, or --overwrite in a run of all shards"
        )
    inputs = (find_inputs(options.input), options.output, options.tokenizer, _settings(options))
    valid_inputs = find_inputs(options.valid_input)
    common = {"valid_inputs": valid_inputs, "workers": options.workers, "engine": options.engine}
    started = time.monotonic()
    try:
        if part:
            unread = prepare_part(part, *inputs, **common)
            print(f"{options.output}: {_part_in_words(part, unread)}")
            return 0
        manifest = prepare(*inputs, **common, overwrite=options.overwrite)
    except WorkerDied as error:
        print(f"data_prep prepare: error: {error}", file=sys.stderr)
        return _EXIT_PROBLEM_FOUND
    totals = ", ".join(
        f"{split} {total.documents:,} documents {total.tokens:,} tokens"
        for split, total in manifest.totals.items()
    )
    rejected = sum(rejects.count for rejects in manifest.rejects.values())
    print(f"{options.output}: {totals}, {rejected:,} rejected, {time.monotonic() - started:.1f} s")
    return 0


def _settings(options: argparse.Namespace) -> "Settings":
    from data_prep.manifest import Settings

    fraction = options.valid_fraction
    if fraction is None:
        fraction = 0.0 if options.valid_input else Settings.valid_fraction
    return Settings(
        max_tokens=options.max_tokens,
        long=options.long,
        min_tokens=options.min_tokens,
        valid_fraction=fraction,
        duplicates=options.duplicates,
        damaged=options.damaged,
        unit="sentence" if options.sentences else "document",
    )


def _part_in_words(part: "Part", unread: int) -> str:
    if unread:
        return (
            f"part {part} has read its inputs for duplicates; {unread} of other parts have yet to "
            "be read: then run the same command again"
        )
    return f"part {part} is made; when all are, run prepare without --shard"


def _inspect(options: argparse.Namespace) -> int:
    from data_prep.inspect import describe

    for line in describe(options.folder, options.samples):
        print(line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from data_prep.verify import verify

    problems = list(verify(options.folder, options.workers))
    for problem in problems:
        print(f"data_prep verify: {problem}", file=sys.stderr)
    if problems:
        return _EXIT_PROBLEM_FOUND
    print(f"{options.folder}: whole")
    return 0


class _Parser(Parser):
    """Says what is wrong in one line, as the commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_WRITTEN_WRONGLY, f"{self.prog}: error: {message} (see {self.prog} -h)\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that there are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False, [])
        return super()._get_help_string(action) if has_default else action.help


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="data_prep", description="Raw text to indexed binaries.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], summary: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=_Help,
        )
        command.set_defaults(run=run)
        return command

    sample = add("sample", _sample, "write the embedded corpus, made from this Python installation")
    sample.add_argument("--output", type=Path, required=True, help="folder")
    sample.add_argument("--files", type=int, default=4, help="number of files")
    sample.add_argument(
        "--held-out-fraction", type=float, default=0.12, help="share of the English put aside"
    )

    train = add("train-tokenizer", _train_tokenizer, "train a byte-level BPE vocabulary")
    _add_input(train)
    kind = train.add_mutually_exclusive_group(required=True)
    kind.add_argument("--vocab-size", type=int, help="ids, special ones included")
    kind.add_argument("--characters", action="store_true", help="an id for each character instead")
    train.add_argument("--output", type=Path, required=True, help="folder or .json file")

    prepare = add("prepare", _prepare, "raw text to indexed binaries; goes on where it stopped")
    _add_input(prepare)
    _add_prepare_options(prepare)

    inspect = add("inspect", _inspect, "show counts, rejects, lengths and samples of a corpus")
    inspect.add_argument("folder", type=Path, metavar="DIR")
    inspect.add_argument("--samples", type=int, default=2, help="decoded documents of each split")

    verify = add("verify", _verify, "check every checksum, index and id of a corpus")
    verify.add_argument("folder", type=Path, metavar="DIR")
    verify.add_argument("--workers", type=int, default=1, help="shards looked at at once")
    return parser


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        metavar="GLOB",
        help=".jsonl or .txt (plain, .zst, .gz), .parquet, folders of Dataset.save_to_disk; "
        "lines:GLOB, a document a line; wikitext:GLOB, a document an article; "
        "datasets:NAME[:CONFIG[:SPLIT]], from the Hugging Face hub or a local folder",
    )


def _add_prepare_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", type=Path, required=True, help="corpus folder")
    add(
        "--tokenizer",
        required=True,
        help="tokenizer.json, a folder holding one or GPT-2's files, or a name on the Hugging Face "
        "hub, such as roberta-base",
    )
    add("--max-tokens", type=int, default=2048, help="longest document, <s> and </s> included")
    long = ("drop", "truncate", "split")
    add("--long", choices=long, default="drop", help="longer ones: split makes windows of them")
    add("--min-tokens", type=int, default=0, help="shortest document, <s> and </s> included")
    duplicates = "texts that came before, in whatever input"
    add("--duplicates", choices=("keep", "drop"), default="keep", help=duplicates)
    damaged = "an input cut short: no shard of it, or what is whole"
    add("--damaged", choices=("fail", "keep"), default="fail", help=damaged)
    add("--sentences", action="store_true", help="a sequence is a sentence, not a document")
    add(
        "--valid-fraction",
        type=float,
        help="share of validation documents, drawn by their text (default: 0.001)",
    )
    add(
        "--valid-input",
        nargs="+",
        action="extend",
        default=[],
        metavar="GLOB",
        help="inputs that are the validation split, instead of a fraction of --input",
    )
    add("--workers", type=int, default=1, help="shards made at once, each by one process")
    engines = "processes of this machine, or a Ray cluster"
    add("--engine", choices=("local", "ray"), default="local", help=engines)
    add(
        "--shard",
        metavar="I/N",
        help="make every N-th shard alone, from number I on (counted from 0), and no corpus yet: "
        "for job arrays; a last run without it makes the corpus",
    )
    add("--overwrite", action="store_true", help="make the corpus anew, whatever is there")


def _in_one_line(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())

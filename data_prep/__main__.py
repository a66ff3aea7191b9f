"""Command line of data preparation: `python -m data_prep COMMAND`."""

import sys
from collections.abc import Sequence

from data_prep import console
from data_prep.arguments import Parser, run_command

# Each command is a module of this package, which is imported when the command is used.
COMMANDS = {
    "sample": "Write the embedded corpus, made from the files of this Python installation",
    "train-tokenizer": "Train a byte-level BPE vocabulary",
    "prepare": "Convert raw text to indexed binaries; continues an interrupted run",
    "inspect": "Show counts, rejects, lengths and sample documents of a corpus",
    "verify": "Check all checksums, indices and ids of a corpus",
}


@console.lasting()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return run_command("data_prep", _parser().parse_args(arguments))


def _parser() -> Parser:
    parser = Parser(prog="data_prep", description="Convert raw text to indexed binaries.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = f"data_prep.{name.replace('-', '_')}"
        commands.add_parser(name, module=module, help=summary, description=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())

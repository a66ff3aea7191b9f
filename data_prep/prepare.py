"""The command `prepare`: convert raw text to a corpus of indexed binaries."""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from data_prep.common.arguments import at_least
from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED
from data_prep.engines import ENGINES
from data_prep.fields import add_reading_arguments, parse_key
from data_prep.inputs import find_inputs, layout_of
from data_prep.manifest import NO_SEPARATOR, CorpusManifest, Settings
from data_prep.run import prepare
from data_prep.summary import (
    ALLOWED_BROKEN,
    broken_warning,
    table_of_kept,
    table_of_sizes,
    unknown_tokens,
    warnings,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_reading_arguments(parser)
    add = parser.add_argument
    key = "key of the name of a document's subset, like --text-key (default: %(default)s, where "
    key += "there is one)"
    add("--subset-key", type=parse_key, default=Settings.subset_key, metavar="KEY", help=key)
    only = "keep only the documents of this subset, for a corpus of a mixture (default: all)"
    add("--subset", metavar="NAME", default=Settings.subset, help=only)
    add("--output", type=Path, required=True, help="corpus folder")
    vocabulary = "tokenizer.json, a folder with one or with the files of GPT-2, or a name on the "
    vocabulary += "Hugging Face hub, such as roberta-base"
    add("--tokenizer", required=True, help=vocabulary)
    limit = "document in tokens, including <s> and </s> (default: no limit"
    add("--max-tokens", type=int, help=f"longest {limit}; the published models took 2048)")
    add("--min-tokens", type=int, default=Settings.min_tokens, help=f"shortest {limit})")
    for name, meaning in (
        ("long", "drop documents over --max-tokens, truncate them, or split them into windows"),
        ("damaged", "inputs that are cut short: fail, or keep what is complete"),
    ):
        choices, default = get_args(Settings.__annotations__[name]), getattr(Settings, name)
        add(f"--{name}", choices=choices, default=default, help=f"{meaning} (default: {default})")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    own = "drop documents by functions of your own (see data_prep/README.md): "
    own += "package.module:function (default: none)"
    add("--filter", dest="filters", metavar="NAME", help=own, **several)
    add("--sentences", action="store_true", help="write a sequence per sentence, not per document")
    share = "share of documents for validation, chosen by a hash of their text (default: "
    add("--valid-fraction", type=float, help=f"{share}{Settings.valid_fraction})")
    valid = "inputs of the validation split, in place of a fraction of --input"
    add("--valid-input", metavar="GLOB", help=valid, **several)
    workers = "shards written in parallel (default: 1; on Ray, all inputs)"
    add("--workers", type=at_least(1), help=workers)
    engines = "processes of this machine, or a Ray cluster (default: local)"
    add("--engine", choices=tuple(ENGINES), default="local", help=engines)
    add(
        "--allow-broken",
        action="store_true",
        help=f"exit with 0 even if more than {ALLOWED_BROKEN:.0%}% of the records, or of their "
        "bytes, are broken: not JSON, not UTF-8, too large, or without a text; the default is a "
        "warning and exit code 1. The corpus is made in both cases",
    )
    add("--overwrite", action="store_true", help="remove an existing corpus first")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.valid_fraction is None:
        options.valid_fraction = 0.0 if options.valid_input else Settings.valid_fraction
    options.unit = "sentence" if options.sentences else "document"
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    inputs, started = find_inputs(options.input), time.monotonic()
    workers = {"local": 1, "ray": len(inputs)}[options.engine]  # each takes a core of the cluster
    manifest = prepare(
        inputs,
        options.output,
        options.tokenizer,
        settings,
        valid_inputs=find_inputs(options.valid_input),
        workers=workers if options.workers is None else options.workers,
        engine=options.engine,
        overwrite=options.overwrite,
    )
    for line in _summary(options.output, manifest, time.monotonic() - started):
        print(line)
    broken = broken_warning(manifest)
    for text in filter(None, (*warnings(manifest), broken)):
        print(f"{options.parser.prog}: warning: {text}", file=sys.stderr)
    return EXIT_FAILED if broken and not options.allow_broken else EXIT_DONE


def _summary(output: Path, manifest: CorpusManifest, seconds: float) -> Iterator[str]:
    yield f"{output}: made in {seconds:.1f} s"
    yield from table_of_kept(manifest)
    yield from table_of_sizes(manifest)
    yield from unknown_tokens(output, manifest)
    yield from (f"damaged: {damage}" for damage in manifest.damages)
    if not manifest.totals["valid"].documents:
        yield "the validation split is empty, which pretraining refuses; see --valid-fraction"
    if any(layout_of(file.path) == ".txt" for file in manifest.inputs):
        separator = manifest.settings.document_separator
        is_one = separator == NO_SEPARATOR
        how = "one document each" if is_one else f"documents separated by {separator}"
        yield f".txt files: {how} (see --document-separator)"

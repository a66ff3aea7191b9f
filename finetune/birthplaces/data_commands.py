"""The commands of the birthplace task that train nothing themselves."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_corpus(command: argparse.ArgumentParser) -> None:
    """Add the text whose characters are the vocabulary."""
    command.add_argument(
        "corpus", type=Path, help="text with a document per line; its characters are the vocabulary"
    )


def add_london_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `london`."""
    add = command.add_argument
    add("--eval_corpus_path", type=Path, required=True, help="TSV file: question<TAB>answer")
    add("--answer", default="London", help="the answer to every question (default: London)")


def london(options: argparse.Namespace) -> None:
    """Count the questions that one constant answer is right for.

    example: python -m finetune birthplaces london --eval_corpus_path dev.tsv
    """
    from finetune.birthplaces.questions import read_questions, score, score_line

    questions = read_questions(options.eval_corpus_path, with_answers=True)
    print(score_line(score(questions, [options.answer] * len(questions))))


def add_dataset_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `dataset`."""
    add = command.add_argument
    kinds = "namedata: rows of fine-tuning; charcorruption: rows of pretraining"
    add("kind", choices=("namedata", "charcorruption"), help=kinds)
    add_corpus(command)
    add("--finetune_corpus_path", type=Path, help="with namedata: TSV file, question<TAB>answer")
    add("--count", type=int, default=4, metavar="N", help="rows (default: 4)")
    add("--seed", type=int, default=1, help="random seed of the corruption (default: 1)")
    add("--epoch", type=int, default=0, help="epoch of the corruption (default: 0)")
    changed = "with charcorruption: settings of `pretrain`, such as objective.whole_words=true"
    add("overrides", nargs="*", default=[], metavar="key=value", help=changed)


def dataset(options: argparse.Namespace) -> None:
    """Show what the model reads (x) and predicts (y), with <pad> as U+25A1, <mask> as U+2047.

    example: python -m finetune birthplaces dataset charcorruption wiki.txt
    """
    from finetune.birthplaces import examples

    data = options.finetune_corpus_path
    for name, least in (("count", 1), ("seed", 0), ("epoch", 0)):
        if (value := getattr(options, name)) < least:
            raise ValueError(f"--{name} {value}: accepted: {least} or more")
    if (data is not None) != (options.kind == "namedata"):
        raise ValueError("--finetune_corpus_path: is needed with namedata, and only there")
    if data and options.overrides:
        raise ValueError(f"{options.overrides[0]!r}: has no effect with namedata")
    if data:
        lines = examples.finetuning(options.corpus, data, options.count)
    else:
        draw = options.count, options.seed, options.epoch
        lines = examples.pretraining(options.corpus, *draw, options.overrides)
    print("\n".join(lines))


def add_demo_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `demo`."""
    command.add_argument(
        "--output",
        type=Path,
        default=Path("birthplaces-demo"),
        help="a folder for the demo alone; its previous content is deleted (default: %(default)s)",
    )


def demo(options: argparse.Namespace) -> int:
    """Run the whole task on made-up people: with pretraining and without.

    example: python -m finetune birthplaces demo --output birthplaces-demo
    """
    from finetune.birthplaces.demo import run_demo

    return run_demo(options.output)

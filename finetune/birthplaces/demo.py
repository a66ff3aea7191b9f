"""The birthplace task on people who do not exist, from nothing to its table, in minutes.

`make` writes sentences and questions about made-up people. `run_demo` calls the task's own
commands, as a user would type them.
"""

from __future__ import annotations

import collections
import random
import subprocess
import sys
import time
from pathlib import Path

from data_prep.common import children
from data_prep.common.arguments import typed
from data_prep.documents import content_share
from finetune.birthplaces import questions
from finetune.birthplaces.corpus import QUESTION
from finetune.demo import empty_folder

TEXT, TRAIN, DEV = "text.txt", "train.tsv", "dev.tsv"
"""The files of a task."""

_WORDS = {
    "first": "Ada Alma Anton Bela Bruno Carl Clara Dora Edgar Elsa Emil Erik Eva Felix Frida Georg "
    "Greta Hans Hugo Ida Ines Ivan Jakob Jan Julia Karin Klara Leo Lina Lukas Maria Marta Max Mira "
    "Nora Olga Oskar Otto Paul Petra Rosa Rudolf Selma Simon Sofia Theo Tilda Vera Viktor Wanda",
    "last": "Ander Berg Castel Dahl Eben Fern Gold Halm Iver Jansen Kron Lind Mar Nord Ost",
    "last_end": "bach berg dorf feld gren holm kamp man rup sen son stad strom thal wall",
    "place": "Al Bar Cor Dun El Far Gar Hol Ister Kal Lor Mon",
    "place_end": "brook burg dale ford mouth ton",
    "work": "painter poet chemist pilot dancer lawyer singer farmer sculptor printer",
}
_FORMS = (
    "{name} was born in {place} in {year}.",
    "{name} (born {year} in {place}) was a {work}.",
    "Born in {place}, {name} worked as a {work}.",
    "{name} was born on {day} May {year} in {place} and was a {work}.",
)


def make(folder: Path, people: int, seed: int, dev_fraction: float = 0.2) -> None:
    """Write a task about made-up people into a new folder.

    Every birthplace is in the text. A person is in the development set by a hash of the name.

    Args:
        folder: to make.
        people: how many; the same number and seed give the same files.
        seed: of every random choice.
        dev_fraction: share of the people in the development set.
    """
    draw, facts = random.Random(seed), dict[str, tuple[str, str]]()
    while len(facts) < people:
        word = {kind: draw.choice(words.split()) for kind, words in _WORDS.items()}
        name = f"{word['first']} {word['last']}{word['last_end']}"
        place = word["place"] + word["place_end"]
        sentence = draw.choice(_FORMS).format(
            name=name,
            place=place,
            year=draw.randrange(1850, 2000),
            day=draw.randrange(1, 32),
            work=word["work"],
        )
        facts[name] = place, f"{name}. {sentence}"
    rows: dict[str, list[str]] = {TEXT: [line for _, line in facts.values()], TRAIN: [], DEV: []}
    for name, (place, _) in facts.items():
        is_dev = content_share(name.encode(), "birthplaces") < dev_fraction
        rows[DEV if is_dev else TRAIN].append(f"{QUESTION.format(name)}\t{place}")
    folder.mkdir()
    for file, content in rows.items():
        (folder / file).write_text("".join(f"{line}\n" for line in content), encoding="utf-8")


PEOPLE, EPOCHS = 200, 200
"""Lines of text, and how often pretraining reads them."""
FINETUNE_EPOCHS = {"fresh": 60, "after": 10}
"""After pretraining more are worse: what fine-tuning does not name is forgotten."""


def commands() -> list[str]:
    """Return the arguments of the task's commands in the demo's folder, in order."""
    corpus, train = f"vanilla task/{TEXT}", f"--finetune_corpus_path task/{TRAIN}"
    dev = f"--eval_corpus_path task/{DEV}"
    result = [
        f"dataset charcorruption task/{TEXT} --count 2",
        f"pretrain {corpus} --writing_params_path pretrained --epochs {EPOCHS} --pretrain_lr 3e-3 "
        "model.size=small batch.global_batch_size=32 batch.micro_batch_size=16 "
        "objective.truncate=false model.overrides.dropout=0.0 "
        "model.overrides.attention_dropout=0.0",
    ]
    start_of = {"fresh": "model.size=small", "after": "--reading_params_path pretrained"}
    for name, start in start_of.items():
        result += [
            f"finetune {corpus} {start} {train} --writing_params_path {name} "
            f"--epochs {FINETUNE_EPOCHS[name]}",
            f"evaluate {corpus} --reading_params_path {name} {dev} "
            f"--outputs_path {name}.predictions",
        ]
    return result


def run_demo(output: Path) -> int:
    """Run every command and print the table; returns the exit code.

    Raises:
        ValueError: the folder has files that no demo made.
    """
    empty_folder(output)
    started = time.monotonic()
    make(output / "task", PEOPLE, seed=1)
    for words in commands():
        print(f"\n$ {typed(f'finetune birthplaces {words}')}", flush=True)
        command = [sys.executable, "-m", "finetune", "birthplaces", *words.split()]
        if code := subprocess.run(
            command, cwd=output, env=children.environment(), check=False
        ).returncode:
            return code
    print(f"\n{table(output)}\nwhole demo: {time.monotonic() - started:.0f} s")
    return 0


def table(output: Path) -> str:
    """Format the accuracies of the demo, and that of the commonest answer of the training."""
    train, dev = (questions.read_questions(output / "task" / name) for name in (TRAIN, DEV))
    [(constant, _)] = collections.Counter(str(row.answer) for row in train).most_common(1)
    answers = {f"always {constant}": [constant] * len(dev)}
    for name, title in (("fresh", "without pretraining"), ("after", "after pretraining")):
        answers[title] = (output / f"{name}.predictions").read_text().split("\n")[:-1]
    width = max(map(len, answers))
    return "\n".join(
        f"{title:<{width}}  {questions.score_line(questions.score(dev, given))}"
        for title, given in answers.items()
    )

"""Questions and answers in TSV files, and how predictions are scored."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence
from pathlib import Path

_SHOWN = 80
"""Most characters of a line in a message."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A row of a TSV file: the question, a tab, and the answer, where there are answers."""

    source: str
    """File and line, for messages."""
    text: str
    answer: str | None


def read_questions(path: Path, *, with_answers: bool = False) -> list[Question]:
    """Read the rows of a TSV file.

    Args:
        path: in UTF-8.
        with_answers: refuse a file without answers.

    Returns:
        The questions, all with an answer or all without.

    Raises:
        ValueError: no such file, it has no rows, or a row has another form; the line is named.
    """
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if not content:
        raise ValueError(f"{path}: is empty")
    has_answers = with_answers or b"\t" in content
    lines = content.removesuffix(b"\n").split(b"\n")
    return [
        _question(line, f"{path}: line {number}", has_answers)
        for number, line in enumerate(lines, start=1)
    ]


def shortened(text: str) -> str:
    """Return a text for a message, with at most 80 of its characters."""
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")


def _question(content: bytes, source: str, has_answer: bool) -> Question:
    try:
        line = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: is not UTF-8: {error.reason}") from error
    fields = [field.strip() for field in line.split("\t")]
    if len(fields) != 1 + has_answer or not all(fields):
        accepted = "question<TAB>answer" if has_answer else "a question"
        raise ValueError(f"{source}: {shortened(line)} is not accepted; it must be {accepted}")
    return Question(source, fields[0], fields[1] if has_answer else None)


def score(questions: Sequence[Question], predictions: Sequence[str]) -> tuple[int, int] | None:
    """Count the predictions that equal their answer.

    Returns:
        Correct predictions and questions; None where the questions have no answers.
    """
    if questions[0].answer is None:
        return None
    pairs = zip(questions, predictions, strict=True)
    return sum(question.answer == prediction for question, prediction in pairs), len(questions)


def score_line(result: tuple[int, int] | None) -> str:
    """Describe what `score` returned."""
    if result is None:
        return "no accuracy: the file has no answers"
    correct, total = result
    return f"correct: {correct} of {total}, {100 * correct / total:.1f} %"

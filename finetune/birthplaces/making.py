"""The birthplace task from any text in which people's birthplaces are written.

`find` looks for sentences such as "Ann Lee was born in Graz", "Ann Lee (born 1950 in Graz) is" and
"Born in Graz, Ann Lee ..."; `make` turns them into a text for pretraining and questions for
training and development. Every fact is in the text, also those of the development set.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from data_prep.documents import Document, content_share, read
from data_prep.files import new_folder
from data_prep.inputs import Input
from finetune.birthplaces.corpus import QUESTION

TEXT, TRAIN, DEV = "text.txt", "train.tsv", "dev.tsv"
"""The files of a task."""
REACH = 112
"""Characters of a line that pretraining reads, at most: seven eighths of a block of 128."""
_RARE = 5
"""Lines with a character beyond ASCII that fewer lines than this have are left out."""

_CAPITAL = r"[A-ZÀ-ÖØ-ÞĀ-Ž]"
_NAME_WORD = rf"{_CAPITAL}[\w'’]*\.?(?:-{_CAPITAL}[\w'’]*)*"
_PARTICLE = r"(?:de|del|der|di|da|dos|du|van|von|den|la|le|of|bin|al|el|y|ter|af|zu)"
# Words that begin a sentence, and are no names there.
_OPENING = (
    "A|After|Although|An|And|As|At|Because|Before|Both|But|During|For|From|Her|His|If|In|It|Its|"
    "Many|Most|On|One|Our|Since|Some|That|The|Their|There|These|They|This|Those|Though|Until|When|"
    "Where|Which|While|Who|With"
)
_NAME = rf"(?!(?:{_OPENING})\b){_NAME_WORD}(?: (?:{_PARTICLE} )*{_NAME_WORD})*"
_PLACE_WORD = rf"(?:St\.|(?:[A-Z]\.){{2,}}|{_CAPITAL}[\w'’]*(?:-\w+)*)"
_PLACE_JOINT = r"(?:of|of the|de|de los|de la|del|do|da|la|le|upon|on|am|an der|sur|di)"
_PLACE = rf"(?P<place>{_PLACE_WORD}(?: (?:{_PLACE_JOINT} )?{_PLACE_WORD})*)"
_TIME = (
    "January|February|March|April|May|June|July|August|September|October|November|December|Spring|"
    "Summer|Autumn|Winter|Early|Mid|Late|AD|BC"
)
_IN = rf"\b(?:in|at) (?!(?:{_TIME})\b){_PLACE}"
# Between "born" and the place: no other clause, and nobody else.
_OTHER_CLAUSE = (
    "and|but|or|who|whose|where|which|that|when|while|although|because|before|after|since|until|"
    "is|was|were|has|had|died|lives|lived|moved|raised|grew|son|daughter|child|children"
)
_GAP = rf"(?:(?!\b(?:{_OTHER_CLAUSE})\b)[^;()])"
_NOT_NAME = r"(?!on |in |at |to |and )"  # as in "Born in Graz, Styria on 3 May"
_FORMS = (
    re.compile(rf"^(?P<name>{_NAME}),? (?:\(.*?\),? )?(?:who )?was born\b{_GAP}{{0,60}}?{_IN}"),
    re.compile(rf"^(?P<name>{_NAME}) \([^()]*?\bborn\b{_GAP}*?{_IN}"),
    re.compile(
        rf"^Born\b(?:(?!,){_GAP}){{0,40}}?{_IN}(?:, {_NAME})*, (?P<name>{_NAME}) {_NOT_NAME}[a-z]"
    ),
)
_HEADING = re.compile(rf"(?P<name>{_NAME})(?: \(.*\))?")
# Not after initials and "St.".
_SENTENCE_END = re.compile(r"(?<=[\w)][.!?])(?<!\bSt\.)(?<!\b[A-Z]\.)\s+(?=[A-Z])")
_PRONOUNS = ("He", "She")


@dataclasses.dataclass(frozen=True)
class Fact:
    """A person, the place, and the line of text that says so."""

    name: str
    place: str
    line: str


@dataclasses.dataclass
class Found:
    """Facts by name, and counts of what was read."""

    facts: dict[str, Fact] = dataclasses.field(default_factory=dict)
    documents: int = 0
    sentences: int = 0
    """With the word "born"."""
    rejected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Sentences and people that are not used, by the reason."""
    _ambiguous: set[str] = dataclasses.field(default_factory=set)

    def read(self, text: str) -> None:
        """Add the facts of a document."""
        self.documents += 1
        subject = _subject(text)
        for sentence in _sentences(text):
            self.sentences += 1
            fact = parse(sentence, subject)
            if isinstance(fact, str):
                self.rejected[fact] += 1
            elif (known := self.facts.setdefault(fact.name, fact)) is not fact:
                self.rejected["the person is known already"] += 1
                if known.place != fact.place:
                    self._ambiguous.add(fact.name)

    def finish(self) -> None:
        """Leave out people with two places, and lines with rare characters.

        Each character adds a vector to the model, and those of rare ones are hardly ever trained.
        """
        self._leave_out(self._ambiguous, "people with two places")
        counts = collections.Counter(c for fact in self.facts.values() for c in set(fact.line))
        rare = {c for c, count in counts.items() if count < _RARE and not c.isascii()}
        names = {fact.name for fact in self.facts.values() if rare & set(fact.line)}
        self._leave_out(names, f"a character beyond ASCII that fewer than {_RARE} lines have")

    def _leave_out(self, names: Collection[str], why: str) -> None:
        if names:
            self.rejected[why] += len(names)
        for name in names:
            del self.facts[name]

    def lines(self) -> list[str]:
        """Describe the counts."""
        result = [f"documents: {self.documents:,}; sentences with born: {self.sentences:,}"]
        result += [f"  left out, {why}: {count:,}" for why, count in self.rejected.most_common()]
        return [*result, f"people: {len(self.facts):,}"]


def find(sources: Sequence[Input]) -> Found:
    """Find people and their birthplaces.

    Args:
        sources: inputs that data_prep reads. Where a document begins with a line that is a name,
            "He", "She" and the surname mean that person.

    Raises:
        ValueError: an input cannot be read, or no person was found.
    """
    found = Found()
    for source in sources:
        for record in read(source):
            if isinstance(record, Document):
                found.read(record.text)
            else:
                found.rejected[record.reason] += 1
    found.finish()
    if not found.facts:
        raise ValueError(
            f"{', '.join(map(str, sources))}: no birthplace of a person in {found.documents:,} "
            'documents; accepted: text with sentences such as "Ann Lee was born in Graz."'
        )
    return found


def parse(sentence: str, subject: str = "") -> Fact | str:
    """Return the fact of a sentence, or the reason why it is not used.

    Args:
        sentence: one that says "born".
        subject: whom its document is about, if known.
    """
    match = next((match for form in _FORMS if (match := form.match(sentence))), None)
    if match is None:
        return "no person, or no place"
    name, place = match["name"], match["place"]
    if " " not in name:
        if name not in (*_PRONOUNS, *subject.split()[-1:]):
            return "no full name"
        name = subject
    if " " not in name:
        return "no full name"
    heading = f"{name}. "
    if len(heading) + match.start("place") + len(place) > REACH:
        return f"the place is not within {REACH} characters"
    return Fact(name, place, heading + sentence)


def refuse_fraction(dev_fraction: float) -> None:
    """Refuse a share that leaves a set empty.

    Raises:
        ValueError: it is not between 0 and 1.
    """
    if not 0 < dev_fraction < 1:
        raise ValueError(f"--dev_fraction {dev_fraction}: accepted: above 0 and below 1")


def make(facts: Mapping[str, Fact], dev_fraction: float) -> dict[str, str]:
    """Return the content of the task's files by name.

    A person is in the development set by a hash of the name, whatever the other people are.

    Args:
        facts: by name.
        dev_fraction: share of the people in the development set.

    Raises:
        ValueError: the fraction is not between 0 and 1, or a set would be empty.
    """
    refuse_fraction(dev_fraction)
    rows: dict[str, list[str]] = {TRAIN: [], DEV: []}
    for fact in facts.values():
        is_dev = content_share(fact.name.encode(), "birthplaces") < dev_fraction
        rows[DEV if is_dev else TRAIN].append(f"{QUESTION.format(fact.name)}\t{fact.place}")
    if empty := [name for name, lines in rows.items() if not lines]:
        raise ValueError(
            f"{empty[0]} would be empty with {len(facts):,} people and --dev_fraction "
            f"{dev_fraction}; accepted: more text, or another fraction"
        )
    rows[TEXT] = [fact.line for fact in facts.values()]
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in rows.items()}


def write(output: Path, files: Mapping[str, str]) -> str:
    """Write the task's files as a new folder, complete or not at all; returns what to print."""
    with new_folder(output) as partial:
        for name, content in files.items():
            (partial / name).write_text(content, encoding="utf-8")
    return "\n".join(f"{output / n}: {c.count(chr(10)):,} lines" for n, c in files.items())


def _subject(text: str) -> str:
    match = _HEADING.fullmatch(text.partition("\n")[0].strip())
    return match["name"] if match else ""


def _sentences(text: str) -> Iterator[str]:
    for paragraph in text.split("\n"):
        if re.search(r"\b[Bb]orn\b", paragraph):
            for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
                if re.search(r"\b[Bb]orn\b", sentence):
                    yield sentence

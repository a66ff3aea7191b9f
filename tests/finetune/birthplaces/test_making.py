"""The task from any text: which sentences tell a birthplace, and the split."""

import pytest

from finetune.__main__ import main
from finetune.birthplaces import demo, making, questions


@pytest.mark.parametrize(
    ("sentence", "subject", "expected"),
    [
        ("Ann Lee was born in Graz.", "", ("Ann Lee", "Graz")),
        ("Ann Lee was born on 3 May 1950 in Graz, Austria.", "", ("Ann Lee", "Graz")),
        ("Ann Lee (born 3 May 1950 in New York) is a poet.", "", ("Ann Lee", "New York")),
        ("Ann Lee (born in May 1950 in Graz) is a poet.", "", ("Ann Lee", "Graz")),
        ("Born in Graz, Austria, Ann Lee became a poet.", "", ("Ann Lee", "Graz")),
        ("Ann de la Cruz was born in St. Louis.", "", ("Ann de la Cruz", "St. Louis")),
        ("She was born in Graz.", "Ann Lee", ("Ann Lee", "Graz")),
        ("Lee was born in Graz.", "Ann Lee", ("Ann Lee", "Graz")),
        ("Lee was born in Graz.", "", "no full name"),
        ("Smith was born in Graz.", "Ann Lee", "no full name"),
        ("She was born in Graz.", "", "no full name"),
        ("Ann Lee was born in May 1950.", "", "no person, or no place"),
        ("Ann Lee was born in poverty.", "", "no person, or no place"),
        ("Born in Graz, Styria on 3 May, she wrote.", "Ann Lee", "no person, or no place"),
        ("The band was born in a garage.", "", "no person, or no place"),
        ("Ann Lee was born in 1950 and lives in Graz.", "", "no person, or no place"),
        ("Ann Lee was born in 1950, when her father was in Graz.", "", "no person, or no place"),
        ("Ann Lee was born in 1950, the son of a baker in Graz.", "", "no person, or no place"),
        ("Ann Lee (born 1950 and raised in Graz) is a poet.", "", "no person, or no place"),
        ("The President was born in Graz.", "", "no person, or no place"),
        ("His Mother was born in Graz.", "", "no person, or no place"),
        ("When Ann Lee was born in Graz, it rained.", "", "no person, or no place"),
        ("Thea Inman was born in Graz.", "", ("Thea Inman", "Graz")),
        ("She was born in Graz.", "Paula", "no full name"),
        ("Ann Lee was born in Washington D.C.", "", ("Ann Lee", "Washington D.C.")),
        ("Ann Lee was born in AD 35 in Graz.", "", ("Ann Lee", "Graz")),
        ("Ann Lee was born in Late 1950 in Graz.", "", ("Ann Lee", "Graz")),
    ],
)
def test_a_sentence_tells_who_was_born_where_or_why_it_is_not_used(sentence, subject, expected):
    fact = making.parse(sentence, subject)
    assert (fact if isinstance(fact, str) else (fact.name, fact.place)) == expected
    if not isinstance(fact, str):
        assert fact.line == f"{fact.name}. {sentence}"


def test_a_place_that_pretraining_would_not_read_is_not_used():
    name = "Anna " + "Maria " * 14 + "Lee"
    assert "112 characters" in making.parse(f"{name} was born in Graz.")
    # The name has the place within them, which is not where the place stands.
    assert "112 characters" in making.parse(f"Graz {name} was born in Graz.")


def found_in(tmp_path, *lines):
    (tmp_path / "text.txt").write_text("".join(f"{line}\n" for line in lines))
    return making.find([f"lines:{tmp_path / 'text.txt'}"])


def people(count):
    return [f"Ann Lee{chr(97 + n)} was born in Graz." for n in range(count)]


def test_what_is_not_used_is_counted_and_people_with_two_places_are_left_out(tmp_path):
    lines = ["Bob Roe was born in Graz.", "Bob Roe was born in Linz.", "He was born.", "Nothing."]
    found = found_in(tmp_path, *people(6), "Ann Leea was born in Graz.", *lines)
    assert (found.documents, found.sentences) == (11, 10)
    assert sorted(found.facts) == [f"Ann Lee{letter}" for letter in "abcdef"]
    assert found.rejected["the person is known already"] == 2
    assert found.rejected["people with two places"] == 1
    assert found.rejected["no person, or no place"] == 1


def test_lines_with_rare_characters_are_left_out(tmp_path):
    found = found_in(tmp_path, *people(6), "Žofia Roe was born in Graz.")
    assert "Žofia Roe" not in found.facts
    assert len(found.facts) == 6


def test_text_without_birthplaces_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no birthplace of a person in 1 documents"):
        found_in(tmp_path, "Nobody was there.")


def test_every_fact_is_in_the_text_and_no_person_in_both_sets(task):
    text = task.text.read_text().splitlines()
    train, dev = (questions.read(path) for path in (task.train, task.dev))
    assert len(train) + len(dev) == len(text) == 60
    assert not {q.text for q in train} & {q.text for q in dev}
    for question in [*train, *dev]:
        name = question.text.removeprefix("Where was ").removesuffix(" born?")
        (line,) = [line for line in text if line.startswith(f"{name}. ")]
        assert question.answer in line


def test_a_person_stays_in_the_same_set_when_the_text_grows(tmp_path):
    dev = []
    for count in (40, 60):
        (tmp_path / "text.txt").write_text(demo.text(count, seed=1))
        found = making.find([f"lines:{tmp_path / 'text.txt'}"])
        dev.append(set(making.make(found.facts, 0.3)[making.DEV].splitlines()))
    assert dev[0] < dev[1]


def test_the_share_is_checked_before_the_input_is_read(tmp_path, capsys):
    words = ["--input", "lines:/dev/null", "--output", str(tmp_path / "task"), "--dev_fraction"]
    assert main(["birthplaces", "make", *words, "2"]) == 2
    assert "--dev_fraction 2.0: accepted: above 0" in capsys.readouterr().err


def test_a_task_is_not_written_into_a_folder_with_files(tmp_path):
    (tmp_path / "old").touch()
    with pytest.raises(ValueError, match="is not empty"):
        making.write(tmp_path, {making.TEXT: "a\n"})
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("fraction", [0, 1, -0.5])
def test_a_share_that_leaves_a_set_empty_is_refused(fraction):
    with pytest.raises(ValueError, match=f"--dev_fraction {fraction}: accepted: above 0 and below"):
        making.make({}, fraction)
    fact = making.parse("Ann Lee was born in Graz.")
    with pytest.raises(ValueError, match="tsv would be empty with 1 people"):
        making.make({"Ann Lee": fact}, 0.5)


def test_made_up_people_all_have_a_birthplace(tmp_path):
    assert demo.text(50, seed=1) == demo.text(50, seed=1) != demo.text(50, seed=2)
    found = found_in(tmp_path, *demo.text(50, seed=1).splitlines())
    assert len(found.facts) + sum(found.rejected.values()) == 50
    assert len(found.facts) >= 45

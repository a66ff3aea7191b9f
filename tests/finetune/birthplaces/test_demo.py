"""The demo's table. Its commands are parsed in test_command.py."""

from finetune.birthplaces import demo, questions


def test_the_table_has_the_commonest_training_answer_and_both_models(tmp_path):
    (tmp_path / "task").mkdir()
    rows = {
        demo.TRAIN: [("A", "Graz"), ("B", "Linz"), ("C", "Linz")],
        demo.DEV: [("D", "Linz"), ("E", "Graz"), ("F", "Graz"), ("G", "Wels")],
    }
    for name, pairs in rows.items():
        lines = [f"Where was {person} born?\t{place}\n" for person, place in pairs]
        (tmp_path / "task" / name).write_text("".join(lines))
    (tmp_path / "fresh.predictions").write_text("Rome\nRome\n\nRome\n")
    (tmp_path / "after.predictions").write_text("Linz\nGraz\nGraz\nRome\n")
    assert demo.table(tmp_path).splitlines() == [
        "always Linz          correct: 1 of 4, 25.0 %",
        "without pretraining  correct: 0 of 4, 0.0 %",
        "after pretraining    correct: 3 of 4, 75.0 %",
    ]


def test_every_fact_is_in_the_text_and_no_person_in_both_sets(task, tmp_path):
    text = task.text.read_text().splitlines()
    train, dev = (questions.read_questions(path) for path in (task.train, task.dev))
    assert len(train) + len(dev) == len(text) == 60
    assert not {q.text for q in train} & {q.text for q in dev}
    for question in [*train, *dev]:
        name = question.text.removeprefix("Where was ").removesuffix(" born?")
        (line,) = [line for line in text if line.startswith(f"{name}. ")]
        assert question.answer in line
    demo.make(tmp_path / "more", 80, seed=1, dev_fraction=0.3)
    assert task.dev.read_text() in (tmp_path / "more" / demo.DEV).read_text()

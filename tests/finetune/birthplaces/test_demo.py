"""The demo's table. Its commands are parsed in test_command.py."""

from finetune.birthplaces import demo, making


def test_the_table_has_the_commonest_training_answer_and_both_models(tmp_path):
    (tmp_path / "task").mkdir()
    rows = {
        making.TRAIN: [("A", "Graz"), ("B", "Linz"), ("C", "Linz")],
        making.DEV: [("D", "Linz"), ("E", "Graz"), ("F", "Graz"), ("G", "Wels")],
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

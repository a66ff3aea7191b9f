"""A study in visits: what is packed at the end of one is done in the next."""

from data_prep.common.files import write_atomically
from finetune.studies import job
from finetune.studies.job import Stage
from pretrain.records import status
from tests.benchmarks import medium
from tests.pretrain.histories import History

STAGES = [Stage("train", ["supervise"]), Stage("glue", ["glue"])]


def begin(work, arm, done):
    """A run of the study of which so many stages are finished."""
    folder = work / medium.STUDY / arm
    job.write(folder, STAGES)
    for stage in STAGES[:done]:
        (folder / f"{stage.name}.done").touch()
    history = History()
    history.begin(steps=4)
    history.commit()
    history.write(folder / "run")
    for name in ("result.json", "run.json", "metrics.jsonl"):
        write_atomically(folder / "scores" / "all" / "CoLA" / name, arm.encode())
    for name in ("run/checkpoints/weights", "model/model.safetensors"):
        write_atomically(folder / name, arm.encode())


def test_a_next_visit_repeats_no_finished_arm_and_begins_the_others_again(tmp_path):
    work, following = tmp_path / "one", tmp_path / "two"
    begin(work, "alibi-seed1", 2)
    begin(work, "baseline-seed1", 1)
    (work / medium.STUDY / "study.json").write_text("{}")
    medium.unpack(medium.pack(work), following)
    study = following / medium.STUDY
    assert sorted(path.name for path in study.iterdir()) == ["alibi-seed1", "study.json"]
    assert job.stages_left(study / "alibi-seed1") == []
    before, after = (status.view(of / medium.STUDY / "alibi-seed1/run") for of in (work, following))
    assert (after.lines, after.records) == (before.lines, before.records)
    names = {path.name for path in (study / "alibi-seed1").rglob("*")}
    assert {"result.json", "run.json"} <= names
    assert not names & {"weights", "model.safetensors"}


def test_a_text_that_is_carried_in_pieces_is_made_whole_once(tmp_path):
    for number, text in enumerate(("one ", "two ", "three")):
        (tmp_path / f"gutenberg.jsonl.zst.{number:02}").write_text(text)
    medium.join(tmp_path)
    assert (tmp_path / "gutenberg.jsonl.zst").read_text() == "one two three"
    assert len(list(tmp_path.iterdir())) == 4


def test_the_rate_is_the_arm_that_the_report_keeps(tmp_path):
    (tmp_path / medium.RATES).mkdir()
    rows = (
        "part,arm,seed,figure,value\npretraining,2e-3,1,validation loss,5\ncost,2e-3,1,tokens,9\n"
    )
    (tmp_path / medium.RATES / "report.csv").write_text(rows)
    assert medium.best_rate(tmp_path) == 2e-3

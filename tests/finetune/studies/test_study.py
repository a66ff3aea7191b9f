"""Arms, their comparisons, and what is refused before a study begins."""

import itertools
import json
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from data_prep.common import files
from data_prep.common.files import write_atomically
from finetune.studies import checks, command, results, study
from finetune.studies.checks import check_arms
from finetune.studies.command import STUDY, _begin, _engine, _stages
from finetune.studies.report import draw_lengths
from finetune.zeroclap import main
from pretrain.config.load import load
from pretrain.config.sections import CorpusConfig
from pretrain.config.settings import apply_override

NAMES = sorted(path.stem for path in study.STUDIES.glob("*.yaml"))


def arms_of(loaded, *words):
    """The arms of a study, each with its recipe, without their corpora."""
    found = {}
    for arm in study.pretraining_arms(loaded):
        config = load(arm.recipe, [*arm.words, *words])
        found[arm] = study.Checked(config, config.architecture(500), 1)
    return found


@pytest.mark.parametrize(("name", "toy"), [*itertools.product(NAMES, (False, True))])
def test_every_study_that_comes_with_the_project_loads_and_its_arms_differ(name, toy):
    arms = arms_of(study.load(name, toy=toy))
    assert len({arm.folder for arm in arms}) == len(arms) > 1
    for pair in itertools.combinations(arms.values(), 2):
        assert study.differences(*pair)


def test_an_arm_is_a_combination_of_levels_and_each_has_every_seed(study_file):
    loaded = study.load(str(study_file), toy=False)
    arms = study.pretraining_arms(loaded)
    names = "learned, some; learned, none; ALiBi, some; ALiBi, none"
    assert "; ".join(arm.name for arm in arms) == names
    assert arms[1].settings["model.overrides.dropout"] == 0.0
    runs = study.runs_of(arms, loaded.seeds)
    assert len({run.name for run in runs}) == 8
    assert [run.seed for run in runs] == [1] * 4 + [2] * 4
    assert len(study.arms_of(study.load(str(study_file), toy=True).factors, {})) == 2


def test_arms_are_compared_that_differ_in_one_factor(study_file):
    arms = study.arms_of(study.load(str(study_file), toy=False).factors, {})
    pairs = [(one.name, other.name) for one, other in study.comparisons(arms)]
    assert pairs == [
        ("learned, some", "ALiBi, some"),
        ("learned, none", "ALiBi, none"),
        ("learned, some", "learned, none"),
        ("ALiBi, some", "ALiBi, none"),
    ]


@pytest.mark.parametrize("value", [1, 0.1, 1e-9, "a # b", "", True, [1, 2], {"a": "x: y"}, "1e-3"])
def test_settings_are_read_back_from_the_command_line(value):
    (word,) = study.Arm((), {"a.b": value}).words
    found: dict[str, object] = {}
    apply_override(found, word)
    assert found == {"a": {"b": value}}


GLUE = ["--data", "GLUE"]
CAUSAL = "{objective.name: causal-lm, model.variant: causal-alibi}"
FACTOR = "{dropout: {a: {model.overrides.dropout: 0.1}, b: {model.overrides.dropout: 0.0}}}"
SPANS = CAUSAL.replace("causal-lm", "span-corruption, data.packing: contiguous")
WRONG = [
    ("no-such-study", [], "neither a file nor one of"),
    ("factors: {}", [], "at least two arms"),
    ("seeds: [1, 1]", [], "different numbers"),
    ("seeds: [-1]", [], "seeds[0]"),
    ("best: size", [], "not one of positions, dropout"),
    ("factors: {positions: {}}", [], "no levels"),
    ("colour: red", [], "unknown key"),
    ("", ["training.steps=0"], "learned, some: "),
    ("", ["training.seed=7"], "learned, some: training.seed: a study's runs have its `seeds`, or"),
    ("settings: {training: {seed: 7}}", [], "learned, some: training.seed: a study's"),
    ("factors: {f: {a: {}, b: {folder: x}}}", [], "b: folder: a study's runs have one in"),
    ("", ["supervision.processes_per_node=2"], "2 ranks on a machine with 1 usable GPU"),
    ("", ["model.overrides.dropout=0.0"], "same settings"),
    ("finetune: {tasks: [CoLA], settings: {epoch: 3}}", GLUE, "epochs"),
    ("finetune: {tasks: [CoLA], factors: {dropout: {some: {dropout: 0.1}}}}", GLUE, "factor above"),
    (
        "finetune: {tasks: [CoLA], factors: {e: {a-b: {epochs: 1}, a b: {epochs: 2}}}}",
        GLUE,
        "letters and digits",
    ),
    ("finetune: {tasks: [CoLA], factors: {e: {a: {}, b: {epochs: 10}}}}", GLUE, "same settings"),
    ("finetune: {tasks: []}", GLUE, "finetune.tasks"),
    ("finetune: {tasks: [CoLA], seeds: []}", GLUE, "finetune.seeds"),
    ("finetune: {tasks: [CoLA], factors: {e: {}}}", GLUE, "no levels"),
    (
        "finetune: {tasks: [RTE, rte], by_task: {rte: {}}}",
        ["--dry-run"],
        "tasks RTE, rte: name each task once",
    ),
    ("toy: 3", ["--toy"], "study.yaml: has no section"),
    ("factors: [a]", ["--toy"], "study.yaml: factors"),
    ("toy: {factors: [a]}", ["--toy"], "study.yaml: factors"),
    ("finetune: {tasks: [CoLA], by_task: {RTE: {}}}", GLUE, "'RTE' is not one of"),
    ("finetune: {tasks: [CoLA], by_task: {CoLA: {seeds: []}}}", GLUE, "seeds []"),
    ("finetune: {tasks: [CoLA], by_task: {CoLA: {settings: {epoch: 3}}}}", GLUE, "epochs"),
    ("finetune: {tasks: [CoLA], only: {mean: [ALiBi]}}", GLUE, "finetune.only"),
    (
        "finetune: {tasks: [CoLA], factors: {e: {a: {}}}, only: {a: [rotary]}}",
        GLUE,
        "finetune.only.a: 'rotary' is not one of learned, ALiBi",
    ),
    ("finetune: {tasks: [RTE], settings: {start_from: MNLI}}", GLUE, "start_from: 'MNLI' is not"),
    (f"{{settings: {CAUSAL}, factors: {FACTOR}, finetune: {{tasks: [CoLA]}}}}", GLUE, "pooling"),
    ("lengths: [64, 64]", [], "lengths [64, 64]: must be different numbers, each at least 2"),
    ("lengths: [1]", [], "lengths [1]: must be"),
    ("lengths: [9999999]", [], "ALiBi, some: --lengths 9999999: the text to read has"),
    (f"{{settings: {SPANS}, factors: {FACTOR}}}", [], "'span-corruption' cannot draw targets"),
    ("pairs: [[ALiBi, rotary]]", [], "pairs: 'rotary' is not one of"),
    ("pairs: [[ALiBi, none]]", [], "pairs: ALiBi, none: must be two levels of one factor"),
    ("pairs: [[ALiBi, ALiBi]]", [], "pairs: ALiBi, ALiBi: must be two"),
    ("{pairs: [[none, some]], best: dropout}", [], "pairs: 'none' is not one of learned, ALiBi"),
    ("", ["--glue-jobs", "0"], "--glue-jobs"),
    ("finetune: {tasks: [CoLA]}", [], "--data"),
    ("finetune: {tasks: [COLLA]}", GLUE, "CoLA"),
    ("", ["--jobs", "-1"], "--jobs"),
    ("", ["--seeds", "1,1"], "--seeds"),
    ("", ["training.deepspeed=zero1_fp16"], "learned, some: training.deepspeed: zero1_fp16 comp"),
    ("finetune: {tasks: [CoLA], settings: {deepspeed: zero1_fp16}}", GLUE, "deepspeed: zero1_fp16"),
]


@pytest.mark.parametrize(("change", "words", "says"), WRONG)
def test_what_is_wrong_is_refused_before_anything_is_written(
    study_file, tmp_path, monkeypatch, capsys, change, words, says
):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("pretrain.processes.gpus._present", lambda environ: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("pretrain.checks.recipe.cpu_has_fp16", lambda: False)
    path, output = tmp_path / "study.yaml", tmp_path / "output"
    changes = yaml.safe_load(change) or {}
    if isinstance(changes, dict):
        whole = yaml.safe_load(study_file.read_text()) | changes
        path.write_text(yaml.safe_dump(whole, sort_keys=False))
    name = str(path) if isinstance(changes, dict) else change
    try:
        code = main(["study", name, "--output", str(output), *words])
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2
    assert says in error
    assert error.count("\n") == 1
    assert not output.exists()


def test_what_evaluate_will_read_of_the_last_phase_is_checked_before_the_first_run(
    study_file, monkeypatch
):
    loaded, asked = study.load(str(study_file), toy=True), []
    monkeypatch.setattr(checks, "check_lengths", lambda *given: asked.append(given[-2:]))
    phases = "phases=[{steps: 5}, {data: {packing: contiguous, sequence_length: 32}}]"
    check_arms(loaded, [phases])
    assert asked == [([32, 64], True), ([32, 64, 128], True)]

    def refuse(objective, source, limit):
        asked.append((source.name, source.sequence_length, limit))
        raise ValueError("no targets of nsp")

    monkeypatch.setattr(checks, "check_blocks", refuse)
    with pytest.raises(ValueError, match="learned, some: no targets of nsp"):
        check_arms(replace(loaded, lengths=[]), [phases, "training.evaluation_blocks=5"])
    assert asked[2:] == [("contiguous", 32, 5)]


def test_a_study_fills_a_new_folder_or_one_that_a_killed_study_left_and_no_other(
    study_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(command, "_do", lambda *given: [])
    killed, other = tmp_path / "killed", tmp_path / "other"
    for path in killed / "lock", other / "lock", other / "report.md":
        write_atomically(path, b"theirs")
    files._partial(killed / STUDY).touch()
    words = ["study", str(study_file), "--toy", "--output"]
    assert main([*words, str(killed)]) == 1  # as nothing was done
    shown = capsys.readouterr()
    assert "4 of 4 runs, which have not begun. The same command" in shown.out
    assert shown.err == "zeroclap study: error: 4 of 4 runs, which have not begun\n"
    assert main([*words, str(other)]) == 2
    assert f"{other}: is not empty; choose a new folder" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in other.iterdir()} == {
        "lock": b"theirs",
        "report.md": b"theirs",
    }
    (killed / STUDY).write_text("{")
    assert main([*words, str(killed)]) == 2
    assert f"{killed / STUDY}: is not valid JSON" in capsys.readouterr().err


@pytest.mark.parametrize(("runs", "slots", "threads"), [(2, 2, 4), (20, 8, 1)])
def test_few_runs_share_all_cores_of_a_machine_without_gpus(monkeypatch, runs, slots, threads):
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    monkeypatch.setattr("pretrain.processes.gpus._present", lambda environ: 0)
    found = _engine(Namespace(engine="local", jobs=0, glue_jobs=1), 1, runs).keywords
    assert (len(found["devices"]), found["threads"]) == (slots, threads)


def test_the_arms_of_published_medium_differ_only_in_what_the_study_says():
    loaded = study.load("published-medium", toy=False)
    checked = arms_of(loaded)
    clap = {"dropout", "embedding_norm", "head", "normalize_embeddings"}
    expected = {
        ("baseline", "learned-clap"): clap,
        ("baseline", "alibi"): {"position"},
        ("baseline", "zero-clap"): clap | {"position", "embedding_scale", "mask_embedding"},
        ("baseline", "sinusoidal"): {"position"},
        ("baseline", "baseline without dropout"): {"dropout"},
        ("baseline", "alibi without dropout"): {"dropout", "position"},
        ("baseline without dropout", "learned-clap"): clap - {"dropout"},
        ("baseline without dropout", "alibi without dropout"): {"position"},
        ("alibi", "alibi without dropout"): {"dropout"},
        ("alibi without dropout", "zero-clap"): (clap - {"dropout"})
        | {"embedding_scale", "mask_embedding"},
    }
    assert {
        (one.name, other.name): {
            key.removeprefix("model.") for key in study.differences(checked[one], checked[other])
        }
        for one, other in study.comparisons(checked, pairs=loaded.pairs)
    } == expected


def test_some_models_are_fine_tuned_in_more_ways_and_some_tasks_with_other_seeds(tmp_path):
    loaded = study.load("published-medium", toy=False)
    options = Namespace(overrides=[], data="GLUE", glue_jobs=6)
    found = {}
    for arm, checked in arms_of(loaded, "data.corpus=c").items():
        stages = _stages(loaded, study.Run(arm, 1), checked, tmp_path, options)
        found[arm.name] = {each.name: each.arguments for each in stages if "glue" in each.name}
    first = ["glue-first-token", "glue-first-token+1"]
    assert list(found["sinusoidal"]) == first
    both = [name for name, of in found.items() if list(of) == [*first, "glue-mean", "glue-mean+1"]]
    assert both == ["baseline", "alibi", "zero-clap"]
    most, sst = (" ".join(found["alibi"][name]) for name in ("glue-mean", "glue-mean+1"))
    assert "--jobs 6 --tasks CoLA,MRPC,RTE,STS-B --seeds 1,2,3,4,5" in most
    assert most.endswith(" pooling=mean")
    assert "--tasks SST-2 --seeds 1,2" in sst
    assert sst.endswith(" pooling=mean epochs=3")
    assert most.split()[most.split().index("--output") + 1] in sst  # one folder of scores


def test_a_task_with_settings_alone_has_the_seeds_of_the_others():
    own = study.OfTask(settings={"epochs": 3})
    section = study.FineTuning(["CoLA", "SST-2"], [4, 5], by_task={"SST-2": own})
    assert section.groups == [(["CoLA"], [4, 5], []), (["SST-2"], [4, 5], ["epochs=3"])]
    section = replace(section, tasks=["cola", "sst2"])  # tasks have several spellings
    assert section.groups == [(["CoLA"], [4, 5], []), (["SST-2"], [4, 5], ["epochs=3"])]


def test_a_study_that_is_not_text_is_refused_by_its_name(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_bytes(b"title: \xff")
    with pytest.raises(ValueError, match=r"study\.yaml: "):
        study.load(str(path), toy=False)


def test_every_corpus_of_a_mixture_is_evaluated(study_file, tmp_path):
    loaded = study.load(str(study_file), toy=True)
    arm, checked = next(iter(check_arms(loaded, []).items()))
    pile = CorpusConfig(checked.config.data.corpus)
    data = replace(
        checked.config.data, corpus="", corpora={"my-pile": pile, "web": CorpusConfig("w")}
    )
    options = Namespace(overrides=[], data="", glue_jobs=1)

    def evaluations(config):
        """The file, the corpus and the lengths of each evaluation of a run."""
        own = replace(checked, config=config)
        stages = _stages(loaded, study.Run(arm, 1), own, tmp_path, options)
        for words in (stage.arguments for stage in stages if "evaluate" in stage.arguments):
            file, *other = (words[words.index(f"--{n}") + 1] for n in ("json", "data", "lengths"))
            yield Path(file).name, *other

    lengths = "32,64"  # learned positions end at 64
    assert [*evaluations(checked.config)] == [("evaluation.json", pile.path, lengths)]
    files = ("evaluation-my-pile.json", "evaluation-web.json")
    expected = [(files[0], pile.path, lengths), (files[1], "w", lengths)]
    assert [*evaluations(replace(checked.config, data=data))] == expected
    for number, name in enumerate(files):
        score = {"length": 512, "total": {"perplexity": number}, "pairs": {"sop": {"accuracy": 1}}}
        score["subsets"] = {"books": {"perplexity": 7}}
        (tmp_path / name).write_text(json.dumps([score, {**score, "length": 1024}]))
    figures = results._evaluated(tmp_path, subsets=False)
    assert results._evaluated(tmp_path, subsets=True)["perplexity on web on books, 512 tokens"] == 7
    assert (figures["perplexity on my-pile, 512 tokens"], figures["sop accuracy on web"]) == (0, 1)
    assert (figures["perplexity on web, 1,024 tokens"], len(figures)) == (1, 6)
    draw_lengths(results.table({(arm, 1): figures}), tmp_path)
    assert (tmp_path / "lengths.svg").read_text().count("learned, some on ") == 2


def test_a_dry_run_says_runs_and_cost_and_writes_nothing(study_file, tmp_path, capsys):
    output = tmp_path / "output"
    words = f"--output {output} --dry-run --kind h100 training.deepspeed=zero1_fp16"
    assert main(["study", str(study_file), *words.split()]) == 0
    text = capsys.readouterr().out
    assert "4 arms with seeds 1, 2: 8 runs" in text
    assert "of one h100" in text
    assert text.count("recipe=") == 1  # what holds for all arms is said once
    assert text.count("model.overrides.dropout=0.0") == 2  # in the arms that have it
    assert not output.exists()


@pytest.mark.parametrize("named", ["absent", "''"])
def test_a_dry_run_needs_neither_a_corpus_nor_the_data_of_glue(named, tmp_path, capsys):
    output = tmp_path / "output"
    words = ["study", "alibi-glue", "--toy", "--output", str(output), f"data.corpus={named}"]
    assert main([*words, "--dry-run", "--kind", "h100"]) == 0
    assert "vocabulary: assumed" in capsys.readouterr().out
    assert main(words) == 2
    assert "data.corpus: " in capsys.readouterr().err


def test_seeds_and_the_report_of_a_study_that_was_begun_may_change_and_nothing_else(
    tmp_path, monkeypatch
):
    levels = {"f": {"x": {}, "y": {}}}
    begun = study.Study("a", "small", levels, [1], settings={"spike.deviations": math.inf})

    def begin(now=begun, overrides=(), corpus="a", digest="first", glue="first"):
        manifest = SimpleNamespace(digest=lambda: digest)
        monkeypatch.setattr("data_prep.manifest.load_manifest", {Path(corpus): manifest}.get)
        config = load("small", [f"data.corpus={corpus}"])
        checked = {study.Arm((), {}): SimpleNamespace(config=config)}
        _begin(tmp_path / STUDY, now, checked, [*overrides], {"CoLA": glue})

    begin()
    for free in ({"title": "b"}, {"best": "f"}, {"pairs": [("x", "y")]}, {"seeds": [1, 2]}):
        begin(replace(begun, **free))
    wrong = (
        ({"now": replace(begun, lengths=[64])}, "other lengths"),
        ({"overrides": ["training.steps=40"]}, "other overrides"),
        ({"corpus": "b"}, "other recipes"),  # a file as well, which may have changed since
        ({"digest": "second"}, "other corpora; name another --output, or .* data as it was"),
        ({"glue": "second"}, "other data of tasks"),
    )
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            begin(**changed)

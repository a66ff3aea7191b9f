"""Protocols: the settings of studies, searches, and runs that start from another task's model."""

import argparse
import dataclasses
import json
import shutil

import pytest

from data_prep.common.files import write_json
from finetune import __main__ as command
from finetune import benchmarks, launch, planning, protocols, report
from finetune.__main__ import main
from finetune.plan import read_plan, retry_after
from finetune.protocols import PROTOCOLS
from finetune.summary import tasks_of

EIGHT = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE")
QUICK = ["epochs=1", "pooling=mean", "max_train_examples=32"]

# Learning rate, weight decay of a step, batch size, epochs and seeds in mosaicml/examples.
MOSAICBERT = {
    "MNLI": (5e-5, 5e-6, 48, 3, 1),
    "RTE": (1e-5, 1e-5, 16, 3, 5),
    "QQP": (3e-5, 3e-6, 16, 5, 1),
    "CoLA": (5e-5, 5e-6, 32, 10, 4),
    "MRPC": (8e-5, 8e-6, 32, 10, 5),
    "QNLI": (1e-5, 1e-6, 16, 10, 1),
    "SST-2": (3e-5, 3e-6, 16, 3, 3),
    "STS-B": (3e-5, 3e-6, 32, 10, 5),
}


def configs(protocol, task, *overrides):
    return PROTOCOLS[protocol].configs(benchmarks.find(task), overrides)


def test_the_command_offers_every_protocol():
    parser = argparse.ArgumentParser()
    command._glue_arguments(parser)
    offered = {action.dest: action.choices for action in parser._actions}
    assert offered["protocol"] == tuple(PROTOCOLS)


@pytest.mark.parametrize("task", EIGHT)
def test_roberta_searches_rates_and_batches_that_include_those_fairseq_names(task):
    found = configs("roberta", task)
    assert len(found) == 6
    (named,) = configs("published", task)
    assert (named.learning_rate, named.batch_size) in {
        (config.learning_rate, config.batch_size) for config in found
    }
    for config in found:
        assert (config.epochs, config.warmup_fraction, config.weight_decay) == (10, 0.06, 0.1)
        assert (config.gradient_clipping, config.start_from) == (0.0, "")
    assert PROTOCOLS["roberta"].seeds(benchmarks.find(task)) == 5


@pytest.mark.parametrize("task", EIGHT)
def test_mosaicbert_decays_weights_as_much_in_a_step_as_its_own_optimizer(task):
    rate, decay, batch, epochs, seeds = MOSAICBERT[task]
    (config,) = configs("mosaicbert", task)
    assert (config.learning_rate, config.batch_size, config.epochs) == (rate, batch, epochs)
    assert config.learning_rate * config.weight_decay == pytest.approx(decay)
    assert PROTOCOLS["mosaicbert"].seeds(benchmarks.find(task)) == seeds
    from_mnli = task in ("RTE", "MRPC", "STS-B")
    assert config.start_from == ("MNLI" if from_mnli else "")


@pytest.mark.parametrize("task", EIGHT)
def test_modernbert_searches_rates_decays_and_epochs_in_batches_of_64(task):
    found = configs("modernbert", task)
    assert len(found) == 4 * 4 * 3
    decays = {f"{config.learning_rate * config.weight_decay:.1g}" for config in found}
    assert decays == {"1e-06", "5e-06", "8e-06", "1e-05"}
    assert {(config.batch_size, config.max_tokens) for config in found} == {(64, 256)}
    assert found[0].start_from == configs("mosaicbert", task)[0].start_from


def test_a_setting_that_the_user_names_is_not_searched():
    assert len(configs("roberta", "RTE", "learning_rate=2e-5")) == 2
    assert protocols.searched(configs("roberta", "RTE", "learning_rate=2e-5")) == ("batch_size",)
    assert len(configs("roberta", "RTE", "learning_rate=2e-5", "batch_size=16")) == 1


@pytest.mark.parametrize("protocol", ["roberta", "mosaicbert", "modernbert"])
def test_a_task_that_a_study_has_not_done_is_refused_and_no_part_of_all(protocol):
    with pytest.raises(ValueError, match=f"WNLI: protocol {protocol} has no settings for it"):
        configs(protocol, "WNLI")
    assert [t for t in benchmarks.find_all(["all"]) if PROTOCOLS[protocol].settings(t)] == [
        benchmarks.find(task) for task in EIGHT
    ]


def result(protocol, seed, value, last=0.0, *, task="RTE", retry=0, collapsed="", **searched):
    metric = benchmarks.find(task).metrics[0]
    scores = dict.fromkeys(benchmarks.find(task).score_names, 0.5)
    epochs = [{"epoch": 1, **scores, metric: value}, {"epoch": 2, **scores, metric: last}]
    return {
        "plan": {
            "model": "none",
            "data": "none",
            "protocol": protocol,
            "searched": list(searched),
            "config": {"best_epoch_by": "benchmark", **searched},
        },
        "task": task,
        "weights": "pretrained",
        "seed": seed,
        "retry": retry,
        "collapsed": collapsed,
        "epochs": epochs,
        "best": epochs[0],
        "last": epochs[1],
        "majority": {**scores, metric: 0.5},
        "train_examples": 1000,
        "dev_examples": 200,
        "seconds": 10.0,
        "tokens_per_second": 5000.0,
        "device": "cpu",
    }


def choose(results):
    return protocols.choose(results, tasks_of(results))


def test_the_settings_with_the_best_median_are_chosen_and_the_others_left_out():
    lucky = [
        result("roberta", seed, v, batch_size=16) for seed, v in ((1, 0.9), (2, 0.6), (3, 0.6))
    ]
    steady = [result("roberta", seed, 0.7, batch_size=32) for seed in (1, 2, 3)]
    kept, (choice,) = choose([*lucky, *steady])
    assert kept == steady
    assert choice.chosen == (("batch_size", 32),)
    assert choice.scores[("batch_size", 16),] == (0.6, 3)


def test_settings_of_an_unfinished_search_that_have_fewer_seeds_are_not_chosen():
    few = [result("roberta", 1, 0.9, batch_size=16)]
    many = [result("roberta", seed, 0.7, batch_size=32) for seed in (1, 2)]
    assert choose([*few, *many])[0] == many


def test_without_a_search_every_run_is_kept():
    runs = [result("default", seed, 0.7) for seed in (1, 2)]
    assert choose(runs) == (runs, [])


@pytest.mark.parametrize(
    ("protocol", "values", "expected"),
    [
        ("roberta", (0.5, 0.6, 0.8), 0.6),
        ("mosaicbert", (0.5, 0.6, 0.8), 0.0),  # of the last epochs
        ("modernbert", (0.5, 0.6, 0.8), 0.8),
    ],
)
def test_each_study_reports_another_number_of_the_same_runs(protocol, values, expected):
    task, study = benchmarks.find("RTE"), PROTOCOLS[protocol]
    runs = [result(protocol, seed, value) for seed, value in enumerate(values)]
    assert study.combined([study.score(run, task) for run in runs], task) == expected


def test_the_report_has_the_study_s_table_the_search_and_the_chosen_runs(tmp_path):
    for seed in (1, 2, 3):
        for batch, value in ((16, 0.6), (32, 0.7875)):
            run = result("roberta", seed, value, batch_size=batch)
            (tmp_path / f"{seed}-{batch}").mkdir()
            write_json(tmp_path / f"{seed}-{batch}" / "result.json", run)
    text = report.write_report(tmp_path)
    lines = text.splitlines()
    assert "| RoBERTa base | 63.6 | 87.6 | 90.2 | 92.8 | 91.9 | 78.7 | 94.8 | 91.2 |" in lines
    assert "| **ours**, pretrained |  |  |  |  |  | 78.8 |  |  |" in lines
    assert "| batch_size 16 | 3 | 0.6000 |" in lines
    assert "| **batch_size 32** | 3 | 0.7875 |" in lines
    assert "| pretrained | 3 | 0 | 0.7875 | 0.0000 |" in lines
    table = (tmp_path / "report.csv").read_text().splitlines()
    assert "published RoBERTa base,STS-B,pearson,best by this score,1,0,0.912,0.912,0.912" in table


def planned(model, data, tasks, *overrides, protocol="default", seeds=(1,), **more):
    found = benchmarks.find_all(tasks)
    return planning.plan_runs(
        model,
        str(data),
        found,
        ["pretrained"],
        seeds,
        [*QUICK, *overrides],
        protocol=protocol,
        **more,
    )


def finish(output, plan, model, **changes):
    """Write a run's folder as if it had been done."""
    plan.write(output / plan.name)
    shutil.copytree(model, output / plan.name / "model")
    values = {**result("default", plan.seed, 0.5, task=plan.task), **changes}
    write_json(output / plan.name / "result.json", {**values, "plan": dataclasses.asdict(plan)})


def test_a_run_starts_from_the_model_of_another_task_s_run(
    run_ranks, tiny_model, easy_glue, tmp_path
):
    import torch

    from finetune import train
    from pretrain.models import model_folder

    output = tmp_path / "runs"
    contents = model_folder.load_model(tiny_model).contents()
    doubled = {name: 2 * tensor for name, tensor in contents.weights.items()}
    other = tmp_path / "other"
    model_folder.save_model(other, dataclasses.replace(contents, weights=doubled))
    cola, rte = planned(
        tiny_model, easy_glue, ["CoLA", "RTE"], "start_from=CoLA", "learning_rate=1e-12"
    )[::-1]
    assert planning.rounds([rte, cola]) == [[cola], [rte]]
    planning.check(output, [cola, rte])
    with pytest.raises(ValueError, match="has no finished run of CoLA with a model"):
        planning.start(output, rte)
    finish(output, cola, other)
    (waiting,) = planning.prepare(output, [cola, rte])
    assert (waiting.task, waiting.start) == ("RTE", cola.name)
    assert read_plan(output / rte.name) == waiting
    run_ranks(1, lambda: train.train(waiting, output / rte.name))
    name = "encoder.embeddings.tokens.weight"
    began, kept, usual = (
        model_folder.load_model(folder).model.state_dict()[name]
        for folder in (other, output / rte.name / "model", tiny_model)
    )
    assert torch.allclose(began, kept, atol=1e-6)
    assert not torch.allclose(usual, kept, atol=1e-3)


def test_a_run_starts_from_the_first_seed_that_did_not_collapse(tiny_model, easy_glue, tmp_path):
    *colas, rte = sorted(
        planned(tiny_model, easy_glue, ["CoLA", "RTE"], "start_from=CoLA", seeds=(1, 2, 3)),
        key=lambda plan: (plan.task, plan.seed),
    )[:4]
    for plan, collapsed in zip(colas, ("always the same answer", "", ""), strict=True):
        finish(tmp_path, plan, tiny_model, collapsed=collapsed)
    assert planning.start(tmp_path, rte).start == "CoLA-pretrained-seed2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "RTE", "start_from=MNIL"], "unknown task 'MNIL' (did you mean MNLI?)"),
        (["--tasks", "RTE", "start_from=mnli"], "RTE starts from the model of MNLI (start_from)"),
        (["--tasks", "CoLA,RTE", "--no-models", "start_from=CoLA"], "leave out --no-models"),
        (["--tasks", "RTE", "--protocol", "mosaicbert"], "add MNLI to --tasks"),
        (["--tasks", "WNLI", "--protocol", "roberta"], "WNLI: protocol roberta has no settings"),
        (["--tasks", "RTE", "--protocol", "roberta", "batch_size=0"], "batch_size"),
        (["--tasks", "BoolQ", "--protocol", "published"], "BoolQ: protocol published has no"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    tiny_model, easy_glue, tmp_path, capsys, arguments, message
):
    words = ["glue", str(tiny_model), "--data", str(easy_glue), "--output", str(tmp_path / "runs")]
    assert main([*words, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_runs_of_two_protocols_do_not_share_a_folder(tiny_model, easy_glue, tmp_path):
    (done,) = planned(tiny_model, easy_glue, ["CoLA"])
    finish(tmp_path, done, tiny_model)
    with pytest.raises(ValueError, match="protocol: default, now roberta"):
        planning.check(tmp_path, planned(tiny_model, easy_glue, ["RTE"], protocol="roberta"))


def test_a_search_of_fewer_settings_does_not_share_a_folder_with_the_whole(
    tiny_model, easy_glue, tmp_path
):
    whole = planned(tiny_model, easy_glue, ["CoLA"], protocol="roberta")
    assert len({plan.name for plan in whole}) == 6
    finish(tmp_path, whole[0], tiny_model)
    assert len(planning.prepare(tmp_path, whole)) == 5
    less = planned(tiny_model, easy_glue, ["CoLA"], "batch_size=16", protocol="roberta")
    with pytest.raises(ValueError, match="searched: .*batch_size.*, now .*learning_rate"):
        planning.check(tmp_path, less)


@pytest.mark.slow
def test_a_search_is_done_in_rounds_and_resumed(tiny_model, easy_glue, tmp_path, in_root, capsys):
    words = f"glue {tiny_model} --data {easy_glue} --tasks CoLA,RTE --output {tmp_path}"
    settings = ["--protocol", "roberta", "--seeds", "1", "start_from=CoLA", "batch_size=16", *QUICK]
    assert main([*words.split(), *settings]) == 0
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(results) == 6
    assert "a search of 6 runs, about 0 min with" in capsys.readouterr().out
    starts = {r["plan"]["start"] for r in results if r["task"] == "RTE"}
    assert len(starts) == 1
    assert starts.pop().startswith("CoLA-pretrained-seed1-learning_rate")
    shutil.rmtree(next(tmp_path.glob("RTE-*")))
    assert main([*words.split(), *settings]) == 0
    shown = capsys.readouterr().out
    assert (
        "a search of 1 run, about 0 min with 1 at once, at the pace of the finished runs" in shown
    )
    assert "runs to do: 0, finished before: 3" in shown
    assert "runs to do: 1, finished before: 2" in shown


@pytest.mark.parametrize(
    ("searched", "limit", "due"),
    [((), None, True), (("epochs",), None, False), (("epochs",), 1, True)],
)
def test_a_run_of_a_search_that_collapsed_is_repeated_only_if_the_user_asks_for_it(
    tiny_model, easy_glue, searched, limit, due
):
    (plan,) = planned(tiny_model, easy_glue, ["CoLA"])
    outcome = {"collapsed": "always the same answer", "train_examples": 5000}
    following = retry_after(dataclasses.replace(plan, searched=searched), outcome, limit)
    assert bool(following) == due


def test_the_cost_of_a_search_is_said_at_the_pace_of_finished_runs(tiny_model, easy_glue, tmp_path):
    first, *others = planned(tiny_model, easy_glue, ["CoLA"], protocol="roberta")
    finish(tmp_path, first, tiny_model, training_seconds=7200.0)
    words, failed = launch._cost(tmp_path, [first, *others], jobs=2, world_size=1)
    assert failed == {}
    # Five runs of two hours, two at a time.
    assert words.startswith("a search of 5 runs, about 5 h with 2 at once, at the pace of the fin")


def test_a_search_whose_trial_fails_starts_nothing(tiny_model, easy_glue, tmp_path, in_root):
    plans = planned(tiny_model, easy_glue, ["CoLA"], protocol="roberta")
    plans = [dataclasses.replace(plan, model=str(tmp_path / "gone")) for plan in plans]
    lines = []
    failed = launch.run_rounds(tmp_path / "runs", plans, lines.append, jobs=1)
    assert ["has no model.json" in cause or "gone" in cause for cause in failed.values()] == [True]
    assert lines == [f"{tmp_path / 'runs'}: a short trial of CoLA failed"]
    assert not (tmp_path / "runs").exists()


def test_runs_that_lost_what_they_start_from_are_named(
    tiny_model, easy_glue, tmp_path, monkeypatch
):
    plans = planned(tiny_model, easy_glue, ["CoLA", "RTE"], "start_from=CoLA")
    failing = {"CoLA-pretrained-seed1": "out of memory"}
    monkeypatch.setattr(launch, "run_all", lambda output, waiting, log, **_: failing)
    failed = launch.run_rounds(tmp_path, plans, lambda line: None)
    assert failed.keys() == {"CoLA-pretrained-seed1", "RTE-pretrained-seed1"}
    assert "not started" in failed["RTE-pretrained-seed1"]

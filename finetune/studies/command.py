"""The command `study`: compare arms, from pretraining to a table with intervals."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from data_prep.common import children
from data_prep.common.arguments import CommandFailed, at_least, numbers
from data_prep.common.files import check_new, lock, read_json, strict_json, write_json
from data_prep.common.wording import count, duration, in_short
from finetune.studies import job
from finetune.studies.job import EVALUATION, Ended, Stage
from pretrain.checks.devices import DEVICES
from pretrain.processes import gpus

if TYPE_CHECKING:
    from finetune.studies.study import Arm, Checked, Run, Study

STUDY = "study.json"
_FREE = {"seeds", "title", "best", "pairs", "subsets"}
"""What may change in a study that was begun: seeds, and what only the report depends on."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `study`."""
    add = command.add_argument
    add("study", help="a YAML file, or the name of one in finetune/studies")
    add("--output", type=Path, required=True, help="the folder of its runs and its report")
    add("--toy", action="store_true", help="at the small size that the study names, for CPU cores")
    add("--seeds", type=numbers, help="such as 1-5; more may be added later (default: the study's)")
    add("--data", default="", help="GLUE's data, as for glue; needed where models are fine-tuned")
    add("--jobs", type=at_least(0), default=0, help="runs at once (default: as the devices allow)")
    at_once = "fine-tunings of a run at once, which share its device (default: %(default)s)"
    add("--glue-jobs", type=at_least(1), default=1, metavar="N", help=at_once)
    engine = "on this machine, or each run as a task of a Ray cluster (default: %(default)s)"
    add("--engine", choices=("local", "ray"), default="local", help=engine)
    add("--dry-run", action="store_true", help="print arms, runs and costs, and do nothing")
    add("--kind", choices=DEVICES, help="with --dry-run: which GPUs, to estimate hours on them")
    overrides = "settings of all arms, such as data.corpus=corpora/wikitext"
    add("overrides", nargs="*", default=[], metavar="key=value", help=overrides)


def study(options: argparse.Namespace) -> None:
    """Train and measure the arms of a study with several seeds, and report the differences.

    Every run is supervised. The same command continues a study that was stopped or killed, and
    does nothing twice.

    example: zeroclap study clap-without-confound --output clap data.corpus=corpora/pile
    """
    from finetune.studies import study as studies
    from finetune.studies.checks import check_arms
    from finetune.studies.report import write_report
    from finetune.studies.results import collect

    chosen = studies.load(options.study, toy=options.toy)
    chosen = dataclasses.replace(chosen, seeds=options.seeds or chosen.seeds)
    is_here = options.engine == "local" and not options.dry_run
    device = gpus.device_type() if is_here else ""
    checked = check_arms(chosen, options.overrides, device, not options.dry_run)
    runs = studies.runs_of([*checked], chosen.seeds)
    if options.dry_run:
        sys.stdout.write(_forecast(chosen, checked, runs, options))
        return
    glue = _check_data(chosen, options.data)
    engine = _engine(options, max(each.ranks for each in checked.values()), len(runs))
    if not (options.output / STUDY).exists():
        check_new(options.output, "lock")  # a study that was killed at once has no more
    options.output.mkdir(parents=True, exist_ok=True)
    with lock(options.output / "lock", "another process works on this study"):
        _begin(options.output / STUDY, chosen, checked, options.overrides, glue)
        try:
            failed = _do(chosen, checked, runs, options, engine)
        finally:  # a study that is stopped has a report of what is finished
            found = collect(chosen, runs, options.output)
            sys.stdout.write(f"\n{write_report(chosen, checked, found, options.output)}\n")
    if left_out := failed or found.unfinished:
        raise CommandFailed("; ".join(left_out))


def _check_data(chosen: Study, data: str) -> dict[str, str]:
    """Return the digest of each task's data; raise ValueError if some is missing."""
    from finetune import runs, tasks

    if not chosen.finetune:
        return {}
    if not data:
        raise ValueError("--data: the study fine-tunes its models; name the folder of GLUE's data")
    named = tasks.find(chosen.finetune.tasks)
    read = runs.read_tasks(data, named, runs.check_settings(named, []))
    return {task: digest for task, (digest, _) in read.items()}


def _begin(
    path: Path,
    chosen: Study,
    checked: Mapping[Arm, Checked],
    overrides: Sequence[str],
    glue: Mapping[str, str],
) -> None:
    """Write the study, recipes and digests of data; raise ValueError if the folder has others.

    Seeds may be added, and the report may change (`_FREE`).
    """
    import json

    from data_prep.manifest import load_manifest

    now = dataclasses.asdict(chosen) | {"overrides": overrides, "data of tasks": glue}
    now["recipes"] = {arm.name: dataclasses.asdict(each.config) for arm, each in checked.items()}
    paths = {source.path for each in checked.values() for source in each.config.segments.sources}
    now["corpora"] = {path: load_manifest(Path(path)).digest() for path in paths}
    now = json.loads(strict_json(now))  # as it is read back: JSON has no infinity
    if path.exists():
        before = read_json(path)
        for changed in (key for key in now if key not in _FREE and before.get(key) != now[key]):
            raise ValueError(
                f"{path.parent}: was begun with other {changed}; name another --output, or give "
                "the same study and settings, and data as it was"
            )
    write_json(path, now)


def _do(
    chosen: Study,
    checked: Mapping[Arm, Checked],
    runs: Sequence[Run],
    options: argparse.Namespace,
    engine: Callable[[Sequence[Path], Ended], None],
) -> list[str]:
    """Execute the unfinished stages of all runs; describe the failures."""
    from pretrain.processes.launching import describe_exit

    folders = [options.output / run.name for run in runs]
    for folder, run in zip(folders, runs, strict=True):
        job.write(folder, _stages(chosen, run, checked[run.arm], folder, options))
    left = [folder for folder in folders if job.stages_left(folder)]
    print(f"{options.output}: runs to do: {len(left)}, finished before: {len(runs) - len(left)}")
    done, failed = len(runs) - len(left), list[str]()

    def ended(folder: Path, code: int) -> None:
        nonlocal done
        done += 1
        how = f"failed, {describe_exit(code)}; see {folder / job.LOG}" if code else "done"
        print(f"[{done}/{len(runs)}] {folder.name}: {how}", flush=True)
        if code:
            failed.append(f"{folder.name}: {how}")

    if left:
        engine(left, ended)
    return failed


def _stages(
    chosen: Study, run: Run, checked: Checked, folder: Path, options: argparse.Namespace
) -> list[Stage]:
    """Return the commands of a run."""
    from finetune.studies.study import finetuning_arms, lengths_of
    from pretrain.config.settings import override

    model, trained = str(folder / "model"), str(folder / "run")
    words = [*run.arm.words, *options.overrides, f"training.seed={run.seed}"]
    words += [override("folder", trained)]
    found = [
        Stage("train", ["supervise", run.arm.recipe, *words]),
        Stage("export", ["export", trained, "--output", model], makes=model),
    ]
    lengths = ",".join(map(str, lengths_of(chosen, checked.model)))
    corpora = {source.path: source.name for source in checked.config.segments.sources}
    for path, name in corpora.items():
        of_corpus = f"-{quote(name, safe='')}" if len(corpora) > 1 else ""
        evaluate = ["evaluate", model, "--data", path]
        evaluate += ["--json", str(folder / f"{EVALUATION}{of_corpus}.json")]
        evaluate += ["--lengths", lengths] if lengths else []
        found.append(Stage(f"evaluate{of_corpus}", evaluate))
    for way in finetuning_arms(chosen, run.arm):
        assert chosen.finetune is not None
        for number, (tasks, seeds, own) in enumerate(chosen.finetune.groups):
            glue = ["glue", model, "--data", options.data, "--no-models"]
            glue += ["--jobs", str(options.glue_jobs), "--tasks", ",".join(tasks)]
            glue += ["--seeds", ",".join(map(str, seeds))]
            glue += ["--output", str(folder / "scores" / way.folder), *way.words, *own]
            # A folder's name has no "+", so that no two stages have the same one.
            found.append(Stage(f"glue-{way.folder}{f'+{number}' * bool(number)}", glue))
    return found


def _engine(
    options: argparse.Namespace, ranks: int, runs: int
) -> Callable[[Sequence[Path], Ended], None]:
    """Return what executes a number of runs, each of so many ranks."""
    from finetune.starting import slots

    if options.engine == "ray":
        from data_prep.engines import import_ray

        import_ray()
        return partial(job.do_on_ray, ranks=ranks, jobs=options.jobs)
    gpus.gpus_of(ranks)
    cores = children.usable_cores()
    devices = slots(gpus.visible_gpus(), cores, options.jobs, ranks)[:runs]
    threads = max(1, cores // (len(devices) * ranks * options.glue_jobs))
    return partial(job.do_here, devices=devices, threads=threads)


def _forecast(
    chosen: Study, checked: Mapping[Arm, Checked], runs: Sequence[Run], options: argparse.Namespace
) -> str:
    """Describe the runs of a study and their cost."""
    from finetune.studies.study import finetuning_arms
    from pretrain.checks.needs import parameters
    from pretrain.plan import plan as planning

    kind, arms = options.kind or "h100", checked.values()
    plans = [planning.plan(each.config, each.ranks, kind) for each in arms]
    words = [[f"recipe={arm.recipe}", *arm.words] for arm in checked]
    shared = [word for word in words[0] if all(word in others for others in words)]
    lines = [chosen.title, "", f"all arms: {' '.join([*shared, *options.overrides])}"]
    for (arm, each), own in zip(checked.items(), words, strict=True):
        differs = " ".join(word for word in own if word not in shared)
        lines.append(f"{arm.name}: {in_short(parameters(each.model))} parameters; {differs}")
    seeds = len(chosen.seeds)
    numbers = ", ".join(map(str, chosen.seeds))
    lines += ["", f"{count(len(checked), 'arm')} with seeds {numbers}: {count(len(runs), 'run')}"]
    tokens = seeds * sum(plan.tokens for plan in plans)
    lines.append(f"tokens: at most {in_short(tokens)}, padding included")
    if any(plan.vocab_size_is_assumed for plan in plans):
        lines.append("vocabulary: assumed, as no corpus of some arm is on this machine")
    disk = seeds * sum(p.checkpoint * p.checkpoints_usual + p.exported for p in plans)
    lines.append(f"disk: about {disk / 1e9:,.1f} GB of checkpoints and models")
    times = [p.seconds and p.seconds * each.ranks for p, each in zip(plans, arms, strict=True)]
    if not options.kind:
        lines.append("hours: unknown; name a GPU with --kind to estimate them")
    elif all(times):
        seconds = seeds * sum(filter(None, times))
        about = f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else duration(seconds)
        lines.append(f"pretraining: about {about} of one {options.kind}, an estimate")
    else:
        lines.append(f"hours: unknown; recipes of this kind were not measured on {options.kind}")
    if chosen.finetune:
        ways = sum(len(finetuning_arms(chosen, run.arm)) for run in runs)
        number = ways * sum(chosen.finetune.seeds_by_task.values())
        tasks = ", ".join(chosen.finetune.tasks)
        lines.append(f"fine-tuning: {count(number, 'run')} on {tasks}")
    return "\n".join(lines) + "\n"

import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from data_prep import cache
from data_prep.common import children
from data_prep.common.files import AtomicFile, sha256_of, write_atomically
from data_prep.engines import ENGINES, WorkerDied
from data_prep.manifest import Count, Rejects, Settings, ShardManifest, read_record
from data_prep.run import merge, plan, prepare
from data_prep.verify import verify
from finetune.zeroclap import main
from tests.data_prep.conftest import SETTINGS, content, documents, make_texts, write_pile
from tests.running import ROOT, wait_until


def test_corpus_has_the_documents_of_the_inputs(corpus_folder, manifest, tokenizer):
    texts = [text for seed in range(3) for text in make_texts(120, 60, seed=seed)]
    expected = [[*ids.tolist(), 2] for ids in tokenizer.encode_batch(texts) if len(ids) + 2 <= 64]
    found = documents(corpus_folder, "train") + documents(corpus_folder, "valid")
    assert Counter(map(tuple, found)) == Counter(map(tuple, expected))
    assert 0 < len(expected) < len(texts)
    assert manifest.rejects["too-long"].count == len(texts) - len(expected)
    assert sum(manifest.rejects["too-long"].by_subset.values()) == len(texts) - len(expected)
    assert sum(manifest.length_histogram.counts) == len(texts)
    assert sum(total.documents for total in manifest.totals.values()) == len(expected)
    assert sum(total.tokens for total in manifest.totals.values()) == sum(map(len, expected))


@pytest.mark.usefixtures("in_workers")
def test_bytes_do_not_depend_on_the_number_of_workers(
    corpus_folder, inputs, tokenizer_folder, tmp_path
):
    prepare(inputs, tmp_path / "two", tokenizer_folder, SETTINGS, workers=2)
    assert content(tmp_path / "two") == content(corpus_folder)


def test_split_depends_only_on_the_text(corpus_folder, tokenizer_folder, tmp_path):
    texts = [text for seed in (2, 0, 1) for text in reversed(make_texts(120, 60, seed=seed))]
    one_file = write_pile(tmp_path / "all.jsonl.zst", texts)
    prepare([one_file], tmp_path / "corpus", tokenizer_folder, SETTINGS)
    for split in ("train", "valid"):
        one, three = (documents(each, split) for each in (tmp_path / "corpus", corpus_folder))
        assert sorted(one) == sorted(three)


def killed(number, work, *arguments):
    """Run work in a process that is killed at a file, before it has its name, or after."""
    left, commit = itertools.count(number, -1), AtomicFile.commit

    def commit_or_end(file):
        is_last = next(left) == 1
        if is_last and number % 2:
            os._exit(9)
        record = commit(file)
        if is_last:
            os._exit(9)
        return record

    def run():
        AtomicFile.commit = commit_or_end
        work(*arguments)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(60)
    return child.exitcode == 9


def test_a_run_killed_at_any_file_tears_nothing_and_continues_to_the_same_bytes(
    corpus_folder, inputs, tokenizer_folder, tmp_path
):
    """The vocabulary is the first file of a run, and nine are those of a shard."""
    arguments = inputs, tmp_path, tokenizer_folder, SETTINGS
    partial = set()
    for number in (*range(1, 12), 11):
        assert killed(number, prepare, *arguments)
        left, partial = partial, {*tmp_path.rglob("*.partial")}
        assert not left & partial
        assert not (tmp_path / "manifest.json").exists()
        shards = [read_record(ShardManifest, file) for file in tmp_path.glob("shards/shard-*")]
        for files in itertools.chain(*(shard.files.values() for shard in shards)):
            for name, digest in files.hashes.items():
                assert sha256_of(tmp_path / name) == digest
    assert len(shards) == 3
    prepare(*arguments)
    assert content(tmp_path) == content(corpus_folder)


@pytest.mark.parametrize(("made", "numbers"), [(0, [1, 2, 5, 8, 9]), (1, [5])])
def test_a_run_whose_worker_is_killed_leaves_only_what_is_made(
    inputs, tokenizer_folder, tmp_path, monkeypatch, made, numbers
):
    """Anything left of the first shard would keep the same command from running again."""

    def engine(work, tasks, *_):
        for task in tasks[:made]:
            yield task, work(task)
        assert killed(number, work, tasks[made])
        yield tasks[made], WorkerDied("died")

    monkeypatch.setitem(ENGINES, "local", engine)
    for number in numbers:
        with pytest.raises(WorkerDied):
            prepare(inputs, tmp_path / f"{number}", tokenizer_folder, SETTINGS)
        assert (tmp_path / f"{number}").exists() == bool(made)
        assert not [*tmp_path.rglob("*.partial")]


def test_a_finished_corpus_without_its_shards_manifests_is_left_alone(
    copy, inputs, tokenizer_folder
):
    shutil.rmtree(copy / "shards")
    before = content(copy)
    with pytest.raises(ValueError, match="is not empty"):
        prepare(inputs, copy, tokenizer_folder, SETTINGS)
    assert content(copy) == before


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["manifest.json", "train/shard-00000.bin", ".lock"], "manifest.json: is not of a corpus"),
        (["shards/shard-7.json"], "shards/shard-7.json: is not of a corpus"),
        (["shards/0.txt", ".lock", "train/shard-0.tar", ".my.partial"], "is not empty"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_of_a_folder_that_is_no_corpus_is_removed(
    inputs, tokenizer_folder, tmp_path, names, message, overwrite
):
    for name in names:
        write_atomically(tmp_path / "mine" / name, b'{"start_url": "."}')
    before = content(tmp_path / "mine")
    with pytest.raises(ValueError, match=message):
        prepare(inputs, tmp_path / "mine", tokenizer_folder, SETTINGS, overwrite=overwrite)
    assert content(tmp_path / "mine") == before


@pytest.mark.parametrize(
    ("missing", "remade"),
    [
        ([], set()),
        (["train/shard-00001.bin", "manifest.json"], {"shard-00001", "manifest", "tokenizer"}),
    ],
)
def test_only_what_is_missing_is_made_again(missing, remade, copy, inputs, tokenizer_folder):
    before = content(copy)
    times = {file: file.stat().st_mtime_ns for file in map(copy.joinpath, before)}
    for name in missing:
        (copy / name).unlink()
    prepare(inputs, copy, tokenizer_folder, SETTINGS)
    assert content(copy) == before
    assert {file.stem for file, was in times.items() if file.stat().st_mtime_ns != was} == remade


def test_changed_settings_and_inputs_are_refused_until_overwrite(tokenizer_folder, tmp_path):
    files = [write_pile(tmp_path / f"{n}.jsonl.zst", make_texts(20, 20, seed=n)) for n in range(2)]
    more, corpus = write_pile(tmp_path / "2.jsonl.zst", make_texts(9, 20)), tmp_path / "corpus"
    prepare(files, corpus, tokenizer_folder, SETTINGS)
    before = content(corpus)
    changed = replace(SETTINGS, text_key="body", max_tokens=None)
    message = "max-tokens was 64 and is not given; text-key was text and is body.*--overwrite"
    with pytest.raises(ValueError, match=message):
        prepare(files, corpus, tokenizer_folder, changed)
    with pytest.raises(ValueError, match="left by a prepare of more inputs.*--overwrite"):
        prepare(files[:1], corpus, tokenizer_folder, SETTINGS)
    with pytest.raises(ValueError, match="a corpus of 2 inputs, and 3 are named.*--overwrite"):
        prepare([*files, more], corpus, tokenizer_folder, SETTINGS)
    with pytest.raises(ValueError, match=r"1\.jsonl\.zst differs from what was read.*--overwrite"):
        prepare(files[::-1], corpus, tokenizer_folder, SETTINGS)
    write_pile(files[0], make_texts(21, 20))
    with pytest.raises(ValueError, match=r"0\.jsonl\.zst differs from what was read.*--overwrite"):
        prepare(files, corpus, tokenizer_folder, SETTINGS)
    assert content(corpus) == before
    cache.made(corpus, "0" * 64, "aligned-0000000000000000", lambda folder: None)
    prepare(files[:1], corpus, tokenizer_folder, SETTINGS, overwrite=True)
    assert not (corpus / "blocks").exists()
    fresh = tmp_path / "fresh"
    prepare(files[:1], fresh, tokenizer_folder, SETTINGS)
    assert content(corpus) == content(fresh)


def test_touched_or_moved_input_with_the_same_content_is_accepted(tokenizer_folder, tmp_path):
    latin_1 = os.fsdecode(b"caf\xe9.jsonl.zst")
    file = write_pile(tmp_path / latin_1, make_texts(20, 20))
    prepare([file], tmp_path / "corpus", tokenizer_folder, SETTINGS)
    before = content(tmp_path / "corpus")
    os.utime(file, (1, 1))
    prepare([file], tmp_path / "corpus", tokenizer_folder, SETTINGS)
    moved = file.rename(tmp_path / "b.jsonl.zst")
    prepare([moved], tmp_path / "corpus", tokenizer_folder, SETTINGS)
    assert content(tmp_path / "corpus") == before


def test_one_corpus_a_subset_holds_every_text_once(tokenizer_folder, tmp_path):
    texts = make_texts(12, 5)
    named = [*zip(texts, "XYZ" * 4, strict=True)]
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text, "meta": {"pile_set_name": name}}) for text, name in named]
    file.write_text("\n".join(lines))
    kept = 0
    for name in "XYZ":
        settings = Settings(valid_fraction=0.0, subset=name)
        manifest = prepare([file], tmp_path / name, tokenizer_folder, settings)
        assert manifest.subsets == [name]
        others = manifest.rejects["other-subset"]
        assert {*others.by_subset} == {*"XYZ"} - {name}
        kept += manifest.totals["train"].documents
    assert kept == len(texts)
    with pytest.raises(ValueError, match="12 other-subset .*; subsets found: X, Y, Z"):
        prepare([file], tmp_path / "W", tokenizer_folder, Settings(subset="W"))


def test_every_reject_is_counted_with_its_place(tokenizer_folder, tmp_path):
    """The reasons of broken records: test_documents."""
    good = [json.dumps({"text": text, "meta": {"pile_set_name": "X"}}) for text in make_texts(4, 5)]
    long = json.dumps({"text": "\xe9" * 100})  # an id per byte
    bad = ['{"meta": {"pile_set_name": "Y"}}', long, '{"text": "a"}', "{}"]
    file = tmp_path / "a.jsonl"
    lines = [line for pair in zip(good, bad, strict=True) for line in pair]
    file.write_text("\n".join(lines))
    settings = Settings(max_tokens=200, min_tokens=4, valid_fraction=0.0)
    manifest = prepare([file], tmp_path / "corpus", tokenizer_folder, settings)
    assert manifest.totals["train"].documents == 4
    sizes = {"Y": len(bad[0]) + 1, "unknown": 2}  # with the line end, if there is one
    once = {"unknown": 1}
    assert manifest.rejects == {
        "no-text": Rejects({"Y": 1, "unknown": 1}, [f"{file}:2", f"{file}:8"], sizes),
        "too-long": Rejects(once, [f"{file}:4"], {"unknown": 200}, {"unknown": 201}),
        "too-short": Rejects(once, [f"{file}:6"], {"unknown": 1}, {"unknown": 2}),
    }


def test_long_documents_are_split_into_windows_without_loss(
    inputs, tokenizer, tokenizer_folder, tmp_path
):
    settings = Settings(max_tokens=32, long="split", valid_fraction=0.3)
    manifest = prepare(inputs, tmp_path, tokenizer_folder, settings)
    texts = [text for seed in range(3) for text in make_texts(120, 60, seed=seed)]
    encoded = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    written = [ids for split in ("train", "valid") for ids in documents(tmp_path, split)]
    assert max(len(ids) for ids in written) == 31
    assert sum(len(ids) - 1 for ids in written) == sum(len(ids) for ids in encoded)
    assert manifest.cut == sum(len(ids) > 30 for ids in encoded) > 0
    whole = {tuple(ids[:30]) for ids in encoded}
    assert whole <= {tuple(ids[:-1]) for ids in written}
    # Windows of one document are in one split; short last windows may be equal by chance.
    train = {tuple(ids[:-1]) for ids in documents(tmp_path, "train")}
    for ids in encoded:
        windows = {tuple(ids[start : start + 30]) for start in range(0, len(ids) - 29, 30)}
        assert windows <= train or not windows & train


def test_failed_shard_is_reported_and_the_others_are_kept(inputs, tokenizer_folder, tmp_path):
    cut = tmp_path / "cut.jsonl.zst"
    cut.write_bytes(inputs[0].read_bytes()[:-10])
    corpus = tmp_path / "corpus"
    with pytest.raises(ValueError, match=r"cut\.jsonl\.zst: cut short .*1 other shards are done"):
        prepare([cut, inputs[1]], corpus, tokenizer_folder, SETTINGS)
    assert not (corpus / "manifest.json").exists()
    assert {file.stem for file in (corpus / "train").iterdir()} == {"shard-00001"}
    cut.write_bytes(inputs[0].read_bytes())
    prepare([cut, inputs[1]], corpus, tokenizer_folder, SETTINGS)
    assert list(verify(corpus)) == []


@pytest.mark.parametrize(
    ("number", "said", "end"), [(1, 0, "body"), (2, 2, r"\(2 inputs failed.*")]
)
def test_the_error_of_one_input_is_said_once(number, said, end, tokenizer_folder, tmp_path, capsys):
    inputs = [tmp_path / f"{n}.jsonl" for n in range(number)]
    for path in inputs:
        path.write_text('{"body": "some text"}\n')
    with pytest.raises(ValueError, match=rf"0\.jsonl: no record has the key text.*{end}$"):
        prepare(inputs, tmp_path / "corpus", tokenizer_folder, SETTINGS)
    assert capsys.readouterr().err.count("no record has the key") == said


def test_corpus_without_documents_is_refused_with_the_reasons(tokenizer_folder, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ValueError, match="no document kept: the inputs have no lines"):
        prepare([empty], tmp_path / "a", tokenizer_folder, SETTINGS)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": ""}\n{')
    with pytest.raises(ValueError, match=r"1 empty .*:1\), 1 not-json .*:2\)"):
        prepare([bad], tmp_path / "b", tokenizer_folder, SETTINGS)


def test_a_subset_that_kept_nothing_is_corrected_by_the_same_command(
    inputs, tokenizer_folder, tmp_path
):
    refused = pytest.raises(ValueError, match="no document kept.*subsets found")
    for subset, outcome in (("nope", refused), ("Books3", nullcontext())):
        with outcome:
            prepare(inputs, tmp_path / "a", tokenizer_folder, replace(SETTINGS, subset=subset))


@pytest.fixture
def shards(corpus_folder):
    return [read_record(ShardManifest, f) for f in sorted(corpus_folder.glob("shards/*.json"))]


def test_totals_do_not_depend_on_the_order_of_the_shards(
    corpus_folder, manifest, shards, tokenizer
):
    merged, turned = (merge(each, tokenizer, corpus_folder) for each in (shards, shards[::-1]))
    assert merged == manifest
    for name in ("totals", "subsets", "length_histogram", "unigram_perplexity"):
        assert getattr(turned, name) == getattr(manifest, name)


def test_too_many_subsets_of_all_shards_are_refused(shards, tokenizer, tmp_path):
    many = {"train": {str(number): Count(1, 2, 3) for number in range(257)}}
    with pytest.raises(ValueError, match="257 different values of meta.pile_set_name"):
        merge([replace(shards[0], kept=many)], tokenizer, tmp_path)


def test_too_many_subsets_are_refused(tokenizer_folder, tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [{"text": f"text {n}", "meta": {"pile_set_name": f"set {n}"}} for n in range(257)]
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=r"a\.jsonl:257: subset 'set 256' is one too many"):
        prepare([file], tmp_path / "a", tokenizer_folder, Settings(valid_fraction=0.0))
    file.write_text("\n".join(map(json.dumps, lines[:256])))
    manifest = prepare([file], tmp_path / "a", tokenizer_folder, Settings(valid_fraction=0.0))
    assert len(manifest.subsets) == 256


def test_second_run_into_one_folder_is_refused(inputs, tokenizer_folder, tmp_path):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another prepare is at work"):
            prepare(inputs, tmp_path, tokenizer_folder, SETTINGS)
    prepare(inputs, tmp_path, tokenizer_folder, SETTINGS)


def test_a_file_system_without_locks_gives_a_warning_and_other_errors_are_raised(
    inputs, tokenizer_folder, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise OSError(code, "not locked")

    monkeypatch.setattr("fcntl.flock", fail)
    code = errno.EIO
    with pytest.raises(OSError, match="not locked"):
        prepare(inputs, tmp_path, tokenizer_folder, SETTINGS)
    code = errno.ENOLCK
    prepare(inputs, tmp_path, tokenizer_folder, SETTINGS)
    assert "this file system has no locks" in capsys.readouterr().err


def test_validation_inputs_are_the_validation_split(inputs, tokenizer_folder, tmp_path):
    settings = Settings(max_tokens=128, valid_fraction=0.0)
    manifest = prepare(inputs[:2], tmp_path, tokenizer_folder, settings, valid_inputs=inputs[2:])
    assert [file.role for file in manifest.inputs] == ["train", "train", "valid"]
    assert list(verify(tmp_path)) == []
    alone = prepare(inputs[2:], tmp_path / "alone", tokenizer_folder, settings)
    assert documents(tmp_path, "valid") == documents(tmp_path / "alone", "train")
    assert manifest.totals["valid"] == alone.totals["train"]
    with pytest.raises(ValueError, match="role was train and is both"):
        prepare(inputs, tmp_path, tokenizer_folder, settings)


def test_a_file_in_both_splits_is_refused_however_it_is_spelled_and_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("l.txt").write_text("one\ntwo\n")
    Path("link.txt").symlink_to("l.txt")
    Path("folder").mkdir()
    settings = Settings(valid_fraction=0.0)
    same = ("lines:l.txt", "lines:./l.txt", f"wikitext:{tmp_path}/l.txt", "lines:link.txt")
    for source in (Path("l.txt"), *same):
        for other in (Path("folder/../l.txt"), *same):
            with pytest.raises(ValueError, match=f"--valid-input {other}: is an --input as well"):
                plan([Path("a.txt"), "datasets:l.txt", source], [other], tmp_path, settings, "")
    both: list[Path | str] = ["datasets:x", Path("l.txt")]
    with pytest.raises(ValueError, match="--valid-input datasets:x: is an --input as well"):
        plan(both, both, tmp_path, settings, "")
    assert len(plan(["datasets:l.txt"], ["lines:l.txt"], tmp_path, settings, "")) == 2


def test_an_input_that_cannot_be_read_is_refused_before_the_work_begins(inputs, tmp_path):
    with pytest.raises(ValueError, match="is a folder; name the files in it"):
        plan([*inputs, tmp_path], [], tmp_path, SETTINGS, "")


def test_idle_workers_are_reported(inputs, tokenizer_folder, tmp_path, capsys):
    for workers, is_said in ((3, False), (8, True), (8, False)):  # the last one has nothing to do
        prepare(inputs, tmp_path / str(workers), tokenizer_folder, SETTINGS, workers=workers)
        assert (f"{workers} workers for 3 inputs: " in capsys.readouterr().err) == is_said


def test_full_disk_error_names_the_file_and_leaves_nothing(
    tokenizer_folder, tmp_path, room, capsys
):
    file, corpus = write_pile(tmp_path / "a.jsonl.zst", make_texts(1500, 60)), tmp_path / "corpus"
    words = ["prepare", "--input", file, "--output", corpus, "--tokenizer", tokenizer_folder]
    room(30_000)
    assert main([*map(str, words)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"File too large: '{corpus / 'train/shard-00000.bin'}'")
    assert not corpus.exists()


# Workers import the main script too.
RUN_THAT_RESTS_AFTER_ITS_FIRST_SHARD = """
import sys, time
from data_prep import shard
from finetune.zeroclap import main

def write_record(file, record, write=shard.write_record):
    write(file, record)
    time.sleep(600 * (file.stem == "shard-00000"))

shard.write_record = write_record
if __name__ == "__main__":
    sys.exit(main(["prepare", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("victim", "code", "message"),
    [("run", -9, ""), ("worker", 1, "a worker process died"), ("interrupt", 130, "stopped")],
)
def test_killed_run_ends_its_workers(inputs, tmp_path, tokenizer_folder, victim, code, message):
    output, script = tmp_path / "corpus", tmp_path / "run.py"
    arguments = ["--input", *map(str, inputs), "--output", str(output)]
    arguments += ["--tokenizer", str(tokenizer_folder)]
    script.write_text(RUN_THAT_RESTS_AFTER_ITS_FIRST_SHARD)
    run = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=ROOT,
        env=children.environment(),
        stderr=subprocess.PIPE,
        text=True,
        # Processes that a shell runs in the background ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    first = output / "shards" / "shard-00000.json"
    wait_until(lambda: first.exists() or run.poll() is not None)
    assert run.poll() is None
    started = psutil.Process(run.pid).children()
    (worker,) = (child for child in started if "spawn_main" in " ".join(child.cmdline()))
    if victim == "interrupt":
        run.send_signal(signal.SIGINT)
    else:
        (run if victim == "run" else worker).kill()
    _, errors = run.communicate(timeout=30)
    assert run.returncode == code
    assert message in errors
    assert "Traceback" not in errors
    psutil.wait_procs([worker], timeout=30)
    assert not worker.is_running()
    assert not (output / "manifest.json").exists()

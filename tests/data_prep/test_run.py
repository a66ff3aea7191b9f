import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from data_prep.corpus import Corpus
from data_prep.manifest import Settings, load_manifest
from data_prep.run import find_inputs, prepare
from data_prep.tokenizer import Tokenizer
from data_prep.verify import verify
from tests.data_prep.conftest import make_texts, write_pile

SETTINGS = Settings(max_tokens=128, valid_fraction=0.2)
ROOT = Path(__file__).parents[2]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a corpus but the lock."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


def documents(folder: Path, split: str) -> list[list[int]]:
    corpus = Corpus(folder, split)
    return [corpus.document(i).tolist() for i in range(len(corpus))]


@pytest.fixture(scope="module")
def corpus_folder(
    inputs: list[Path], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    prepare(inputs, folder, tokenizer_folder, SETTINGS)
    return folder


def test_documents_are_those_of_the_inputs(corpus_folder: Path, tokenizer: Tokenizer) -> None:
    texts = [text for seed in range(3) for text in make_texts(120, 60, seed=seed)]
    expected = [[*ids.tolist(), 2] for ids in tokenizer.encode_batch(texts) if len(ids) + 2 <= 128]
    found = documents(corpus_folder, "train") + documents(corpus_folder, "valid")
    assert Counter(map(tuple, found)) == Counter(map(tuple, expected))
    assert 0 < len(expected) < len(texts)
    manifest = load_manifest(corpus_folder)
    assert manifest.rejects["too-long"].count == len(texts) - len(expected)
    assert sum(manifest.rejects["too-long"].by_subset.values()) == len(texts) - len(expected)
    assert sum(manifest.length_histogram.counts) == len(texts)
    assert sum(total.documents for total in manifest.totals.values()) == len(expected)
    assert sum(total.tokens for total in manifest.totals.values()) == sum(map(len, expected))


def test_bytes_do_not_depend_on_the_number_of_workers(
    corpus_folder: Path, inputs: list[Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    prepare(inputs, tmp_path / "three", tokenizer_folder, SETTINGS, workers=3)
    assert content(tmp_path / "three") == content(corpus_folder)


def test_split_depends_on_the_text_alone(
    corpus_folder: Path, inputs: list[Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    texts = [text for seed in (2, 0, 1) for text in reversed(make_texts(120, 60, seed=seed))]
    one_file = write_pile(tmp_path / "all.jsonl.zst", texts)
    prepare([one_file], tmp_path / "corpus", tokenizer_folder, SETTINGS)
    for split in ("train", "valid"):
        assert sorted(documents(tmp_path / "corpus", split)) == sorted(
            documents(corpus_folder, split)
        )


def test_rerun_makes_nothing_and_changes_nothing(
    corpus_folder: Path, inputs: list[Path], tokenizer_folder: Path
) -> None:
    before = content(corpus_folder)
    times = {file: file.stat().st_mtime_ns for file in corpus_folder.rglob("*.*")}
    prepare(inputs, corpus_folder, tokenizer_folder, SETTINGS)
    assert content(corpus_folder) == before
    assert {f: f.stat().st_mtime_ns for f in times if f.name != ".lock"} == {
        f: t for f, t in times.items() if f.name != ".lock"
    }


def test_lost_file_is_made_again_and_no_other(
    inputs: list[Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    prepare(inputs, tmp_path, tokenizer_folder, SETTINGS)
    before = content(tmp_path)
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "train").iterdir()}
    (tmp_path / "train" / "shard-00001.bin").unlink()
    (tmp_path / "manifest.json").unlink()
    prepare(inputs, tmp_path, tokenizer_folder, SETTINGS)
    assert content(tmp_path) == before
    remade = {f.stem for f, was in times.items() if f.stat().st_mtime_ns != was}
    assert remade == {"shard-00001"}


def test_changed_settings_and_inputs_are_refused_until_overwrite(
    inputs: list[Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    files = [write_pile(tmp_path / f"{n}.jsonl.zst", make_texts(20, 20, seed=n)) for n in range(2)]
    corpus = tmp_path / "corpus"
    prepare(files, corpus, tokenizer_folder, SETTINGS)
    before = content(corpus)
    with pytest.raises(ValueError, match="max-tokens was 128 and is 64.*--overwrite"):
        prepare(files, corpus, tokenizer_folder, Settings(64, valid_fraction=0.2))
    with pytest.raises(ValueError, match="left by a prepare of more inputs.*--overwrite"):
        prepare(files[:1], corpus, tokenizer_folder, SETTINGS)
    with pytest.raises(ValueError, match=r"1\.jsonl\.zst is not what was read then.*--overwrite"):
        prepare(files[::-1], corpus, tokenizer_folder, SETTINGS)
    write_pile(files[0], make_texts(21, 20))
    with pytest.raises(ValueError, match=r"0\.jsonl\.zst is not what was read then.*--overwrite"):
        prepare(files, corpus, tokenizer_folder, SETTINGS)
    assert content(corpus) == before
    prepare(files[:1], corpus, tokenizer_folder, SETTINGS, overwrite=True)
    fresh = tmp_path / "fresh"
    prepare(files[:1], fresh, tokenizer_folder, SETTINGS)
    assert content(corpus) == content(fresh)


def test_touched_or_moved_input_with_the_same_content_is_the_same(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    file = write_pile(tmp_path / "a.jsonl.zst", make_texts(20, 20))
    prepare([file], tmp_path / "corpus", tokenizer_folder, SETTINGS)
    before = content(tmp_path / "corpus")
    os.utime(file, (1, 1))
    prepare([file], tmp_path / "corpus", tokenizer_folder, SETTINGS)
    prepare(
        [file.rename(tmp_path / "b.jsonl.zst")], tmp_path / "corpus", tokenizer_folder, SETTINGS
    )
    assert content(tmp_path / "corpus") == before


def test_every_reject_is_counted_with_its_place(tokenizer_folder: Path, tmp_path: Path) -> None:
    good = [json.dumps({"text": text, "meta": {"pile_set_name": "X"}}) for text in make_texts(9, 5)]
    bad = {
        "not-json": "{",
        "not-an-object": "[]",
        "no-text": '{"meta": {"pile_set_name": "Y"}}',
        "text-not-a-string": '{"text": null}',
        "lone-surrogate": '{"text": "\\ud800"}',
        "empty": '{"text": ""}',
        "too-long": json.dumps({"text": "word " * 500}),
        "too-short": '{"text": "a"}',
    }
    file = tmp_path / "a.jsonl"
    lines = [line for pair in zip(good, [*bad.values(), "{}"], strict=True) for line in pair]
    file.write_bytes("\n".join(lines).encode() + b'\n"\xff"')
    settings = Settings(max_tokens=200, min_tokens=4, valid_fraction=0.0)
    manifest = prepare([file], tmp_path / "corpus", tokenizer_folder, settings)
    assert manifest.totals["train"].documents == 9
    assert manifest.rejects.pop("bad-utf8").places == [f"{file}:19"]
    assert manifest.rejects["no-text"].by_subset == {"Y": 1, "unknown": 1}
    assert manifest.rejects["no-text"].places == [f"{file}:6", f"{file}:18"]
    assert {reason: rejects.places[0] for reason, rejects in manifest.rejects.items()} == {
        reason: f"{file}:{2 * number}" for number, reason in enumerate(bad, start=1)
    }


def test_long_documents_are_truncated_when_asked(
    inputs: list[Path], tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    settings = Settings(max_tokens=32, long="truncate", valid_fraction=0.0)
    manifest = prepare(inputs, tmp_path, tokenizer_folder, settings)
    texts = [text for seed in range(3) for text in make_texts(120, 60, seed=seed)]
    expected = [[*ids[:30].tolist(), 2] for ids in tokenizer.encode_batch(texts)]
    assert documents(tmp_path, "train") == expected
    assert manifest.cut == sum(len(ids) == 31 for ids in expected) > 0
    assert manifest.rejects == {}


def test_long_documents_become_windows_that_lose_nothing(
    inputs: list[Path], tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
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
    # Windows of one document stay in one split; short last ones may be alike by chance.
    train = {tuple(ids[:-1]) for ids in documents(tmp_path, "train")}
    for ids in encoded:
        windows = {tuple(ids[start : start + 30]) for start in range(0, len(ids) - 29, 30)}
        assert windows <= train or not windows & train


def test_bad_shard_fails_and_the_others_are_kept(
    inputs: list[Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
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


def test_corpus_without_documents_is_refused_with_the_reasons(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ValueError, match="no document kept: the inputs hold no line"):
        prepare([empty], tmp_path / "a", tokenizer_folder, SETTINGS)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": ""}\n{')
    with pytest.raises(
        ValueError, match=r"1 empty \(first at .*:1\), 1 not-json \(first at .*:2\)"
    ):
        prepare([bad], tmp_path / "b", tokenizer_folder, SETTINGS)


def test_too_many_subsets_are_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [{"text": f"text {n}", "meta": {"pile_set_name": f"set {n}"}} for n in range(257)]
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=r"a\.jsonl:257: subset 'set 256' is one too many"):
        prepare([file], tmp_path / "a", tokenizer_folder, Settings(valid_fraction=0.0))
    file.write_text("\n".join(map(json.dumps, lines[:256])))
    manifest = prepare([file], tmp_path / "a", tokenizer_folder, Settings(valid_fraction=0.0))
    corpus = Corpus(tmp_path / "a", "train")
    names = [manifest.subsets[number] for number in corpus.subsets]
    assert names == [f"set {n}" for n in range(256)]


def test_second_run_into_one_folder_is_refused(
    inputs: list[Path], tokenizer_folder: Path, tmp_path: Path
) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another prepare is at work in this folder"):
            prepare(inputs, tmp_path, tokenizer_folder, SETTINGS)
    prepare(inputs, tmp_path, tokenizer_folder, SETTINGS)


def test_inputs_are_found_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl"):
        (tmp_path / name).write_text("text")
    found = find_inputs([f"{tmp_path}/*.txt", f"{tmp_path}/*", f"{tmp_path}/a.txt"])
    assert [path.name for path in found] == ["a.txt", "b.txt", "c.jsonl"]
    with pytest.raises(ValueError, match=r"--input .*/\*\.zst: no such file"):
        find_inputs([f"{tmp_path}/*", f"{tmp_path}/*.zst"])


class Run:
    """A prepare in a process of its own, slow enough to be caught in the middle."""

    def __init__(self, tmp_path: Path, tokenizer_folder: Path) -> None:
        generator = np.random.default_rng(0)
        for number in range(5):
            words = generator.integers(0, 10**9, size=(100, 300))
            texts = [" ".join(map(str, row)) for row in words]
            write_pile(tmp_path / "in" / f"{number}.jsonl.zst", texts)
        self.inputs = sorted((tmp_path / "in").iterdir())
        self.output = tmp_path / "corpus"
        self.settings = Settings(max_tokens=4096, valid_fraction=0.2)
        self.tokenizer_folder = tokenizer_folder
        arguments = ["--input", *map(str, self.inputs), "--output", str(self.output)]
        arguments += ["--tokenizer", str(tokenizer_folder), "--max-tokens", "4096"]
        arguments += ["--valid-fraction", "0.2", "--workers", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "data_prep", "prepare", *arguments],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_a_shard(self) -> None:
        deadline = time.monotonic() + 60
        while not (self.output / "shards" / "shard-00000.json").exists():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.01)

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    def assert_rerun_gives_what_one_run_gives(self, fresh: Path) -> None:
        prepare(self.inputs, self.output, self.tokenizer_folder, self.settings)
        prepare(self.inputs, fresh, self.tokenizer_folder, self.settings)
        assert content(self.output) == content(fresh)


@pytest.mark.parametrize("victim", ["run", "worker", "interrupt"])
def test_killed_run_ends_and_goes_on_where_it_stopped(
    tmp_path: Path, tokenizer_folder: Path, victim: str
) -> None:
    run = Run(tmp_path, tokenizer_folder)
    run.wait_for_a_shard()
    workers = run.workers()
    assert len(workers) == 1
    if victim == "run":
        run.process.kill()
    elif victim == "worker":
        workers[0].kill()
    else:
        run.process.send_signal(signal.SIGINT)
    _, errors = run.process.communicate(timeout=30)
    expected = {
        "run": (-9, ""),
        "worker": (1, "a worker process died"),
        "interrupt": (130, "stopped"),
    }
    assert run.process.returncode == expected[victim][0]
    assert expected[victim][1] in errors
    assert "Traceback" not in errors
    psutil.wait_procs(workers, timeout=30)
    assert not any(worker.is_running() for worker in workers)
    assert not (run.output / "manifest.json").exists()
    made_before = (run.output / "shards" / "shard-00000.json").stat().st_mtime_ns
    run.assert_rerun_gives_what_one_run_gives(tmp_path / "fresh")
    assert (run.output / "shards" / "shard-00000.json").stat().st_mtime_ns == made_before

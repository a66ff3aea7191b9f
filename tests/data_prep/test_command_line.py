import errno
import os
import resource
import shlex
import sys
import sysconfig
from pathlib import Path

import pytest

from finetune.zeroclap import main
from tests.data_prep.conftest import make_texts, run_here, write_pile

PREPARE = "prepare --input {h}/in/* --output {h}/x --tokenizer {h}/t"
TRAIN = "train-tokenizer --input {h}/in/* --output {h}/v"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with inputs, a vocabulary and a corpus, made by the commands."""
    home = tmp_path_factory.mktemp("home")
    for number in range(2):
        write_pile(home / "in" / f"{number}.jsonl.zst", make_texts(60, 30, seed=number))
    inputs, vocabulary = f"--input {home}/in/*", f"{home}/t"
    assert main(f"train-tokenizer {inputs} --vocab-size 300 --output {vocabulary}".split()) == 0
    options = f"--output {home}/c --tokenizer {vocabulary}"
    parts = f"--input {home}/in/0* --valid-input {home}/in/1*"
    assert main(f"prepare {parts} {options}".split()) == 0
    return home


def test_commands_that_read_all_text_tell_how_far_they_are(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data_prep.progress._SECONDS_BETWEEN_LINES", 0)
    words = f"train-tokenizer --characters --input {home}/in/* --output {tmp_path}/t"
    assert main(words.split()) == main(["verify", f"{home}/c"]) == 0
    shown = capsys.readouterr().err
    assert "train-tokenizer: 0 of 2 inputs, 59 documents, " in shown
    assert "train-tokenizer: 2 of 2 inputs, 120 documents, " in shown
    assert "verify: 1 of 2 shards, 60 documents, " in shown


def test_ray_makes_all_shards_at_once_unless_told_otherwise(home, tmp_path, monkeypatch):
    seen = []

    def engine(work, tasks, workers, _):
        seen.append(workers)
        return run_here(work, tasks)

    monkeypatch.setattr("data_prep.run.ENGINES", {"local": engine, "ray": engine})
    for number, words in enumerate(["--engine ray", "--engine ray --workers 1", ""]):
        command = PREPARE.format(h=home).replace(f"{home}/x", f"{tmp_path}/{number}")
        assert main(f"{command} {words}".split()) == 0
    assert seen == [2, 1, 1]


def test_inspect_describes_the_corpus(home, tmp_path, capsys):
    picture = tmp_path / "lengths.svg"
    assert main(["inspect", f"{home}/c", "--samples", "1", "--plot", str(picture)]) == 0
    assert "Lengths of encoded documents" in picture.read_text()
    shown = capsys.readouterr().out
    for part in (
        "inputs                1 for training (",
        "1 for validation (",
        "valid-fraction        0.0",
        "encoded by",
        "Pile-CC",
        "unigram perplexity",
        "over 1024",
    ):
        assert part in shown
    assert make_texts(60, 30)[0] in shown
    assert "--- valid document 0" in shown
    assert main(["inspect", f"{home}/c", "--samples", "0"]) == 0
    assert "--- " not in capsys.readouterr().out


@pytest.mark.usefixtures("few_files")
def test_a_command_may_open_more_files_and_names_the_limit(home, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a.bin")

    monkeypatch.setattr("data_prep.verify.verify", fail)
    assert main(["verify", f"{home}/c"]) == 2
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limit == min(most, 65_536)
    said = f"a.bin: Too many open files; this process may have {limit} open (`ulimit -n`)"
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_a_full_disk_refuses_is_an_error(home, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["inspect", f"{home}/c"]) == 2
    assert f"standard output: {os.strerror(errno.ENOSPC)}" in capsys.readouterr().err


def test_sample_prints_its_sizes(tmp_path, capsys, monkeypatch):
    library = Path(sysconfig.get_path("stdlib"), "asyncio")  # all of it takes seconds
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    assert main(["sample", "--output", f"{tmp_path}"]) == 0
    assert "PythonSource" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (PREPARE.replace("/x", "/in"), "{h}/in: is not empty"),
        (TRAIN.replace("{h}/v", "{h}/t") + " --vocab-size 300", "{h}/t: is not empty"),
        (PREPARE.replace("/in", "/no"), "error: {h}/no/*: no such file, and no file fits"),
        (PREPARE.replace("{h}/t", "gpt3"), "gpt3: no such file"),
        (PREPARE.replace("/x", "/in/0.jsonl.zst"), "0.jsonl.zst: "),
        (PREPARE.replace("{h}/x", "/proc/x"), "/proc/x: "),
        (f"{PREPARE} --workers 0", "argument --workers: 0: accepted: 1 or more"),
        ("inspect {h}/x --samples -1", "argument --samples: -1: accepted: 0 or more"),
        (f"{PREPARE} --valid-input {{h}}/t --valid-fraction 0.1", "--valid-fraction 0.1 with"),
        (f"{TRAIN} --characters --unigram", "--unigram: needs --vocab-size"),
        (f"{TRAIN} --vocab-size 300 --lowercase", "--lowercase: needs --unigram"),
        (f"{TRAIN} --vocab-size 300 --text-key body", "no record has the key body (--text-key)"),
        (f"{TRAIN} --vocab-size {10**20}", f"--vocab-size {10**20}: accepted: at most 1000000000"),
        (f"{TRAIN} --vocab-size 8k", "argument --vocab-size: 8k is not a whole number"),
        ("inspect {h}/in", "{h}/in: no manifest.json"),
        ("prepare --input a --output b --tokenizer c --engine slurm", "choose from local, ray"),
        ("train-tokenizer --input a --text-key a..b", "a..b is not a key"),
        ("prepare --long split", "required: --input, --output, --tokenizer"),
        ("prepair", "no command prepair; did you mean prepare?"),
        ("xyz", "no command xyz; accepted: sample, train-tokenizer, prepare"),
    ],
)
def test_errors_of_the_user_give_one_line_and_exit_code_2(home, capsys, arguments, message):
    try:
        code = main(shlex.split(arguments.format(h=home)))
    except SystemExit as stopped:  # by the parser
        code = stopped.code
    assert code == 2
    error = capsys.readouterr().err
    said = [line for line in error.splitlines() if not line.startswith(("prepare: ", "note: "))]
    [line] = said
    assert line.startswith("zeroclap")
    assert "error: " in line
    assert message.format(h=home) in line.replace("'", "")


def test_more_than_a_tenth_of_broken_lines_is_a_failure_unless_allowed(home, tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    good = "".join(f'{{"body": "{text}", "lang": "en"}}\n' for text in make_texts(20, 30))
    file.write_text(good + "{\n[]\n{}\n")
    command = f"prepare --input {file} --output {tmp_path}/c --tokenizer {home}/t".split()
    command += ["--text-key", "body", "--subset-key", "lang", "--valid-fraction", "0.5"]
    for options, code in ((["--allow-broken"], 0), ([], 1)):  # a rerun is judged again
        assert main([*command, *options]) == code
        shown = capsys.readouterr()
        assert shown.err.splitlines()[-1].startswith(
            "zeroclap prepare: warning: 3 of 23 records (13.0%) and "
        )
        assert f"1 not-json (first at {file}:21)" in shown.err
        rows = [line.split()[:4] for line in shown.out.splitlines()]
        assert ["no-text", "1", "4.3%", "-"] in rows
        assert "(-: not encoded" in shown.out
    assert main(["verify", f"{tmp_path}/c"]) == 0
    assert main(["inspect", f"{tmp_path}/c"]) == 0
    assert "train  en " in capsys.readouterr().out
    file.write_text(good + "{\n")
    assert main([*command, "--overwrite"]) == 0
    assert "broken" not in capsys.readouterr().err


def test_prepare_says_that_a_text_file_is_one_document(home, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two\n")
    command = f"prepare --input {tmp_path}/a.txt --output {tmp_path}/c --tokenizer {home}/t"
    assert main(f"{command} --document-separator none".split()) == 0
    assert ".txt files: one document each (see --document-separator)" in capsys.readouterr().out


def test_a_corpus_of_sentences_with_a_unigram_vocabulary(home, tmp_path, capsys):
    inputs, options = f"--input {home}/in/0*", f"--output {tmp_path}/t --unigram --lowercase"
    assert main(f"train-tokenizer {inputs} --vocab-size 400 {options}".split()) == 0
    options = f"--output {tmp_path}/c --tokenizer {tmp_path}/t --sentences"
    assert main(f"prepare {inputs} {options}".split()) == 0
    assert main(["verify", f"{tmp_path}/c"]) == 0
    assert main(["inspect", f"{tmp_path}/c"]) == 0
    shown = capsys.readouterr().out
    assert "unit                  sentence" in shown
    assert "<unk>" not in shown


def test_characters_that_the_vocabulary_lacks_are_counted(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abc\n")
    (tmp_path / "b.jsonl").write_text('{"text": "abcxyz"}\n{"text": "aaa"}\n')
    options = f"--characters --output {tmp_path}/t"
    assert main(f"train-tokenizer --input {tmp_path}/a.txt {options}".split()) == 0
    options = f"--tokenizer {tmp_path}/t --output {tmp_path}/c"
    both = f"--input {tmp_path}/a.txt --input {tmp_path}/b.jsonl"  # once only the last was read
    assert main(f"prepare {both} {options}".split()) == 0
    message = "3 of 15 tokens (20.00%) are <unk>: their characters are not in the vocabulary"
    assert message in capsys.readouterr().out
    assert main(["inspect", f"{tmp_path}/c"]) == 0
    assert message in capsys.readouterr().out


def test_a_command_interrupted_in_its_imports_is_stopped_in_one_line(monkeypatch, capsys):
    def interrupt(parser):
        raise KeyboardInterrupt

    monkeypatch.setattr("data_prep.inspect.add_arguments", interrupt)
    assert main(["inspect", "corpus"]) == 130
    assert capsys.readouterr().err == "zeroclap: stopped\n"

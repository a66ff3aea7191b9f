import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.common.arguments import typed
from tests.data_prep.conftest import make_texts, write_pile

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs, a vocabulary and a corpus, made by the commands."""
    home = tmp_path_factory.mktemp("home")
    for number in range(2):
        write_pile(home / "in" / f"{number}.jsonl.zst", make_texts(60, 30, seed=number))
    assert (
        main(
            [
                "train-tokenizer",
                "--input",
                f"{home}/in/*",
                "--vocab-size",
                "300",
                "--output",
                f"{home}/t",
            ]
        )
        == 0
    )
    assert main([*prepare_arguments(home), "--valid-fraction", "0.2", "--workers", "2"]) == 0
    return home


def prepare_arguments(home: Path) -> list[str]:
    return [
        "prepare",
        "--input",
        f"{home}/in/*",
        "--output",
        f"{home}/c",
        "--tokenizer",
        f"{home}/t",
    ]


def test_inspect_describes_the_corpus(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{home}/c", "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    for part in (
        *(
            "inputs        2 (",
            "encoded by",
            "Pile-CC",
            "unigram perplexity",
            "validation    0.2 of",
        ),
        *("duplicates    kept", "a sequence is a document", "rejected: nothing", "over 1024"),
    ):
        assert part in shown
    assert make_texts(60, 30)[0] in shown or make_texts(60, 30)[1] in shown
    assert "--- valid document 0" in shown


def test_exit_code_of_verify_depends_on_its_findings(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", f"{home}/c"]) == 0
    file = home / "c" / "train" / "shard-00000.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])
    assert main(["verify", f"{home}/c"]) == 1
    assert str(file) in capsys.readouterr().err
    file.write_bytes(whole)


def test_sample_prints_its_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Path(sysconfig.get_path("stdlib"), "asyncio")  # all of it takes seconds
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(library))
    assert main(["sample", "--output", f"{tmp_path}", "--files", "2"]) == 0
    assert "PythonSource" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.zst"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("prepare --input {h}/no/* --output {h}/x --tokenizer {h}/t", "--input {h}/no/*: no such"),
        ("prepare --input {h}/in --output {h}/x --tokenizer {h}/t", "{h}/in: an input of unknown"),
        (
            "prepare --input {h}/in/* --output {h}/x --tokenizer gpt3",
            "tokenizer gpt3: no such file",
        ),
        (
            "prepare --input {h}/in/* --output {h}/c/manifest.json --tokenizer {h}/t",
            "manifest.json",
        ),
        ("prepare --input {h}/in/* --output /proc/x --tokenizer {h}/t", "/proc/x: "),
        ("prepare --input {h}/in/* --output {h}/x --tokenizer {h}/t --workers 0", "--workers 0"),
        (
            "prepare --input {h}/in/* --output {h}/x --tokenizer {h}/t --max-tokens 1",
            "max-tokens 1",
        ),
        ("prepare --input {h}/in/* --output {h}/c --tokenizer {h}/t", "valid-fraction was 0.2"),
        (
            "prepare --input {h}/in/* --output {h}/x --tokenizer {h}/t --min-tokens 900",
            "120 too-short",
        ),
        (
            "prepare --input {h}/in/0* --output {h}/x --tokenizer {h}/t --shard 2/2",
            "--shard 2/2: accepted: I/N, I from 0 to N - 1, such as 0/4",
        ),
        (
            "prepare --input {h}/in/0* --output {h}/x --tokenizer {h}/t --shard 0/2 --overwrite",
            "--overwrite with --shard: it would remove what the other parts make; accepted: ",
        ),
        (
            "prepare --input {h}/in/0* --output {h}/x --tokenizer {h}/t --valid-input {h}/in/1* "
            "--valid-fraction 0.1",
            "--valid-fraction 0.1 with --valid-input: accepted: one of them",
        ),
        (
            "prepare --input {h}/in/* --output {h}/x --tokenizer {h}/t --valid-input {h}/in/1*",
            "1.jsonl.zst: is an --input as well; accepted: inputs of one split each",
        ),
        (
            "prepare --input {h}/in/* --output {h}/in/0.jsonl.zst/x --tokenizer {h}/t",
            "{h}/in/0.jsonl.zst/x: Not a directory",
        ),
        (
            "prepare --input {h}/in/* --output {h}/y --tokenizer {h}/t --text-key body",
            "0.jsonl.zst: no record has the key body (--text-key); keys found: text, meta.pile_set",
        ),
        (
            "prepare --input {h}/in/* --output {h}/y --tokenizer {h}/t --subset-key lang",
            "0.jsonl.zst: no record has a string under the key lang (--subset-key); keys found: ",
        ),
        (
            "train-tokenizer --input {h}/in/* --vocab-size 300 --output {h}/x --text-key body",
            "0.jsonl.zst: no record has the key body (--text-key); keys found: text, ",
        ),
        (
            "prepare --input {h}/in/* --output {h}/y --tokenizer {h}/t --long split",
            "long 'split' without max-tokens: accepted: together with max-tokens, ",
        ),
        (
            "prepare --input {h}/in/* --output {h}/y --tokenizer {h}/t --near-duplicate-ngram 7",
            "--near-duplicate-ngram 7: accepted: with --near-duplicates",
        ),
        (
            "prepare --input {h}/in/* --output {h}/y --tokenizer {h}/t --near-duplicates 0.8 "
            "--decontaminate-ngram 13",
            "--decontaminate-ngram 13: accepted: with --decontaminate",
        ),
        ("verify {h}/c --workers 0", "--workers 0: accepted: 1 or more"),
        ("train-tokenizer --input {h}/in/* --vocab-size 9 --output {h}/x", "vocabulary size 9"),
        (
            "train-tokenizer --input {h}/in/* --vocab-size 9 --output {h}/x --unigram",
            "vocabulary size 9: accepted: 2",
        ),
        (
            "train-tokenizer --input {h}/in/* --characters --output {h}/x --unigram",
            "--unigram: accepted: with --vocab-size, not with --characters",
        ),
        (
            "train-tokenizer --input {h}/in/* --vocab-size 300 --output {h}/x --lowercase",
            "--lowercase: accepted: with --unigram",
        ),
        (
            "train-tokenizer --input {h}/no --vocab-size 300 --output {h}/x",
            "--input {h}/no: no such",
        ),
        ("inspect {h}/in", "{h}/in: no manifest.json"),
        ("verify {h}/nowhere", "{h}/nowhere: no such folder"),
    ],
)
def test_user_errors_give_one_line_and_exit_code_2(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    words = shlex.split(arguments.format(h=home))
    assert main(words) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if not line.startswith("prepare: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"python -m data_prep {words[0]}: error: ")
    assert message.format(h=home) in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("prepare --input a --output b --tokenizer c --engine slurm", "choose from local, ray"),
        ("prepare --input a --output b --tokenizer c --long cut", "choose from drop, truncate, sp"),
        ("prepare --input a --output b --tokenizer c --workers two", "invalid int value: 'two'"),
        ("train-tokenizer --input a --text-key a..b", "'a..b': accepted: a key, such as text or "),
        ("prepare --input a --subset-key=", "'': accepted: a key, such as text or data.text"),
        ("prepare --long split", "required: --input, --output, --tokenizer"),
        ("train-tokenizer --input a --output b", "one of the arguments --vocab-size --characters"),
        ("prepare --input a --output b --tokenizer c --worker-count 2", "--worker-count"),
        ("prepair", "no command 'prepair'; did you mean prepare?"),
        ("xyz", "no command 'xyz'; accepted: sample, train-tokenizer, prepare"),
    ],
)
def test_usage_errors_give_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m data_prep")
    assert "error: " in line
    assert message.replace("'", "") in line.replace("'", "")


def test_command_line_accepts_validation_inputs_and_parts(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"--output {home}/parts --tokenizer {home}/t --valid-input {home}/in/1*".split()
    command = ["prepare", "--input", f"{home}/in/0*", *options]
    for part in ("1/2", "0/2"):
        assert main([*command, "--shard", part]) == 0
        assert f"part {part} is made; when all are, run" in capsys.readouterr().out
    assert main(["inspect", f"{home}/parts"]) == 2
    assert "is not finished" in capsys.readouterr().err
    assert main(command) == 0
    assert main(["inspect", f"{home}/parts", "--samples", "0"]) == 0
    shown = capsys.readouterr().out
    assert "1 for training (" in shown
    assert "1 for validation (" in shown
    assert "validation    separate inputs" in shown


def test_more_than_a_tenth_of_broken_lines_is_a_failure_unless_allowed(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    good = "".join(f'{{"body": "{text}", "lang": "en"}}\n' for text in make_texts(20, 30))
    file.write_text(good + "{\n[]\n{}\n")
    command = f"prepare --input {file} --output {tmp_path}/c --tokenizer {home}/t".split()
    command += ["--text-key", "body", "--subset-key", "lang", "--valid-fraction", "0.5"]
    for options, code in ((["--allow-broken"], 0), ([], 1)):  # a rerun is judged again
        assert main([*command, *options]) == code
        shown = capsys.readouterr()
        assert shown.err.splitlines()[-1].startswith(
            "python -m data_prep prepare: warning: 3 of 23 records (13.0%) and "
        )
        assert f"1 not-json (first at {file}:21)" in shown.err
        rows = [line.split()[:4] for line in shown.out.splitlines()]
        assert ["no-text", "1", "4.3%", "-"] in rows
    assert main(["verify", f"{tmp_path}/c"]) == 0
    assert main(["inspect", f"{tmp_path}/c"]) == 0
    assert "train   en " in capsys.readouterr().out
    file.write_text(good + "{\n")
    assert main([*command, "--overwrite"]) == 0
    assert "broken" not in capsys.readouterr().err


def test_a_vocabulary_is_trained_on_the_text_of_another_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"data": {"body": "abc"}, "text": "xyz"}\n')
    command = f"train-tokenizer --input {tmp_path}/a.jsonl --characters --output {tmp_path}/t"
    assert main([*command.split(), "--text-key", "data.body"]) == 0
    assert "8 ids from 1 documents" in capsys.readouterr().out


def test_a_corpus_of_sentences_with_a_unigram_vocabulary(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs, options = f"--input {home}/in/0*", f"--output {tmp_path}/t --unigram --lowercase"
    assert main(f"train-tokenizer {inputs} --vocab-size 400 {options}".split()) == 0
    options = f"--output {tmp_path}/c --tokenizer {tmp_path}/t --sentences"
    assert main(f"prepare {inputs} {options}".split()) == 0
    assert main(["verify", f"{tmp_path}/c"]) == 0
    assert main(["inspect", f"{tmp_path}/c"]) == 0
    assert "<unk>" not in capsys.readouterr().out


def test_characters_that_the_vocabulary_lacks_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("abc\n")
    (tmp_path / "b.jsonl").write_text('{"text": "abcxyz"}\n{"text": "aaa"}\n')
    options = f"--characters --output {tmp_path}/t"
    assert main(f"train-tokenizer --input {tmp_path}/a.txt {options}".split()) == 0
    options = f"--tokenizer {tmp_path}/t --output {tmp_path}/c"
    assert main(f"prepare --input {tmp_path}/b.jsonl {options}".split()) == 0
    message = "3 of 11 tokens (27.27%) are <unk>: one or more characters that the vocabulary lacks"
    assert message in capsys.readouterr().out
    assert main(["inspect", f"{tmp_path}/c"]) == 0
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ("/opt/bin/zeroclap", "zeroclap prepare"),
        ("/opt/pretrain/__main__.py", "python -m data_prep prepare"),
        ("/opt/pretrain/train.py", "zeroclap prepare"),
        ("/opt/pytest/__main__.py", "zeroclap prepare"),
        ("", "zeroclap prepare"),
    ],
)
def test_hints_name_the_program_as_the_user_typed_it(
    started: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    assert typed("data_prep prepare") == expected


def test_help_shows_no_empty_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("sample", "train-tokenizer", "prepare", "inspect", "verify"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert "default: None" not in shown
        assert "default: False" not in shown


@pytest.mark.parametrize(
    "command", ["", "sample", "train-tokenizer", "prepare", "inspect", "verify"]
)
def test_help_imports_nothing_heavy(command: str) -> None:
    program = (
        "import sys; sys.path.insert(0, '.'); from data_prep.__main__ import main\n"
        "heavy = {'torch', 'tokenizers', 'megatron', 'datasets', 'matplotlib'}\n"
        f"try: main({[command] * bool(command) + ['--help']!r})\n"
        "finally: print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.rstrip().endswith("[]")


def test_slurm_example_makes_a_corpus_from_parts(home: Path, tmp_path: Path) -> None:
    """Run the script as Slurm does, with a replacement for `srun`."""
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "zeroclap").write_text(f'#!/bin/sh\nexec {sys.executable} -m data_prep "$@"\n')
    for name in ("srun", "zeroclap"):
        (tmp_path / name).chmod(0o755)
    script = (ROOT / "data_prep" / "slurm.sbatch").read_text()
    for place, ours in (
        ("pile/train/*.jsonl.zst", f"{home}/in/0*"),
        ("pile/val.jsonl.zst", f"{home}/in/1*"),
        ("--tokenizer roberta-base", f"--tokenizer {home}/t"),
        ("--output corpus", f"--output {tmp_path}/corpus"),
    ):
        assert script.count(place) == 1
        script = script.replace(place, ours)

    def submit(index: int, count: int, *arguments: str) -> str:
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_ARRAY_TASK_ID": str(index),
            "SLURM_ARRAY_TASK_COUNT": str(count),
        }
        command = ["bash", "-c", script, "slurm.sbatch", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout

    for index in (1, 0):
        assert f"part {index}/2 is made" in submit(index, 2)
    assert "train 60 documents" in submit(0, 1, "whole")

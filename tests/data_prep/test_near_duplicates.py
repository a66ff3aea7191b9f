from collections import defaultdict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import duplicates, near_duplicates
from data_prep.manifest import Settings
from data_prep.near_duplicates import least_equal, mark_near_duplicates, sign_input, signature
from data_prep.run import plan, prepare
from data_prep.words import ngram_hashes, word_hashes
from tests.data_prep.conftest import make_texts, write_pile

SIZE = 5


def marks_of(folder, parts, threshold):
    """Return which documents of several inputs are marked, in their order."""
    files = [write_pile(folder / f"{n}.jsonl.zst", part) for n, part in enumerate(parts)]
    tasks = plan(files, [], folder / "corpus", Settings(near_duplicates=threshold), "")
    for task in reversed(tasks):  # in any order
        sign_input(task)
    mark_near_duplicates(tasks)
    found = []
    for task in tasks:
        judge = near_duplicates.near_duplicates(task)
        found += [judge(number, None) is not None for number in range(len(parts[task.index]))]
    return found


def marks_by_definition(texts, threshold):
    """Follow the rule in the docstring of near_duplicates.py, one document after another."""
    signatures = [np.frombuffer(signature(text, SIZE), np.uint8) for text in texts]
    is_marked = [False] * len(texts)
    width = 8 if threshold >= 0.75 else 4
    for start in range(0, 256, width):
        agreeing = defaultdict(list)
        for number, each in enumerate(signatures):
            if not is_marked[number]:
                agreeing[each[start : start + width].tobytes()].append(number)
        for left in agreeing.values():
            for _ in range(16):
                first, *others = left or [0]
                similar = {n for n in others if estimate(signatures, first, n) >= threshold - 1e-9}
                is_marked = [was or n in similar for n, was in enumerate(is_marked)]
                left = [number for number in others if number not in similar]
    return is_marked


def estimate(signatures, one, other):
    """Return the share of equal bytes, less those that are equal by chance."""
    share = float((signatures[one] == signatures[other]).mean())
    return (share - 1 / 256) / (1 - 1 / 256)


@cache
def ngrams(text):
    words = word_hashes(text)
    return {int(n) for block in ngram_hashes(words, min(SIZE, len(words))) for n in block}


def jaccard(one, other):
    both = ngrams(one), ngrams(other)
    return len(both[0] & both[1]) / len(both[0] | both[1])


def families(seed, count, words):
    """Texts, and versions of them with some words replaced, in random order."""
    generator = np.random.default_rng(seed)
    texts = []
    for text in range(count):
        first = [f"w{n}" for n in generator.integers(0, 10**6, generator.integers(1, words))]
        texts.append(" ".join(first))
        for _ in range(generator.integers(0, 4)):
            share = 10 ** generator.uniform(-3, -1)
            is_new = generator.random(len(first)) < share
            texts.append(" ".join(np.where(is_new, f"new{text}", first)))
    return [str(text) for text in generator.permutation(texts)]


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([0.3, 0.5, 0.75, 0.8, 0.95, 1.0]),
    st.sampled_from([7, 50]),
)
def test_marks_are_those_of_the_definition(tmp_path_factory, seed, threshold, part_documents):
    texts = families(seed, 30, 300)
    cuts = sorted(np.random.default_rng(seed).integers(0, len(texts), 2))
    parts = [texts[: cuts[0]], texts[cuts[0] : cuts[1]], texts[cuts[1] :]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "PART_DOCUMENTS", part_documents)
        patch.setattr(near_duplicates, "_PAIRS", 5)
        for module in (duplicates, near_duplicates):
            patch.setattr(module, "BLOCK_DOCUMENTS", 8)
        found = marks_of(tmp_path_factory.mktemp("near"), parts, threshold)
    assert found == marks_by_definition(texts, threshold)


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_marks_agree_with_the_jaccard_similarity(tmp_path, threshold):
    """Up to six standard errors of the estimate."""
    texts = families(1, 60, 400)
    is_marked = marks_of(tmp_path, [texts[:50], texts[50:]], threshold)
    assert 10 < sum(is_marked) < len(texts) - 50
    for number, text in enumerate(texts):
        similar = [jaccard(text, other) for other in texts[:number]]
        if is_marked[number]:
            assert max(similar) > threshold - 0.15
        else:
            kept = [s for s, dropped in zip(similar, is_marked, strict=False) if not dropped]
            assert max(kept, default=0) < threshold + 0.15


@pytest.mark.parametrize("words", [3, 30, 300, 3000, 60_000])
def test_estimate_is_unbiased_for_texts_of_any_length(words):
    generator = np.random.default_rng(words)
    errors = []
    for _ in range(12):
        numbers = generator.integers(0, 10**9, words)
        other = np.where(generator.random(words) < 0.05, 0, numbers)
        one, two = (" ".join(map(str, each)) for each in (numbers, other))
        both = [np.frombuffer(signature(text, SIZE), np.uint8) for text in (one, two)]
        errors.append(estimate(both, 0, 1) - jaccard(one, two))
    assert abs(np.mean(errors)) < 0.03
    assert np.max(np.abs(errors)) < 0.13


@given(st.permutations([f"word{n}" for n in range(20)] * 2))
def test_signature_depends_on_the_set_of_ngrams_alone(order):
    expected = signature(" ".join(f"Word{n}," for n in range(20)), 1)
    assert signature(" ".join(order), 1) == expected
    assert len(expected) == 256


def test_first_stays_and_short_texts_are_compared_as_a_whole(tmp_path):
    parts = [["a b", "A, b!", "a c", "!!!", "?"], ["!!!", "b a", "a b", "a", "a"]]
    expected = [False, True, False, False, False, True, False, True, False, True]
    assert marks_of(tmp_path, parts, 0.8) == expected


def test_threshold_is_that_of_the_estimate():
    assert [least_equal(threshold) for threshold in (0.8, 0.5, 1.0)] == [205, 129, 256]


CHOSEN = Settings(valid_fraction=0.2, near_duplicates=0.8)


def test_signatures_of_other_settings_are_not_used(tmp_path):
    file = write_pile(tmp_path / "a.jsonl.zst", ["a b c d", "a b x d"])
    one, two = (
        plan([file], [], tmp_path / "c", Settings(near_duplicates=0.5, near_duplicate_ngram=n), "")
        for n in (1, 4)
    )
    sign_input(*one)
    mark_near_duplicates(one)
    with pytest.raises(ValueError, match=r"shard-00000\.signatures: missing, or made before"):
        mark_near_duplicates(two)
    stricter = replace(one[0], settings=replace(one[0].settings, near_duplicates=0.9))
    with pytest.raises(ValueError, match=r"shard-00000\.near-duplicates: missing, or made before"):
        near_duplicates.near_duplicates(stricter)


@pytest.mark.usefixtures("in_process")
def test_exact_duplicates_are_counted_as_such_and_subsets_beside_them(tokenizer_folder, tmp_path):
    text = make_texts(1, 300)[0]
    file = write_pile(tmp_path / "a.jsonl.zst", [text, text, text + " more", "another"])
    chosen = replace(CHOSEN, duplicates="drop")
    manifest = prepare([file], tmp_path / "corpus", tokenizer_folder, chosen)
    counts = {reason: rejects.count for reason, rejects in manifest.rejects.items()}
    assert counts == {"duplicate": 1, "near-duplicate": 1}
    assert manifest.rejects["near-duplicate"].places == [f"{file}:3"]
    with pytest.raises(ValueError, match="near-duplicates was 0.8 and is 0.7"):
        prepare([file], tmp_path / "corpus", tokenizer_folder, replace(chosen, near_duplicates=0.7))

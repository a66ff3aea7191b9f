"""Texts that a causal model continues."""

import dataclasses
import math

import pytest
import torch

from data_prep import tokenizer as tokenizers
from pretrain.__main__ import main
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.models import model_folder
from pretrain.models.fill_mask import fill_mask
from pretrain.models.generate import GenerationSettings, choose, generate, next_tokens, stream
from pretrain.models.pretrained import Pretrained

VARIANTS = [name for name in presets.VARIANTS if name.startswith("causal-")]
PROMPTS = ["The value of", "", "an object is a value; so is what it holds", "é 東"]
GREEDY = GenerationSettings(max_tokens=12)
DRAWN = GenerationSettings(max_tokens=12, temperature=50.0, top_k=200, top_p=0.95)


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return tokenizers.load(corpus)


@pytest.fixture(
    scope="module", params=[*VARIANTS, *(name for name in presets.VARIANTS if "char-" in name)]
)
def model(request, tokenizer):
    overrides = {"latents": 4} if "perceiver" in request.param else {}
    return random_model(request.param, tokenizer, **overrides)


@pytest.fixture(scope="module")
def alibi(tokenizer):
    return random_model("causal-alibi", tokenizer)


def random_model(variant, tokenizer, **overrides):
    """A model of long and varied texts: embeddings are small, so that they are not repeated."""
    torch.manual_seed(1)
    model = LanguageModel(presets.build("tiny", variant, tokenizer.vocab_size, overrides)).eval()
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight += (1.0 if weight.dim() == 2 else 0.1) * torch.randn_like(weight)
        table = model.encoder.embeddings.tokens.weight
        table[tokenizer.eos_id] = 0.0
        table *= 0.1
    return model


def changed(settings, **values):
    return dataclasses.replace(settings, **values)


@torch.no_grad()
def test_greedy_text_is_the_most_likely_token_of_each_whole_text(model, tokenizer):
    """Read again from `<s>` on for every token, without a cache."""
    never, seen = [0, 1, 3, tokenizer.mask_id], set()
    for prompt, made in zip(PROMPTS, generate(model, tokenizer, PROMPTS, GREEDY), strict=True):
        ids = [0, *tokenizer.encode_batch([prompt])[0].tolist()]
        expected = []
        while len(expected) < 12 and 2 not in expected:
            last = torch.tensor([len(ids) + len(expected) - 1])
            logits = model(torch.tensor([ids + expected]), None, last)[0]
            logits[never] = -math.inf
            expected.append(int(logits.argmax()))
        seen |= set(expected)
        assert made == tokenizer.decode([id for id in expected if id != 2])
    assert len(seen) > 9


def test_a_seed_gives_the_same_texts_twice_and_another_seed_others(alibi, tokenizer):
    first, again = (generate(alibi, tokenizer, PROMPTS, DRAWN) for _ in range(2))
    assert first == again
    assert generate(alibi, tokenizer, PROMPTS, changed(DRAWN, seed=2)) != first


def test_the_pieces_of_a_stream_are_the_text(alibi, tokenizer):
    for seed in range(5):
        settings = changed(DRAWN, seed=seed)
        pieces = list(stream(alibi, tokenizer, "The", settings))
        assert "".join(pieces) == generate(alibi, tokenizer, ["The"], settings)[0]
        assert len(pieces) > 2


class Fixed(torch.nn.Module):
    """A fake model whose logits are given, by step."""

    def __init__(self, *steps):
        super().__init__()
        self.config = presets.build("tiny", "causal-alibi", steps[0].shape[-1], {})
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.steps = list(steps)

    def forward(self, ids, document_ids, positions, cache):
        return self.steps.pop(0).clone()


def one_hot(tokenizer, *ids):
    return torch.nn.functional.one_hot(torch.tensor(ids), tokenizer.vocab_size) * 9.0


def test_a_text_ends_with_its_end_token_while_others_go_on(tokenizer):
    steps = [one_hot(tokenizer, *ids) for ids in ([9, 2], [8, 7], [2, 7], [5, 5])]
    made = list(next_tokens(Fixed(*steps), tokenizer, ["a", "b"], GREEDY))
    assert made == [[9, 2], [8, 2], [2, 2]]
    texts = generate(Fixed(*steps), tokenizer, ["a", "b"], GREEDY)
    assert texts == [tokenizer.decode([9, 8]), ""]
    short = changed(GREEDY, max_tokens=2)
    assert list(next_tokens(Fixed(*steps), tokenizer, ["a", "b"], short)) == made[:2]
    assert list(stream(Fixed(*[s[:1] for s in steps]), tokenizer, "a", GREEDY)) == [
        *map(tokenizer.token_text, (9, 8)),
        "",
        "",
    ]


@pytest.mark.parametrize("settings", [GREEDY, changed(GREEDY, temperature=1.0)])
def test_no_special_token_but_the_end_is_chosen(tokenizer, settings):
    logits = one_hot(tokenizer, 9)
    logits[0, [0, 1, 3, tokenizer.mask_id]] = 50.0
    ids = [id for (id,) in next_tokens(Fixed(*[logits] * 12), tokenizer, ["a"], settings)]
    assert not {0, 1, 3, tokenizer.mask_id} & set(ids)


def test_characters_are_shown_whole(tokenizer):
    ids = tokenizer.encode_batch(["東!"])[0].tolist()
    assert len(ids) > 3
    pieces = list(
        stream(Fixed(*[one_hot(tokenizer, id) for id in [*ids, 2]]), tokenizer, "", GREEDY)
    )
    assert [piece for piece in pieces if piece] == ["東", "!"]


def draws(logits, **values):
    settings = GenerationSettings(**values)
    generator = torch.Generator().manual_seed(settings.seed)
    return (
        choose(logits.log().expand(20_000, -1), settings, generator).bincount(minlength=4) / 20_000
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"top_k": 3}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        # of the four tenths, the three tenths and the two tenths, after top-k
        ({"top_k": 3, "top_p": 0.7}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 1e-300}, [0, 1, 0, 0]),
        ({"temperature": 1e300}, [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_draws_have_the_probabilities_of_the_settings(values, expected):
    found = draws(torch.tensor([0.1, 0.4, 0.2, 0.3]), **{"temperature": 1.0, **values})
    assert (found - torch.tensor(expected)).abs().max() < 0.02
    assert all((found == 0) == (torch.tensor(expected) == 0))


def test_the_more_likely_of_equal_tokens_is_the_first_one_everywhere():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    drawn = GenerationSettings(temperature=1.0, top_k=1)
    for settings in (GREEDY, drawn):
        assert choose(logits, settings, torch.Generator()).tolist() == [1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 is not accepted; it must be 1 or more"),
        ({"temperature": -0.1}, "temperature: -0.1 is not accepted; it must be 0 .* or more"),
        ({"temperature": math.nan}, "temperature: nan"),
        ({"temperature": math.inf}, "temperature: inf"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: 0 is not accepted; it must be 1 or more"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: 0.0 is not accepted; it must be above 0"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p: 1.1 is not accepted"),
        ({"top_k": 5}, "top_k: 5 is not accepted; it must be left out at temperature 0"),
        ({"top_p": 0.5}, "top_p: 0.5 is not accepted; it must be left out at temperature 0"),
        ({"seed": -1}, "seed: -1 is not accepted"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        GenerationSettings(**values)


def test_more_tokens_than_learned_positions_are_refused_and_the_most_are_made(tokenizer):
    learned = random_model("causal-learned", tokenizer)
    prompt = tokenizer.decode([9] * 10)
    ids = len(tokenizer.encode_batch([prompt])[0]) + 1
    most = GenerationSettings(max_tokens=64 - ids + 1)
    assert generate(learned, tokenizer, ["", prompt], most)
    wrong = changed(most, max_tokens=most.max_tokens + 1)
    message = f"{wrong.max_tokens} after a prompt of {ids} tokens .* end at 64; accepted: at most"
    with pytest.raises(ValueError, match=f"{message} {most.max_tokens} for"):
        generate(learned, tokenizer, ["", prompt], wrong)
    with pytest.raises(ValueError, match="end at 64; accepted: a shorter prompt"):
        generate(learned, tokenizer, [prompt * 10], GenerationSettings(max_tokens=1))


def test_masked_models_are_refused_and_causal_ones_fill_no_mask(alibi, tokenizer):
    masked = random_model("zero-clap", tokenizer)
    with pytest.raises(ValueError, match="is not causal: .*`fill-mask`"):
        generate(masked, tokenizer, ["a"], GREEDY)
    with pytest.raises(ValueError, match="is causal: .*`generate`"):
        fill_mask(alibi, tokenizer, "a <mask>")
    with pytest.raises(ValueError, match="there is no prompt"):
        generate(alibi, tokenizer, [], GREEDY)


def test_the_command_prints_the_prompt_and_what_follows(alibi, tokenizer, tmp_path, capsys):
    folder = tmp_path / "model"
    contents = model_folder.ModelContents(alibi.config, alibi.state_dict(), tokenizer, {})
    model_folder.save_model(folder, contents)
    (expected,) = Pretrained.load(folder).generate("The value", max_tokens=5)
    words = ["generate", str(folder), "The value", "--device", "cpu"]
    assert main([*words, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == f"The value{expected}\n"
    drawn = {"temperature": 50.0, "top_k": 30, "top_p": 0.9, "seed": 7}
    (expected,) = Pretrained.load(folder).generate("The value", max_tokens=5, **drawn)
    options = [w for k, v in drawn.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    assert main([*words, "--max-tokens", "5", *options]) == 0
    assert capsys.readouterr().out == f"The value{expected}\n"
    assert main([*words, "--temperature", "-1"]) == 2
    assert "temperature: -1.0 is not accepted" in capsys.readouterr().err

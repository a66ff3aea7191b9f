"""Causal models: no token sees a later one, and what is cached changes no logit."""

import pytest
import torch

from pretrain.model import presets
from pretrain.model.cache import KeyValueCache
from pretrain.model.language_model import LanguageModel

VARIANTS = [name for name in presets.VARIANTS if name.startswith("causal-")]
LENGTH = 24
CHUNKS = ([1] * LENGTH, [LENGTH], [7, 1, 11, 5])
"""New tokens of each call."""
in_chunks = pytest.mark.parametrize("chunks", CHUNKS, ids=["by token", "at once", "uneven"])


def random_model(variant, **overrides):
    """A model in which every layer changes the logits of its tokens by much."""
    torch.manual_seed(0)
    model = LanguageModel(presets.build("tiny", variant, 60, overrides)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += (0.5 if weight.dim() == 2 else 0.1) * torch.randn_like(weight)
    return model


def rows(lengths, seed=0):
    """Ids [B, T] padded on the left, and their document ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 60, (len(lengths), LENGTH), generator=generator)
    numbers = (torch.arange(LENGTH) >= LENGTH - torch.tensor(lengths)[:, None]).int()
    return ids.masked_fill(numbers == 0, 1), numbers


@torch.no_grad()
def logits(model, ids, document_ids, chunks=None):
    """Logits everywhere, [B, T, V]: of a cache that is given the tokens in chunks, or without."""
    cache = None if chunks is None else KeyValueCache(model.config.num_layers)
    parts, end = [], 0
    for size in chunks or [ids.shape[1]]:
        begin, end = end, end + size
        numbers = None if document_ids is None else document_ids[:, :end]
        read = ids[:, begin:end]
        part = model(read, numbers, torch.arange(read.numel()), cache)
        parts.append(part.view(*read.shape, -1))
    return torch.cat(parts, dim=1)


@pytest.fixture(params=VARIANTS)
def model(request):
    return random_model(request.param)


@in_chunks
def test_cached_logits_are_those_without_a_cache(model, chunks):
    ids, numbers = rows([LENGTH, 15, 2])
    real = numbers.bool()
    expected = logits(model, ids, numbers)
    cached = logits(model, ids, numbers, chunks)
    scale = expected.abs().max()
    assert (cached - expected)[real].abs().max() < 1e-5 * scale
    without_ids = logits(model, ids[:1], None, chunks)
    assert (without_ids - expected[:1]).abs().max() < 1e-5 * scale
    for row, length in enumerate([LENGTH, 15, 2]):
        alone = logits(model, ids[row : row + 1, -length:], None)
        assert (cached[row, -length:] - alone[0]).abs().max() < 1e-5 * scale


@in_chunks
def test_in_bf16_cached_logits_differ_by_one_percent_at_most(model, chunks):
    """Rounding the model to bf16 changes them by more: between one and two percent."""
    ids, numbers = rows([LENGTH, 15, 2])
    real = numbers.bool()
    half = model.to(torch.bfloat16)
    plain, cached = (logits(half, ids, numbers, given)[real].float() for given in (None, chunks))
    assert (cached - plain).norm() < 0.01 * plain.norm()


@pytest.mark.parametrize("changed", [1, 9, LENGTH - 1])
def test_a_later_token_changes_no_bit_of_an_earlier_logit(model, changed):
    """With a cache and without; every logit from the changed token on does change."""
    ids, padded = rows([LENGTH, 20])
    other = ids.clone()
    other[:, changed:] = ids[:, changed:] % 50 + 5
    for numbers in (None, torch.ones_like(padded, dtype=torch.bool), padded):
        for chunks in (None, [7, 1, 11, 5]):
            before, after = (logits(model, read, numbers, chunks) for read in (ids, other))
            assert torch.equal(before[:, :changed], after[:, :changed])
            assert (before != after)[0, changed:].any(-1).all()


@pytest.mark.parametrize(
    ("variant", "backend", "mode"),
    [
        ("baseline", "dense", "eval"),
        ("causal-alibi", "flex", "eval"),
        ("causal-alibi", "dense", "train"),
    ],
)
def test_a_cache_that_could_not_be_right_is_refused(variant, backend, mode):
    config = presets.build("tiny", variant, 50, {"attention_dropout": 0.0})
    model = LanguageModel(config, attention_backend=backend)
    getattr(model, mode)()
    with pytest.raises(ValueError, match="cache: needs a causal model in evaluation mode"):
        model(torch.full((1, 3), 7), None, torch.arange(3), KeyValueCache(config.num_layers))


def test_a_cache_of_another_number_of_layers_is_refused():
    model = LanguageModel(presets.build("tiny", "causal-alibi", 50, {})).eval()
    with pytest.raises(ValueError, match="zip"):
        model(torch.full((1, 3), 7), None, torch.arange(3), KeyValueCache(1))

"""ALBERT's parts: factorised embeddings, shared layers, segments, the head for pairs."""

import copy

import pytest
import torch
from torch import nn

from pretrain.model import presets
from pretrain.model.init import STANDARD_DEVIATION, initialize
from pretrain.model.language_model import LanguageModel
from tests.pretrain.model.test_positions import VOCABULARY, ids_of


def tiny(**overrides):
    torch.manual_seed(0)
    fields = {"embedding_size": 16, "pair_head": True, **overrides}
    return LanguageModel(presets.build("tiny", "albert", VOCABULARY, fields)).eval()


def published_count(size, **overrides):
    """As the paper counts: the encoder and the pooler, without the heads."""
    config = presets.build(size, "albert", 30000, {"pair_head": True, **overrides})
    with torch.device("meta"):
        model = LanguageModel(config)
    parts = (model.encoder, model.pair_head.dense)
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


@pytest.mark.parametrize(
    ("size", "count"),
    [("albert-large", 17_683_968), ("albert-xlarge", 58_724_864), ("albert-xxlarge", 222_595_584)],
)
def test_named_sizes_have_the_published_number_of_parameters(size, count):
    assert published_count(size) == count


@pytest.mark.parametrize(
    ("sharing", "factorised", "whole"),
    [
        ("all", 11_683_584, 31_114_752),
        ("attention", 63_647_232, 83_078_400),
        ("feed-forward", 37_686_528, 57_117_696),
        ("none", 89_650_176, 109_081_344),
    ],
)
def test_every_sharing_has_the_papers_number_of_parameters(sharing, factorised, whole):
    """Lan et al. 2020, table 4: 12, 64, 38 and 89 million, and 31, 83, 57 and 108 million."""
    assert published_count("albert-base", sharing=sharing) == factorised
    assert published_count("albert-base", sharing=sharing, embedding_size=768) == whole
    assert published_count("albert-base", sharing=sharing, embedding_size=0) == whole


@pytest.mark.parametrize("sharing", ["none", "all", "attention", "feed-forward"])
def test_layers_of_a_group_share_and_groups_do_not(sharing):
    groups = 1 if sharing == "none" else 2
    layers = tiny(num_layers=6, sharing=sharing, layer_groups=groups).encoder.layers
    attention = {"attention", "attention_norm"}
    shared = {
        "none": set(),
        "attention": attention,
        "feed-forward": {"expand", "contract", "output_norm"},
        "all": {*attention, "expand", "contract", "output_norm"},
    }[sharing]
    for name in ("attention", "attention_norm", "expand", "contract", "output_norm"):
        owners = [id(getattr(layer, name)) for layer in layers]
        expected = [0, 0, 0, 3, 3, 3] if name in shared else range(6)
        assert owners == [owners[number] for number in expected]
        assert len(set(owners)) == len(set(expected))


def test_a_copy_shares_among_its_own_layers_alone():
    model = tiny()
    first, second = copy.deepcopy(model).encoder.layers
    assert second.attention is first.attention
    assert first.attention is not model.encoder.layers[0].attention


def test_segment_ids_are_refused_by_a_model_without_segments():
    model, ids = tiny(segments=0), ids_of(2, 9)
    with pytest.raises(ValueError, match="None for a model without segments"):
        model.encoder(ids, None, segment_ids=torch.zeros_like(ids))


def test_padding_of_a_factorised_embedding_is_zero():
    model, ids = tiny(), ids_of(2, 9)
    visible = torch.arange(9) < torch.tensor([[9], [5]])
    assert not model.encoder.embeddings(ids, visible)[1, 5:].any()


def test_truncated_weights_end_at_two_standard_deviations():
    part = nn.Linear(400, 400)
    torch.manual_seed(0)
    initialize(part, "truncated-normal")
    assert part.weight.abs().max() <= 2 * STANDARD_DEVIATION
    # Of a normal number within two standard deviations: 0.8796 of the whole one's.
    assert float(part.weight.detach().std()) == pytest.approx(0.8796 * STANDARD_DEVIATION, rel=0.01)
    initialize(part)
    assert part.weight.abs().max() > 3 * STANDARD_DEVIATION

"""One layer of the encoder, and functions that change all layers of a model."""

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import AttentionContext, SelfAttention, StackedLinear, at_targets
from .config import ModelConfig
from .embeddings import layer_norm
from .flex import check_no_fallback

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class EncoderLayer(nn.Module):
    """Attention, then feed-forward; each is added to its input.

    The sums are normalised ("post"), or what attention and feed-forward read ("pre").
    """

    attention: SelfAttention
    attention_norm: nn.LayerNorm
    expand: StackedLinear
    contract: nn.Linear
    output_norm: nn.LayerNorm

    def __init__(
        self,
        config: ModelConfig,
        attention_of: "EncoderLayer | None" = None,
        feed_forward_of: "EncoderLayer | None" = None,
    ) -> None:
        """Make one layer of the sizes in `config`.

        Args:
            config: the architecture.
            attention_of: the layer whose attention and its norm this one uses; None: its own.
            feed_forward_of: likewise for the feed-forward network.
        """
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.biases
        if attention_of is None:
            self.attention = SelfAttention(config)
            self.attention_norm = layer_norm(config)
        else:
            self._share(attention_of, "attention", "attention_norm")
        if feed_forward_of is None:
            self.expand = StackedLinear(hidden, inner, 1 + config.gated, bias=bias)
            self.contract = nn.Linear(inner, hidden, bias=bias)
            self.output_norm = layer_norm(config)
        else:
            self._share(feed_forward_of, "expand", "contract", "output_norm")
        self.dropout = nn.Dropout(config.dropout)
        self.norm_first = config.layer_norm == "pre"
        self.activation = ACTIVATIONS[config.activation]

    def _share(self, owner: "EncoderLayer", *names: str) -> None:
        """Use modules of another layer, which alone lists their weights.

        `nn.Module` would list them here as well, and a file of weights would hold them twice.
        """
        for name in names:
            self.__dict__[name] = getattr(owner, name)

    def forward(
        self, x: Tensor, context: AttentionContext, target_positions: Tensor | None = None
    ) -> Tensor:
        """[B, T, D] to [B, T, D]; with `target_positions` [M] to [M, D], those tokens only.

        Attention reads all tokens. The rest works on one token at a time, so that skipping the
        other tokens changes nothing.
        """
        read = self.attention_norm(x) if self.norm_first else x
        return self._finish(x, self.attention(read, context, target_positions), target_positions)

    def _finish(self, x: Tensor, mixed: Tensor, target_positions: Tensor | None) -> Tensor:
        """Add what attention gave to the layer's input, then the feed-forward network."""
        x = at_targets(x, target_positions) + self.dropout(mixed)
        if self.norm_first:
            return x + self._feed_forward(self.output_norm(x))
        x = self.attention_norm(x)
        return self.output_norm(x + self._feed_forward(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        inner, *gate = self.expand(x).chunk(self.expand.matrices, dim=-1)
        inner = self.activation(inner)
        if gate:
            inner = inner * gate[0]
        return self.dropout(self.contract(inner))


def build_layers(
    config: ModelConfig, layer_type: type[EncoderLayer] = EncoderLayer
) -> list[EncoderLayer]:
    """Make N layers; those of a group share modules according to `config.sharing`."""
    layers: list[EncoderLayer] = []
    group_size = config.num_layers // config.layer_groups
    for number in range(config.num_layers):
        first = layers[number - number % group_size] if number % group_size else None
        layer = layer_type(
            config,
            attention_of=first if config.shares_attention else None,
            feed_forward_of=first if config.shares_feed_forward else None,
        )
        layers.append(layer)
    return layers


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute each layer in the backward pass, with the dropout of the forward pass.

    Only the input of each layer is kept. This saves memory, costs one forward pass, and changes no
    bit of the result.
    Layers are compiled before, if at all: torch.compile leaves those that it finds changed alone.
    """
    for layer in model.modules():
        if isinstance(layer, EncoderLayer):
            # On the instance: hooks and the names of the weights do not change.
            name = "_compiled_call_impl" if layer._compiled_call_impl else "forward"
            again = functools.partial(checkpoint, getattr(layer, name), use_reentrant=False)
            setattr(layer, name, again)


def compile_layers(model: nn.Module) -> None:
    """Compile embeddings, layers and head in place; the names of the weights do not change.

    Layers are compiled one by one rather than the whole model: they are alike, so one compilation
    serves all (except the last layer, at the target positions only, layers that share modules, and
    the first with latents), and there is nothing between them to fuse.
    """
    check_no_fallback()
    for part in model.modules():
        if isinstance(part, EncoderLayer):
            part.compile(dynamic=False)
        for name in ("_combine", "_predict"):  # of Embeddings and LanguageModel
            if hasattr(part, name):
                setattr(part, name, torch.compile(getattr(part, name), dynamic=False))

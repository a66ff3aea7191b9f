"""The encoder: embeddings and layers, from token ids to features.

Order: `Stack`, which makes and runs the modules, then `Encoder`.
"""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .attention import AttentionBias, AttentionContext, dense_bias
from .backends import check_backend
from .biases import ScoreFunction
from .config import ModelConfig
from .embeddings import Embeddings, layer_norm
from .flex import TILE, flex_bias
from .layers import EncoderLayer, build_layers
from .masks import earlier, visible_keys
from .perceiver import DownLayer, PerceiverContext, UpLayer
from .positions import position_module, token_positions


class Stack(nn.Module):
    """The modules of an encoder. `assemble` makes them, because exports have another constructor.

    In models with latents the first and the last layer are those of perceiver.py.
    """

    def assemble(
        self,
        config: ModelConfig,
        vocabulary_multiple: int = 1,
        attention_backend: str = "dense",
        layer_type: type[EncoderLayer] = EncoderLayer,
    ) -> None:
        """Make N layers and a token table whose rows are padded to a multiple.

        Raises:
            ValueError: the attention back end is unknown, or cannot compute the model.
        """
        check_backend(config, attention_backend)
        self.architecture = config
        self.attention_backend = attention_backend
        self.embeddings = Embeddings(config, vocabulary_multiple)
        self.rotation = position_module(config.method.rotation, config)
        self.score_bias = position_module(config.method.score_bias, config)
        layers = build_layers(config, layer_type)
        if config.latents:
            layers[0], layers[-1] = DownLayer(config), UpLayer(config)
        self.layers = nn.ModuleList(layers)
        self.final_norm = layer_norm(config) if config.final_norm else None
        if config.latents:
            # Read in `forward` alone, where ZeRO 3 gathers it. Drawn as in CS224N: 3 dimensions.
            basis = torch.empty(1, config.latents, config.hidden_size)
            self.basis = nn.Parameter(nn.init.xavier_uniform_(basis)[0])

    def embed(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        is_mask: Tensor | None = None,
        weights: list[Tensor] | None = None,
    ) -> tuple[Tensor, AttentionContext]:
        """Return the input of the first layer, [B, T, D], and the attention context of all layers.

        For FlexAttention, T is rounded up to whole tiles with padding. In models with latents the
        first layer's input is what queries the tokens, which are in the context.

        Args:
            input_ids: [B, T].
            document_ids: [B, T] or None, see the package's docstring. With latents, padding must
                follow the tokens: a check would synchronise with a GPU.
            segment_ids: [B, T] or None, likewise.
            positions: as of `Embeddings.forward`.
            is_mask: likewise.
            weights: as of `AttentionContext`.

        Raises:
            ValueError: a model with latents gets integers as document ids.
        """
        x: Tensor = self.embeddings(input_ids, document_ids, segment_ids, positions, is_mask)
        if self.attention_backend != "dense" and (extra := -x.shape[1] % TILE):
            if document_ids is None:
                document_ids = torch.ones_like(input_ids, dtype=torch.bool)
            x, document_ids = F.pad(x, (0, 0, 0, extra)), F.pad(document_ids, (0, extra))
        scores = None
        if self.score_bias is not None:
            scores = self.score_bias(x.device, exact=self.attention_backend == "dense")
        if not self.architecture.latents:
            return x, self._context(x, document_ids, scores, positions, weights)
        if document_ids is not None and document_ids.dtype != torch.bool:
            raise ValueError(
                "document_ids: integers are not accepted with latents, because a row is one "
                "document; it must be None, or bool that is False for padding"
            )
        latents = self.basis[: x.shape[1]].expand(len(x), -1, -1)
        bias = functools.partial(dense_bias, scores, None, self.architecture.num_heads, causal=True)
        return latents, PerceiverContext(
            **vars(self._context(latents, None, scores)),
            tokens=x,
            token_rotation=self.rotation and self.rotation(token_positions(None, x)),
            down=bias(latents, keys=x.shape[1]),
            up=bias(x, keys=latents.shape[1]),
        )

    def states(self, x: Tensor, context: AttentionContext) -> Iterator[Tensor]:
        """Yield the input of the first layer and the output of each, N + 1 times [B, T, D]."""
        contexts = context.of_layers(self.architecture.windows)
        for layer, of_layer in zip(self.layers, contexts, strict=True):
            yield x
            x = layer(x, of_layer)
        yield x if self.final_norm is None else self.final_norm(x)

    def _context(
        self,
        x: Tensor,
        document_ids: Tensor | None,
        scores: ScoreFunction | None,
        positions: Tensor | None = None,
        weights: list[Tensor] | None = None,
    ) -> AttentionContext:
        rotation = None
        if self.rotation is not None:
            if positions is None:
                positions = token_positions(document_ids, x)
            rotation = self.rotation(positions)
        config = self.architecture
        # Tiles are for dropout on a CPU, which torch's kernels lack.
        drops = self.training and config.attention_dropout > 0
        on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
        tiled = drops and on_cpu and weights is None and not torch.compiler.is_compiling()
        tiled = tiled and self.layers[0]._compiled_call_impl is None
        causal, heads, window = config.causal, config.num_heads, config.local_window

        def bias(window: int) -> AttentionBias:
            if self.attention_backend == "dense":
                return dense_bias(scores, document_ids, heads, x, tiled, causal, window)
            return flex_bias(scores, document_ids, x.shape[1], causal, window, x.device)

        local_bias = bias(window) if window else None
        is_causal = scores is None and visible_keys(document_ids, causal) is earlier
        if is_causal and not tiled and weights is None:
            return AttentionContext(rotation=rotation, is_causal=True, local_bias=local_bias)
        return AttentionContext(bias(0), rotation, weights, local_bias=local_bias)


class Encoder(Stack):
    """The transformer encoder: token ids to the output of the last layer, or of the final norm."""

    def __init__(
        self, config: ModelConfig, vocabulary_multiple: int = 1, attention_backend: str = "dense"
    ) -> None:
        """Make the modules, see `Stack.assemble`."""
        super().__init__()
        self.config = config
        self.assemble(config, vocabulary_multiple, attention_backend)

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        target_positions: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the features of every token, or of the target positions.

        Args:
            input_ids: [B, T].
            document_ids: [B, T] or None, see the package's docstring.
            target_positions: [M] or None. Most of the last layer's work is done for these tokens
                only (as in MosaicBERT: Portes et al. 2023).
            segment_ids: [B, T] or None, see the package's docstring.

        Returns:
            [B, T, D], or [M, D] for the target positions.

        Raises:
            ValueError: a model with latents gets integers as document ids.
        """
        length = input_ids.shape[1]
        x, context = self.embed(input_ids, document_ids, segment_ids)
        if target_positions is not None and x.shape[1] > length:
            target_positions = target_positions // length * x.shape[1] + target_positions % length
        contexts = context.of_layers(self.config.windows)
        for layer, of_layer in zip(self.layers[:-1], contexts[:-1], strict=True):
            x = layer(x, of_layer)
        features: Tensor = self.layers[-1](x, contexts[-1], target_positions)
        if self.final_norm is not None:
            features = self.final_norm(features)
        return features if target_positions is not None else features[:, :length]

    def hidden_states(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the input of the first layer and the output of each: N + 1 tensors [B, T, D].

        The last is what `forward` returns.

        Raises:
            ValueError: the model has latents, so that its layers work on different vectors.
        """
        if self.config.latents:
            raise ValueError(
                f"the outputs of all layers: this model has {self.config.latents} latents, so its "
                "layers work on different vectors"
            )
        states = self.states(*self.embed(input_ids, document_ids, segment_ids))
        return [state[:, : input_ids.shape[1]] for state in states]

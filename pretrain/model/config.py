"""Every architectural choice of a model, as one frozen record.

Choices such as ALiBi, embedding scale and normalisation leave no trace in the weights. The record
is therefore stored with them; under another record they would silently compute nonsense.
"""

import dataclasses
import math
from collections.abc import Mapping

from .checks import check_kinds, check_value

VOCABULARY_MULTIPLE = 128
"""While a model is trained, its token table has a multiple of this number of rows, which makes its
matrix multiplications faster on every GPU; exported models do not have the additional rows."""


@dataclasses.dataclass(frozen=True)
class PositionMethod:
    """The functions of a position method in each of the three places where it may act.

    Each place names a class that positions.py knows, by a string because this file does not import
    torch; None where the method does nothing. The class is built from the ModelConfig.
    """

    embedding: str | None = None
    """On the token embeddings: positions to vectors, which are added."""
    rotation: str | None = None
    """On queries and keys: positions to a function that is applied to both."""
    score_bias: str | None = None
    """On attention scores: a device, and whether a constant of each head matters, to a function of
    (head, query, key), which is added."""
    bounded: bool = False
    """Whether inputs longer than `max_positions` are refused."""
    hidden_multiple: int = 1
    """`hidden_size` must be a multiple of this."""
    head_multiple: int = 1
    """The size of a head must be a multiple of this."""
    trained_bias: bool = False
    """Whether what is added to scores is always trained."""


POSITION_METHODS: Mapping[str, PositionMethod] = {
    "learned": PositionMethod(embedding="LearnedPositions", bounded=True),
    "sinusoidal": PositionMethod(embedding="SinusoidalPositions", hidden_multiple=2),
    "rotary": PositionMethod(rotation="Rotary", head_multiple=2),
    "t5-bias": PositionMethod(score_bias="T5Bias", trained_bias=True),
    "alibi": PositionMethod(score_bias="Alibi"),
    "none": PositionMethod(),
}
"""Every position method. No other code depends on which method a model has."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "alibi": ("offset", "symmetric", "one-sided", "by-direction"),
    "alibi_slopes": ("fixed", "trained"),
    "head": ("roberta", "clap", "tied", "untied"),
    "layer_norm": ("post", "pre"),
    "activation": ("gelu", "gelu-tanh", "relu"),
    "embedding_scale": ("one", "sqrt-hidden"),
    "mask_embedding": ("row", "zero"),
    "sharing": ("none", "all", "attention", "feed-forward"),
    "initial_weights": ("normal", "truncated-normal"),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of one model; the defaults are RoBERTa base as trained on the Pile.

    Files of an older version lack fields that were added since, whose defaults describe its models.
    """

    vocab_size: int
    """Rows of the token embedding. With `mask_embedding` "zero" the mask token has no row: every id
    from `vocab_size` on means the mask."""
    hidden_size: int = 768
    """Size of the vectors that layers read and write."""
    embedding_size: int = 0
    """Size of the vectors of tokens, positions and segments, which a linear layer then maps to
    `hidden_size` (Lan et al. 2020, section 3.1); 0: `hidden_size`, without that layer."""
    num_layers: int = 12
    """Number of layers."""
    num_heads: int = 12
    """Attention heads of a layer; their number divides `hidden_size`."""
    intermediate_size: int = 3072
    """Size of the hidden vectors of a feed-forward layer."""
    sharing: str = "none"
    """The modules that layers of a group share: none, all, attention, or feed-forward, with their
    norms (Lan et al. 2020)."""
    layer_groups: int = 1
    """Groups of consecutive layers. Layers of different groups share nothing."""
    max_positions: int = 2048
    """Longest input in training; with learned positions the longest input at all."""
    position_offset: int = 2
    """Row of the first token in the table of positions. fairseq gives it row 2 (`padding_idx` + 1),
    so that rows 0 and 1 are never read; BERT and ALBERT row 0."""
    position: str = "learned"
    """Position method."""
    alibi: str = "offset"
    """Shape of ALiBi's bias, where `position` is "alibi" (model/biases.py)."""
    alibi_slopes: str = "fixed"
    """Whether the slopes of ALiBi are trained."""
    causal: bool = False
    """Whether a token sees only itself and the tokens before it."""
    segments: int = 0
    """Segments of an input that have a trained vector each, which is added to their tokens; 0: no
    such vectors."""
    pair_head: bool = False
    """A head on the feature of `<s>` that predicts whether the second segment follows the first."""
    layer_norm: str = "post"
    """Where a layer normalises: after each residual sum, or before attention and feed-forward. With
    "pre" there is no norm after the last layer (Baevski and Auli 2019) unless `final_norm` adds
    one."""
    final_norm: bool = False
    """A layer norm after the last layer (Radford et al. 2019)."""
    activation: str = "gelu"
    """Of the feed-forward layers. "gelu-tanh" is the approximation of GELU by tanh, and holds in
    RoBERTa's head too."""
    gated: bool = False
    """A second projection to `intermediate_size`, by which the activation of the first is
    multiplied: with "gelu" GEGLU (Shazeer 2020). As many parameters as without a gate take two
    thirds of the size."""
    biases: bool = True
    """Whether linear layers and norms have biases. Without them, RoBERTa's head keeps its bias per
    token (Warner et al. 2024, section 2.1.1)."""
    local_window: int = 0
    """Tokens of the window of a local layer, even: a token sees those up to half as many places
    away (Warner et al. 2024, section 2.1.2). 0: all layers see the whole document."""
    global_every: int = 3
    """With a `local_window`, the first layer of every group of this many sees the whole
    document."""
    head: str = "roberta"
    """How outputs become logits. "roberta": a dense layer, GELU and a layer norm, then the inner
    product with the token vectors, and a bias per token. "clap": the inner product, times one
    trained number. "tied": the inner product alone. "untied": a matrix of its own."""
    normalize_embeddings: bool = False
    """L2-normalise token embeddings, both at the input and in the CLAP head."""
    embedding_scale: str = "one"
    """Factor on the token vectors: 1, or the square root of `hidden_size`."""
    embedding_norm: bool = True
    """A layer norm on the sum of the vectors of tokens, segments and positions."""
    mask_embedding: str = "row"
    """The vector of `<mask>`. "row": trained, as of other tokens; "zero": zeros."""
    initial_beta: float = 1.0
    """Initial value of the trained number of the head "clap"."""
    dropout: float = 0.1
    """Of the embeddings, and of the outputs of attention and of feed-forward: a probability."""
    attention_dropout: float = 0.1
    """Of attention weights: a probability."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance in layer norms."""
    initial_weights: str = "normal"
    """How weights are drawn: N(0, 0.02), whole or cut off at two standard deviations (BERT)."""
    latents: int = 0
    """Number of vectors on which the layers between the first and the last work, in place of the
    tokens (perceiver.py); 0: every layer works on all tokens."""

    def __post_init__(self) -> None:
        """Check types, choices, and that sizes divide."""
        check_kinds(self)

        def check(name: str, condition: bool, accepted: str | tuple[str, ...]) -> None:
            check_value(name, getattr(self, name), condition, accepted)

        for name, accepted in {"position": tuple(POSITION_METHODS), **CHOICES}.items():
            check(name, getattr(self, name) in accepted, accepted)
        may_be_zero = ("embedding_size", "position_offset", "segments", "latents", "local_window")
        for name in (field.name for field in dataclasses.fields(self) if field.type is int):
            least = 0 if name in may_be_zero else 1
            # More would never be built; layers and heads cost time and memory without weights.
            most = 1_000 if name in ("num_layers", "num_heads") else 10_000_000
            check(name, least <= getattr(self, name) <= most, f"{least} to {most:,}")
        # Without it the norm of padding's zeros is NaN.
        check("layer_norm_epsilon", self.layer_norm_epsilon >= 1e-30, "1e-30 or above")
        for name in ("dropout", "attention_dropout"):
            check(name, 0.0 <= getattr(self, name) < 1.0, "in [0, 1)")
        heads = self.num_heads * self.method.head_multiple
        multiple = math.lcm(heads, self.method.hidden_multiple)
        reason = f"a multiple of {multiple} ({self.num_heads} heads, {self.position} positions)"
        check("hidden_size", self.hidden_size % multiple == 0, reason)
        in_pairs = self.alibi == "one-sided" and self.position == "alibi"
        check("num_heads", not in_pairs or self.num_heads % 2 == 0, "even for one-sided ALiBi")
        expected = "false for a causal model, whose first token sees no other"
        check("pair_head", not (self.pair_head and self.causal), expected)
        fits = not self.final_norm or self.layer_norm == "pre"
        check("final_norm", fits, "false with layer_norm 'post', whose layers end with a norm")
        check("local_window", self.local_window % 2 == 0, "even: half of it on each side")
        expected = f"a divisor of num_layers {self.num_layers}"
        check("layer_groups", self.num_layers % self.layer_groups == 0, expected)
        fits = self.layer_groups == 1 or self.sharing != "none"
        check("layer_groups", fits, "1 where sharing is 'none'")
        self._check_embedding_size()
        self._check_latents()

    def _check_embedding_size(self) -> None:
        size = self.embedding_size
        multiple = self.method.hidden_multiple
        fits = size <= self.hidden_size and size % multiple == 0
        accepted = f"0 to hidden_size {self.hidden_size}"
        if multiple > 1:
            accepted += f", a multiple of {multiple} ({self.position} positions)"
        check_value("embedding_size", size, fits, accepted)
        # CLAP and the tied head multiply features by the token vectors, with nothing in between.
        fits = self.token_size == self.hidden_size or self.head in ("roberta", "untied")
        expected = f"hidden_size {self.hidden_size} with head {self.head!r}, or another head: "
        expected += "'roberta' or 'untied'"
        check_value("embedding_size", size, fits, expected)

    def _check_latents(self) -> None:
        needed = {
            "causal true": self.causal,
            "layer_norm 'pre'": self.layer_norm == "pre",
            "sharing 'none'": self.sharing == "none",
            "num_layers 2 or more": self.num_layers >= 2,
            "biases true": self.biases,
            "local_window 0": self.local_window == 0,
            # A head of its second half sees its own place alone, where there may be no latent.
            "another alibi than 'one-sided'": self.position != "alibi" or self.alibi != "one-sided",
        }
        missing = [what for what, is_given in needed.items() if not is_given]
        fits = not (self.latents and missing)
        check_value("latents", self.latents, fits, f"0; others need {'; '.join(missing)}")

    def check_pooling(self, pooling: str) -> None:
        """Check that a causal model does not pool its first token, which sees no other.

        Raises:
            ValueError: the model is causal and the pooling is "first".
        """
        expected = "'mean' for a causal model: its first token sees no other"
        check_value("pooling", pooling, pooling != "first" or not self.causal, expected)

    @property
    def shares_attention(self) -> bool:
        """Whether the layers of a group have one attention, with one norm."""
        return self.sharing in ("all", "attention")

    @property
    def shares_feed_forward(self) -> bool:
        """Whether the layers of a group have one feed-forward network, with one norm."""
        return self.sharing in ("all", "feed-forward")

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer's attention, in tokens; 0 where it sees the whole document."""
        every = self.global_every
        return tuple(self.local_window if n % every else 0 for n in range(self.num_layers))

    @property
    def token_size(self) -> int:
        """Size of the vectors of tokens, positions and segments, E."""
        return self.embedding_size or self.hidden_size

    @property
    def method(self) -> PositionMethod:
        """The entry of the position method."""
        return POSITION_METHODS[self.position]

    @property
    def has_trained_bias(self) -> bool:
        """Whether what the position method adds to scores is trained."""
        trained_slopes = self.position == "alibi" and self.alibi_slopes == "trained"
        return self.method.trained_bias or trained_slopes

    @property
    def least_weights(self) -> int:
        """A lower bound of the number of weights: most matrices, tables of tokens and positions."""
        hidden, groups, layers = self.hidden_size, self.layer_groups, self.num_layers
        attentions = groups if self.shares_attention else layers
        feed_forwards = groups if self.shares_feed_forward else layers
        count = attentions * 4 * hidden**2
        count += feed_forwards * (3 if self.gated else 2) * hidden * self.intermediate_size
        positions = self.longest_input + self.position_offset if self.longest_input else 0
        count += self.token_size * (self.vocab_size + self.segments + positions)
        count += hidden * self.latents
        return count + (hidden * self.vocab_size if self.head == "untied" else 0)

    @property
    def longest_input(self) -> int | None:
        """Tokens of the longest input that the model reads; None where there is no limit."""
        return self.max_positions if self.method.bounded else None

    @property
    def scale(self) -> float:
        """Factor on the token embeddings."""
        return math.sqrt(self.hidden_size) if self.embedding_scale == "sqrt-hidden" else 1.0

    @property
    def has_padding_row(self) -> bool:
        """Whether the row of `<pad>` is zero and gets no gradient from the input.

        EIFY/fairseq gives `<pad>` an ordinary row in CLAP and zero-mask models, because a zero row
        cannot be normalised.
        """
        return self.head == "roberta" and self.mask_embedding == "row"

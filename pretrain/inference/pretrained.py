"""The Python interface to a model folder: texts to ids, features, predictions and words.

Example:
    model = Pretrained.load("models/zero-clap")
    ids = model.encode("A premise.", "A hypothesis.")
    model.features(model.collate([ids, model.encode("Hello world!")]))
    model.fill_mask("The capital of China is <mask>.", top_k=3)
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data_prep.tokenizer import Tokenizer
from pretrain.convert.model_folder import LoadedModel, load_model
from pretrain.model.classification import Classifier
from pretrain.model.embeddings import PAD_ID

MASK = "<mask>"


@dataclasses.dataclass(frozen=True)
class Filler:
    """One candidate token for one mask."""

    text: str
    """The whole text as the model reads it, with this mask filled and the others left."""
    probability: float
    token: str
    """The token itself, including its leading space if it has one."""


class Pretrained:
    """A model in evaluation mode on one device, with its tokenizer and classification head.

    Token ids are integer tensors on any device: [T] for one text, or [B, T] padded at the end with
    `<pad>`, which is recognized by its id. Results are on the model's device and have no gradient.
    """

    def __init__(self, loaded: LoadedModel, device: str | torch.device) -> None:
        """Move the modules of a loaded folder to the device."""
        self.loaded, self._config = loaded, loaded.model.config
        self.device = torch.device(device)
        for module in filter(None, (loaded.model, loaded.classifier)):
            module.to(self.device).eval()

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> "Pretrained":
        """Load the model of a folder.

        Args:
            folder: a folder of transformers: RoBERTa, ALBERT, or a model of this project.
            device: such as "cuda". The default is the CPU, so that a script gives the same results
                on every machine.

        Raises:
            ValueError: not a model folder, or its parts do not fit together.
        """
        return cls(load_model(Path(folder)), device)

    def encode(self, text: str, *more: str) -> Tensor:
        """Return the ids [T] of one text, `<s> a </s>`, or of several, `<s> a </s> </s> b </s>`.

        A model with segments reads two texts as `<s> a </s> b </s>`. Everything is plain text, also
        "<mask>" and "</s>"; `fill_mask` reads masks.

        Raises:
            ValueError: the folder has no tokenizer, or more texts than the model has segments.
        """
        tokenizer = self.loaded.tokenizer
        texts = [ids.tolist() for ids in tokenizer.encode_batch([text, *more])]
        segments = self._config.segments
        if segments and len(texts) > max(segments, 2):
            raise ValueError(f"{len(texts)} texts; the model has segments for {segments}")
        return torch.tensor(tokenizer.lay_out(texts, separators=1 if segments else 2))

    def decode(self, ids: Tensor) -> str | tuple[str, ...]:
        """Return the text of ids [T], or a tuple of the texts that `encode` joined.

        The outer `<s>` and `</s>` and all padding are removed; other special tokens are shown.

        Raises:
            ValueError: not the ids of one row, or the folder has no tokenizer.
        """
        tokenizer = self.loaded.tokenizer
        batch = self._checked(ids)
        if len(batch) > 1:
            raise ValueError(f"ids of shape {list(ids.shape)}; decode takes one row")
        rest = [id for id in batch[0].tolist() if id != PAD_ID]
        start, end = int(rest[0] == tokenizer.bos_id), len(rest) - (rest[-1] == tokenizer.eos_id)
        separator = [tokenizer.eos_id] * (1 if self._config.segments else 2)
        texts = [tokenizer.decode(text) for text in _split(rest[start:end], separator)]
        return tuple(texts) if len(texts) > 1 else texts[0]

    @staticmethod
    def collate(texts: Sequence[Tensor]) -> Tensor:
        """Return a batch [B, T] of the ids [T] of several texts, padded on the right with `<pad>`.

        Raises:
            ValueError: no text, or not tensors of ids.
        """
        if not len(texts):
            raise ValueError("an empty batch; collate takes one text or more")
        for ids in texts:
            if not isinstance(ids, Tensor) or ids.dim() != 1:
                raise ValueError(f"{ids!r}: collate takes tensors of ids [T]; encode() makes them")
        return pad_sequence(list(texts), batch_first=True, padding_value=PAD_ID)

    @overload
    def features(self, ids: Tensor, all_layers: Literal[False] = False) -> Tensor: ...

    @overload
    def features(self, ids: Tensor, all_layers: Literal[True]) -> list[Tensor]: ...

    def features(self, ids: Tensor, all_layers: bool = False) -> Tensor | list[Tensor]:
        """Return the encoder's features of ids [T] or [B, T].

        Args:
            ids: [T] is a batch of one. Features at `<pad>` have no meaning.
            all_layers: return the features of every layer.

        Returns:
            The last layer's output [B, T, D]; with `all_layers` a list of the first layer's input
            and every layer's output.

        Raises:
            ValueError: not a tensor of ids, an empty text, padding before other ids, an id that the
                model does not have, or a text longer than the learned positions; with latents, all
                layers.
        """
        encoder, (batch, document_ids, segments) = self.loaded.model.encoder, self._inputs(ids)
        with torch.no_grad():
            if all_layers:
                return encoder.hidden_states(batch, document_ids, segments)
            return encoder(batch, document_ids, segment_ids=segments)

    def predict(self, ids: Tensor) -> Tensor:
        """Return the predictions of the classification head, `loaded.classifier`.

        Args:
            ids: [T] or [B, T].

        Returns:
            [B, C] log-probabilities of the classes, or [B, 1] values of a regression head.

        Raises:
            ValueError: the folder has no classification head, or `features` would refuse the ids.
        """
        head = self.loaded.classifier
        if head is None:
            raise ValueError(f"{self.loaded.folder}: has no classification head")
        classifier = Classifier(self.loaded.model.encoder, head)
        with torch.no_grad():
            logits: Tensor = classifier(*self._inputs(ids))
        # log_softmax of a single logit is always 0.
        return logits if head.config.classes == 1 else logits.log_softmax(dim=-1)

    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Filler]]:
        """Return the fillers of each mask, most likely first.

        One space before `<mask>` belongs to the filler, as in the vocabulary's own tokens
        (" Beijing"): the model reads "China is<mask>.", and a filler without a space joins the word
        before it. The ids of a sentence with a mask are those of EIFY/fairseq, except that fairseq
        also drops other white space before a mask and at the end of the text, which is kept here.
        With a unigram vocabulary the text after a mask begins a new word, as it does in
        transformers.

        Args:
            text: contains `<mask>` at least once; everything else is plain text.
            top_k: number of fillers per mask.

        Raises:
            ValueError: the folder has no tokenizer or no head over the vocabulary, the model is
                causal, there is no mask in the text, or top_k is not between 1 and the vocabulary
                size.
        """
        model, tokenizer = self.loaded.language_model, self.loaded.tokenizer
        if model.config.causal:
            raise ValueError("the model is causal: it does not see what follows a mask")
        pieces = text.split(MASK)
        if len(pieces) < 2:
            raise ValueError(f"{text!r} has no {MASK}; write one in place of a word")
        if not 1 <= top_k <= model.config.vocab_size:
            raise ValueError(f"top_k {top_k}: accepted: 1 to {model.config.vocab_size}")
        read = [piece.removesuffix(" ") for piece in pieces[:-1]] + pieces[-1:]
        first, *others = (ids.tolist() for ids in tokenizer.encode_batch(read))
        ids, positions = [tokenizer.bos_id, *first], []
        for other in others:
            positions.append(len(ids))
            ids += [tokenizer.mask_id, *other]
        ids.append(tokenizer.eos_id)
        places = torch.tensor(positions, device=self.device)
        with torch.no_grad():
            logits = model(torch.tensor([ids], device=self.device), None, places)
        top = logits.float().softmax(dim=-1).topk(top_k)
        result = []
        candidates = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        for mask, (tokens, probabilities) in enumerate(candidates):
            before = MASK.join([*pieces[:mask], read[mask]])
            after = MASK.join(pieces[mask + 1 :])
            fillers = []
            for id, probability in zip(tokens, probabilities, strict=True):
                token = tokenizer.token_text(id)
                fillers.append(Filler(before + token + after, probability, token))
            result.append(fillers)
        return result

    def _inputs(self, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the ids as [B, T], with those of documents and of segments."""
        batch, segment_ids = self._checked(ids), None
        if segments := self._config.segments:
            found = Tokenizer.segment_ids(batch.cpu().numpy(), segments)
            segment_ids = torch.from_numpy(found).to(batch.device)
        mask = batch != PAD_ID
        return batch, None if bool(mask.all()) else mask, segment_ids

    def _checked(self, ids: Tensor) -> Tensor:
        """Return valid ids as [B, T] on the model's device."""
        if not isinstance(ids, Tensor):
            raise ValueError(f"{ids!r} is not a tensor of ids; encode() makes one from a text")
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() not in (1, 2):
            raise ValueError(
                f"a {ids.dtype} tensor of shape {list(ids.shape)}; ids are integers [T] or [B, T]"
            )
        batch = ids if ids.dim() == 2 else ids[None]
        if not batch.numel() or bool((batch == PAD_ID).all(dim=1).any()):
            raise ValueError(f"ids of shape {list(ids.shape)}: an empty text, or padding only")
        early = (batch[:, :-1] == PAD_ID) & (batch[:, 1:] != PAD_ID)
        if bool(early.any()):
            row, place = early.nonzero()[0].tolist()
            raise ValueError(
                f"row {row}: <pad> at place {place} stands before other ids; accepted: at the end"
            )
        config, vocabulary = self._config, self.loaded.contents.vocabulary
        # Where the mask has no row in the table, only a tokenizer knows its id.
        known = vocabulary.vocab_size if vocabulary else math.inf
        limit = config.vocab_size if config.mask_embedding == "row" else known
        smallest, largest = int(batch.min()), int(batch.max())
        if smallest < 0 or largest >= limit:
            wrong = smallest if smallest < 0 else largest
            raise ValueError(f"id {wrong}: the model has ids from 0 to below {limit}")
        return batch.to(self.device)


def _split(ids: list[int], separator: list[int]) -> list[list[int]]:
    """Split ids at a separator of one or more ids."""
    texts: list[list[int]] = [[]]
    for id in ids:
        texts[-1].append(id)
        if texts[-1][-len(separator) :] == separator:
            del texts[-1][-len(separator) :]
            texts.append([])
    return texts

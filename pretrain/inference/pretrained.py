"""The small Python interface on a model folder: texts to ids, features, fillers, predictions.

In five lines:

    model = Pretrained.load("models/zero-clap")
    ids = model.encode("A premise.", "A hypothesis.")
    model.features(ids)
    model.predict("entailment", model.collate([ids, model.encode("Hello world!")]))
    model.fill_mask("The capital of China is <mask>.", top_k=3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pretrain.inference import model_folder
from pretrain.inference.fill_mask import Filler, fill_mask
from pretrain.model.classifier import Classifier
from pretrain.model.embeddings import PAD_ID


class Pretrained:
    """A model in evaluation mode, on one device, with its vocabulary and classification heads.

    Ids are whole-number tensors, [T] for one text or [B, T] with `<pad>` where a text is short, on
    any device; what is padded is seen from the ids. Results lie on the model's device and carry no
    gradient.
    """

    def __init__(self, loaded: model_folder.LoadedModel, device: str | torch.device) -> None:
        """Take a loaded folder's modules over, and move them to the device."""
        self.loaded = loaded
        self.device = torch.device(device)
        for module in (loaded.model, *loaded.classification_heads.values()):
            module.to(self.device).eval()

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> Pretrained:
        """The model of a folder.

        Args:
            folder: made by `python -m pretrain export` or `convert`.
            device: such as "cuda". The CPU unless asked, so that a script gives the same figures
                wherever it runs.

        Raises:
            ValueError: no model folder, or its parts do not fit together.
        """
        return cls(model_folder.load(Path(folder)), device)

    def encode(self, text: str, *more: str) -> Tensor:
        """Ids [T] of a text, `<s> a </s>`, or of several, `<s> a </s> </s> b </s>`.

        All is plain text, "<mask>" and "</s>" too; `fill_mask` reads masks.

        Raises:
            ValueError: the folder has no vocabulary.
        """
        tokenizer = self.loaded.tokenizer
        texts = tokenizer.encode_batch([text, *more])
        return torch.tensor(tokenizer.lay_out([ids.tolist() for ids in texts]))

    def decode(self, ids: Tensor) -> str | tuple[str, ...]:
        """The text of ids [T]; a tuple of the texts where `</s> </s>` parts several.

        The outer `<s>` and `</s>` and all padding are left out, other special tokens are shown.

        Raises:
            ValueError: not ids of one text, or the folder has no vocabulary.
        """
        tokenizer = self.loaded.tokenizer
        batch = self._checked(ids)
        if len(batch) > 1:
            raise ValueError(f"ids of shape {list(ids.shape)}; decode takes one text")
        rest = [id for id in batch[0].tolist() if id != PAD_ID]
        start = 1 if rest[0] == tokenizer.bos_id else 0
        end = len(rest) - (rest[-1] == tokenizer.eos_id)
        texts = [tokenizer.decode(text) for text in _split(rest[start:end], tokenizer.eos_id)]
        return tuple(texts) if len(texts) > 1 else texts[0]

    @staticmethod
    def collate(texts: Sequence[Tensor]) -> Tensor:
        """Ids [T] of several texts as one batch [B, T], padded on the right with `<pad>`.

        Raises:
            ValueError: no text, or what is no ids of one.
        """
        if not len(texts):
            raise ValueError("a batch of no text; collate takes one or more")
        for ids in texts:
            if not isinstance(ids, Tensor) or ids.dim() != 1:
                raise ValueError(f"{ids!r}: collate takes tensors of ids [T]; encode() makes them")
        return pad_sequence(list(texts), batch_first=True, padding_value=PAD_ID)

    @overload
    def features(self, ids: Tensor, all_layers: Literal[False] = False) -> Tensor: ...

    @overload
    def features(self, ids: Tensor, all_layers: Literal[True]) -> list[Tensor]: ...

    def features(self, ids: Tensor, all_layers: bool = False) -> Tensor | list[Tensor]:
        """What the encoder makes of ids [T] or [B, T]; [T] is a batch of one.

        Args:
            ids: where they are `<pad>`, the features mean nothing.
            all_layers: give every layer's.

        Returns:
            The last layer's, [B, T, D]; or what enters the first and what leaves each, N + 1 such.

        Raises:
            ValueError: what is given is no such tensor, empty, or holds ids that the model lacks;
                or a text is longer than learned positions reach.
        """
        batch = self._checked(ids)
        encoder = self.loaded.model.encoder
        with torch.no_grad():
            if all_layers:
                return encoder.hidden_states(batch, _attention_mask(batch))
            features: Tensor = encoder(batch, _attention_mask(batch))
        return features

    def predict(self, head: str, ids: Tensor, return_logits: bool = False) -> Tensor:
        """What a classification head says of each text.

        Args:
            head: its name; `loaded.classification_heads` has them, with their labels.
            ids: [T] or [B, T].
            return_logits: rather than log-probabilities.

        Returns:
            [B, C] log-probabilities of the classes; of a regression head, its value, [B, 1].

        Raises:
            ValueError: the folder has no such head, or the ids are not what `features` takes.
        """
        heads = self.loaded.classification_heads
        if head not in heads:
            raise ValueError(
                f"no classification head {head!r}; known: {', '.join(heads) or 'none'}"
            )
        batch = self._checked(ids)
        with torch.no_grad():
            classifier = Classifier(self.loaded.model.encoder, heads[head])
            logits: Tensor = classifier(batch, _attention_mask(batch))
        # The logarithm of one class's probability is 0 whatever the value.
        is_regression = heads[head].config.classes == 1
        return logits if return_logits or is_regression else logits.log_softmax(dim=-1)

    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Filler]]:
        """The likeliest fillers of each `<mask>`, as `fill_mask` gives them."""
        return fill_mask(self.loaded.model, self.loaded.tokenizer, text, top_k)

    def _checked(self, ids: Tensor) -> Tensor:
        """[B, T] on the model's device."""
        if not isinstance(ids, Tensor):
            raise ValueError(f"{ids!r} is no tensor of ids; encode() makes one of a text")
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() not in (1, 2):
            raise ValueError(
                f"a {ids.dtype} tensor of shape {list(ids.shape)}; ids are whole numbers [T] or "
                "[B, T]"
            )
        batch = ids if ids.dim() == 2 else ids[None]
        if not batch.numel() or bool((batch == PAD_ID).all(dim=1).any()):
            raise ValueError(f"ids of shape {list(ids.shape)}: a text of no id, or padding alone")
        smallest, largest, limit = int(batch.min()), int(batch.max()), self._id_limit()
        if smallest < 0 or largest >= limit:
            wrong = smallest if smallest < 0 else largest
            raise ValueError(f"id {wrong}: the model's are from 0 to below {limit}")
        return batch.to(self.device)

    def _id_limit(self) -> float:
        config, vocabulary = self.loaded.model.config, self.loaded.vocabulary
        if config.mask_embedding == "row":
            return config.vocab_size
        # The mask has no row, and where nobody knows its id, any from there on is a mask.
        return vocabulary.vocab_size if vocabulary else math.inf


def _split(ids: list[int], separator: int) -> list[list[int]]:
    """The texts between doubled separators."""
    texts: list[list[int]] = [[]]
    place = 0
    while place < len(ids):
        if ids[place : place + 2] == [separator] * 2:
            texts.append([])
            place += 2
        else:
            texts[-1].append(ids[place])
            place += 1
    return texts


def _attention_mask(batch: Tensor) -> Tensor | None:
    """[B, T] bool, True for real tokens; None where nothing is padded."""
    mask = batch != PAD_ID
    return None if bool(mask.all()) else mask

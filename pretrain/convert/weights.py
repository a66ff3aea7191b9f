"""Read, rename and check weights of other formats."""

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from data_prep.common.wording import few
from pretrain.convert.contents import CLASSIFIER
from pretrain.model.classification import ClassificationConfig, ClassificationHead
from pretrain.model.config import ModelConfig
from pretrain.model.language_model import LanguageModel

Names = Mapping[str, tuple[str, ...]]
"""For each of our weights, its name in the other form; several are concatenated row-wise."""

_LAYER = re.compile(r"^encoder\.layers\.(\d+)")


def renamed(weights: Iterable[str], modules: Mapping[str, str], group_size: int = 1) -> Names:
    """Return the other form's names of our weights.

    Args:
        weights: names of our weights.
        modules: the other form's name of each of our modules; `{}` stands for the number of a
            layer. Of several modules that are one of ours, the last parts of their names are
            separated by `|`.
        group_size: layers that share all weights, and have one number in the other form.

    Raises:
        ValueError: a weight belongs to a module that is not listed.
    """
    result = {}
    for name in weights:
        module, _, kind = name.rpartition(".")
        layer = _LAYER.match(module)
        theirs = modules.get(_LAYER.sub("encoder.layers.{}", module))
        if theirs is None:
            raise ValueError(f"the other format has no weight that corresponds to {name}")
        number = str(int(layer[1]) // group_size) if layer else ""
        *path, last = theirs.replace("{}", number).split(".")
        result[name] = tuple(".".join([*path, part, kind]) for part in last.split("|"))
    return result


def separated(weights: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """Return copies of our weights under the other form's names."""
    result: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        parts = weights[ours].detach().chunk(len(theirs))
        # Copies, because safetensors refuses tensors that share memory.
        result |= {name: part.clone() for name, part in zip(theirs, parts, strict=True)}
    return result


def joined(
    weights: Mapping[str, Tensor], names: Names, empty: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return our weights, in fp32, from those of the other form.

    Args:
        weights: by the other form's names; all must be used.
        names: of the weights that are wanted.
        empty: our weights as `empty_weights` returns them.

    Raises:
        ValueError: weights are missing, left over, of the wrong shape or type, or not finite; a
            few are named.
    """
    parts = {
        name: part
        for ours, theirs in names.items()
        for name, part in zip(theirs, empty[ours].chunk(len(theirs)), strict=True)
    }
    faults: dict[str, list[str]] = {}
    for name, part in parts.items():
        weight = weights.get(name)
        if weight is None:
            faults.setdefault("missing", []).append(name)
        elif weight.shape != part.shape:
            shapes = f"{name} {list(weight.shape)} instead of {list(part.shape)}"
            faults.setdefault("wrong shape", []).append(shapes)
        elif not weight.is_floating_point():
            faults.setdefault("not floating point", []).append(f"{name} {weight.dtype}")
        elif not weight.float().isfinite().all():  # eight bits have no isfinite
            faults.setdefault("not finite", []).append(name)
    if left_over := sorted(weights.keys() - parts.keys()):
        faults["left over"] = left_over
    if found := [f"{fault}: {few(wrong, 3)}" for fault, wrong in faults.items()]:
        raise ValueError(f"the weights do not fit the settings; {'; '.join(found)}")
    # cat copies, so that no two weights share memory
    return {
        ours: torch.cat([weights[name].detach().float() for name in theirs])
        for ours, theirs in names.items()
    }


def drop_copies(weights: dict[str, Tensor], copies: Mapping[str, str]) -> None:
    """Remove second copies of tied weights, of which each is given with its source.

    Where the file has the copy alone, it becomes the source.

    Raises:
        ValueError: a copy differs, so that the model has an output embedding of its own.
    """
    for copy, source in copies.items():
        weight = weights.pop(copy, None)
        if weight is not None and not torch.equal(
            weight.float(), weights.setdefault(source, weight).float()
        ):
            raise ValueError(
                f"{copy} differs from {source}, but the head must be tied to the embedding"
            )


def empty_weights(
    config: ModelConfig, classifier: ClassificationConfig | None
) -> dict[str, Tensor]:
    """Return all weights of a model on the meta device, without content."""
    with torch.device("meta"):
        result: dict[str, Tensor] = dict(LanguageModel(config).state_dict())
        if classifier is not None:
            head = ClassificationHead(config.hidden_size, classifier)
            result |= head.state_dict(prefix=CLASSIFIER)
    return result


def load_pickled(path: Path, classes: Sequence[type] = ()) -> object:
    """Read a file of `torch.save` without executing any of its content.

    Args:
        path: the file.
        classes: accepted besides tensors and plain values.

    Raises:
        ValueError: the file is missing or damaged, or asks for another class or function.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        _check_archive(path)
        with torch.serialization.safe_globals([*classes]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # damaged bytes make torch and pickle raise almost anything
        reason = "is not a file of torch.save, or is cut short or damaged"
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            accepted = ", ".join(["tensors", "plain values", *(one.__name__ for one in classes)])
            reason = (
                f"was not read, because it asks for {refused[1]}, which could run code; it may "
                f"hold {accepted}"
            )
        raise ValueError(f"{path}: {reason}") from None


def weights_in(content: object, what: str) -> dict[str, Tensor]:
    """Return a mapping of names to weights that a file held.

    Args:
        content: what `load_pickled` returned, or a part of it.
        what: what messages call it.

    Raises:
        ValueError: it is not such a mapping.
    """
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(weight, Tensor) for name, weight in content.items()
    ):
        raise ValueError(f"{what} is not a mapping of names to weights")
    return content


def _check_archive(path: Path) -> None:
    """Raise BadZipFile for a damaged archive: torch would read a flipped bit as a weight.

    An archive with entries larger than the file is rejected, too. Files of torch before 1.6 are not
    zip archives and have no checksums.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise zipfile.BadZipFile("its entries are larger than the file")
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(damaged)

"""The files of weights in Hugging Face folders. Nothing in them is executed."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pretrain.convert.weights import load_pickled, weights_in
from pretrain.models.model_folder import read_json

_INDEX = "model.safetensors.index.json"


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the file to name in errors, and every weight in it.

    Raises:
        ValueError: there is no such file, or one is damaged.
    """
    files = weight_files(folder)
    weights: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".bin":
            weights |= weights_in(load_pickled(file), f"{file}: its content")
            continue
        try:
            weights |= load_file(str(file))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: is cut short or damaged: {error}") from None
    return (files[0] if len(files) == 1 else folder / _INDEX), weights


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights.

    Raises:
        ValueError: there are none, or the index names files elsewhere.
    """
    for name in ("model.safetensors", _INDEX, "pytorch_model.bin"):
        if (file := folder / name).is_file():
            break
    else:
        raise ValueError(f"{folder}: has no model.safetensors, {_INDEX} or pytorch_model.bin")
    if name != _INDEX:
        return [file]
    names = read_json(file).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(x, str) for x in names.values()):
        raise ValueError(f"{file}: weight_map is not a mapping of weights to files")
    if wrong := [name for name in names.values() if Path(name).name != name]:
        raise ValueError(f"{file}: {wrong[0]!r} is not a file of this folder")
    return [folder / name for name in sorted(set(names.values()))]

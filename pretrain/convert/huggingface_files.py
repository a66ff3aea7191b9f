"""Files of Hugging Face folders: settings and weights. Nothing in them is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pretrain.convert.weights import load_pickled, weights_in

_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        ValueError: the file is missing or damaged, or holds no mapping.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a Hugging Face folder has one")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: is not a mapping but {type(values).__name__}")
    return values


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the file to name in errors, and every weight in it.

    Raises:
        ValueError: there is no such file, or one is damaged.
    """
    readers = {
        "model.safetensors": _read_safetensors,
        _INDEX: _read_parts,
        "pytorch_model.bin": _read_pickled,
    }
    for name, reader in readers.items():
        if (folder / name).is_file():
            return folder / name, reader(folder / name)
    raise ValueError(f"{folder}: has none of {', '.join(readers)}")


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder whose weights `read_weights` has read."""
    names = ("model.safetensors", _INDEX, "pytorch_model.bin")
    file = next(folder / name for name in names if (folder / name).is_file())
    if file.name != _INDEX:
        return [file]
    return [folder / name for name in sorted(set(read_json(file)["weight_map"].values()))]


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: is cut short or damaged: {error}") from None


def _read_parts(index: Path) -> dict[str, Tensor]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(x, str) for x in files.values()):
        raise ValueError(f"{index}: weight_map is not a mapping of weights to files")
    result: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: {name!r} is not a file of this folder")
        result |= _read_safetensors(index.parent / name)
    if different := sorted(result.keys() ^ files.keys()):
        raise ValueError(f"{index}: its files do not hold what it lists, such as {different[0]}")
    return result


def _read_pickled(path: Path) -> dict[str, Tensor]:
    return weights_in(load_pickled(path), f"{path}: its content")

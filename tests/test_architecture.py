"""Import directions, read from the source and tried in fresh processes."""

import ast
import functools
import graphlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.running import ROOT, python

PACKAGES = ("data_prep", "pretrain", "finetune")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Absolute names of every module that a file imports, wherever in the file."""
    package = path.relative_to(ROOT).parent.parts
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            found.add(source)
            # `from package import module` imports the module as well
            found.update(f"{source}.{alias.name}" for alias in node.names)
    return found


def files_of(package: str) -> list[Path]:
    return [path for path in FILES if f"{module_of(path)}.".startswith(f"{package}.")]


def tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


ROOMS: dict[str, tuple[str, str]] = {
    "loop": ("", "the loop and its protocols serve every objective, and fine-tuning"),
    "model": ("", "tensors only: exports carry these files with them"),
    "processes": ("", "starts and ends groups of processes; knows no run"),
    "objectives": ("loop", "what is hidden and the loss; a recipe's settings build them"),
    "config": ("model objectives", "a recipe as typed records; nothing runs"),
    "data": ("config loop objectives", "batches depend only on corpus, order and objective"),
    "engine": ("config loop model processes", "DeepSpeed trains any model on any batches"),
    "records": ("config data loop", "a run's folder, with or without a supervisor"),
    "spikes": ("config loop records", "judges and decides from a run's records"),
    "inference": (
        "config convert data engine loop model objectives",
        "models are evaluated on corpora, and asked for words and features",
    ),
    "checks": (
        "config data model objectives processes records spikes",
        "what is refused before a start: recipe, past of the run, size of the machine",
    ),
    "convert": (
        "config engine model objectives records",
        "model folders, from checkpoints and from other projects; the model that a run starts from",
    ),
    "plan": (
        "checks config convert data engine loop model objectives processes spikes",
        "what a run is, needs and how fast it is where it is launched; a bench of a recipe",
    ),
    "supervision": (
        "checks config convert model processes records spikes",
        "decides from the ledger; trains nothing",
    ),
    "train": (
        "checks config convert data engine inference loop model objectives records spikes",
        "puts the parts of a training attempt together",
    ),
}
"""Rooms of pretrain, with the other rooms that each may import, and why."""


def room_of(module: str) -> str:
    """The room of a module of pretrain, in ROOMS."""
    return module.split(".")[1]


MODULES = {module_of(path) for path in files_of("pretrain") if path.name != "__init__.py"}


def test_there_is_something_to_look_at():
    assert {"data_prep.run", "pretrain.engine.engine", "pretrain.model.heads"} <= set(
        map(module_of, FILES)
    )
    assert imports_of(ROOT / "pretrain/model/heads.py") >= {"torch", "pretrain.model.config"}
    assert {room_of(module) for module in MODULES} == ROOMS.keys()


@pytest.mark.parametrize(
    ("package", "above"), [("data_prep", {"pretrain", "finetune"}), ("pretrain", {"finetune"})]
)
def test_a_package_imports_none_that_is_built_on_it(package, above):
    wrong = {module_of(path): tops(imports_of(path)) & above for path in files_of(package)}
    assert {name: what for name, what in wrong.items() if what} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_pretrain_imports_only_what_the_table_says(room):
    allowed, reason = ROOMS[room]
    wrong = {}
    for path in files_of("pretrain"):
        module = module_of(path)
        if module in MODULES and room_of(module) == room:
            found = {name for name in imports_of(path) & MODULES if room_of(name) != room}
            wrong[module] = {name for name in found if room_of(name) not in allowed.split()}
    assert {name: what for name, what in wrong.items() if what} == {}, reason


def test_the_model_imports_only_torch_and_the_standard_library_and_itself_relatively():
    allowed = {"torch", "pretrain", *sys.stdlib_module_names}
    paths = list((ROOT / "pretrain/model").rglob("*.py"))
    assert len(paths) > 10
    for path in paths:
        assert tops(imports_of(path)) <= allowed, path
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert not (node.module or "").startswith("pretrain"), path


def test_only_the_model_imports_relatively():
    for path in FILES:
        if ROOT / "pretrain/model" in path.parents:
            continue
        relative = [n for n in nodes_of(path) if isinstance(n, ast.ImportFrom) and n.level]
        assert not relative, path


def test_only_the_engine_imports_deepspeed():
    users = {module_of(path) for path in FILES if "deepspeed" in tops(imports_of(path))}
    assert users == {f"pretrain.engine.{n}" for n in ("engine", "consolidated", "workarounds")}


def test_only_the_indexed_format_imports_megatron():
    users = {module_of(path) for path in FILES if "megatron" in tops(imports_of(path))}
    assert users == {"data_prep.indexed"}


def test_no_module_imports_an_entry_point():
    entries = {module_of(path) for path in FILES if path.name == "__main__.py"}
    entries |= {"finetune.train", "finetune.zeroclap"}
    joins_them = ROOT / "finetune/zeroclap.py"
    wrong = {module_of(path): imports_of(path) & entries for path in FILES if path != joins_them}
    assert {name: what for name, what in wrong.items() if what} == {}


def test_packages_are_empty():
    for path in FILES:
        if path.name == "__init__.py" and path.parent != ROOT / "pretrain/model":
            assert path.read_text() == "", path
    tree = ast.parse((ROOT / "pretrain/model/__init__.py").read_text())
    assert [type(node) for node in tree.body] == [ast.Expr]


def imported_by(code: str) -> set[str]:
    """Top-level modules that a fresh process holds after running `code`."""
    script = (
        f"import sys\nsys.argv = ['x']\n{code}\n"
        "print('modules:', *sorted({n.split('.')[0] for n in sys.modules}))"
    )
    return set(python("-c", script).split("modules:")[1].split())


WITH_TORCH = {"convert", "engine", "inference", "model", "plan", "train"}
# All other rooms, and single modules of these, work without torch.
WITHOUT_TORCH = [
    *(module for module in sorted(MODULES) if room_of(module) not in WITH_TORCH),
    *(f"pretrain.model.{name}" for name in ("backends", "checks", "config", "presets")),
    "pretrain.train.client",
]


def test_rooms_that_decide_and_record_import_no_torch():
    loaded = imported_by("\n".join(f"import {name}" for name in WITHOUT_TORCH))
    assert {"pretrain", "numpy"} <= loaded
    assert not {"torch", "deepspeed", "megatron", "datasets"} & loaded


PREPARING = ["sample", "train-tokenizer", "prepare", "inspect", "verify"]


@pytest.mark.parametrize("commands", [[""], [*PREPARING, "birthplaces"]])
def test_help_imports_nothing_heavy(commands):
    """Neither do the commands of data_prep, which start in an instant, and those with their own."""
    code = (
        "from finetune.zeroclap import main\n"
        f"for command in {commands}:\n"
        "    try: main([*command.split(), '--help'])\n"
        "    except SystemExit as end: assert not end.code, end.code"
    )
    heavy = {"torch", "deepspeed", "megatron", "datasets", "tokenizers", "matplotlib"}
    heavy |= {"numpy"} if commands == [""] else set()
    assert not heavy & imported_by(code)


def test_json_is_written_by_one_function():
    """That function is strict; the other callers hash the JSON or decode it, and never write it."""
    hashed = {"data_prep.tokenizer", "data_prep.manifest", "data_prep.documents"}
    hashed |= {"data_prep.encoders", "finetune.examples", "data_prep.common.records"}
    callers = {
        module_of(path)
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in ("dump", "dumps")
        if isinstance(node.value, ast.Name) and "json" in node.value.id
    }
    assert callers == {"data_prep.common.files", *hashed}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_one_that_imports_it(package):
    """Imports for types alone count too."""
    names = {module_of(path): path for path in files_of(package) if path.name != "__init__.py"}
    graph = {name: (imports_of(path) & names.keys()) - {name} for name, path in names.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is a circle


def test_the_house_has_nine_floors_and_no_arrow_up():
    """Each package of raw text, fine-tuning and each room of pretrain is a room of the house."""

    def room(module: str) -> str:
        return module.split(".")[module.startswith("pretrain.")]

    names = {module_of(path) for path in FILES if path.name not in ("__init__.py", "__main__.py")}
    arrows: dict[str, set[str]] = {room(name): set() for name in names}
    for path in FILES:
        if module_of(path) in names:
            here = room(module_of(path))
            arrows[here] |= {room(name) for name in imports_of(path) & names} - {here}
    floors: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(arrows).static_order():
        floors[name] = 1 + max((floors[below] for below in arrows[name]), default=0)
    assert max(floors.values()) <= 9, floors


def test_what_is_imported_is_declared():
    """Else the package works only beside what the tests install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["ray"], *extras["wandb"]]
    names = {re.split("[<>=]", words)[0].replace("-", "_") for words in declared}
    names |= {"sklearn", "yaml", "megatron"}  # other names of what is declared
    # What datasets, matplotlib and pydantic require.
    names |= {"pyarrow", "cycler", "pydantic_core"}
    # It goes with a model, and is loaded from there.
    exported = ROOT / "pretrain" / "convert" / "modeling_zeroclap.py"
    imported = set().union(*(tops(imports_of(path)) for path in FILES if path != exported))
    assert imported - names - {*PACKAGES, "", *sys.stdlib_module_names} == set()

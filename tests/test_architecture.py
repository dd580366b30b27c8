"""Imports point down: the layers are those of the picture in CONTRIBUTING.md, and no two modules import each other.

Every import counts: at the top of a module, for types only, inside of functions, and modules that are named in strings.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "sparse_lightning"
DOORS = {PACKAGE, f"{PACKAGE}.moved"}
"""The modules that name all others on purpose: the public names, and the module paths of earlier versions."""

_NAME = re.compile(rf"{PACKAGE}(?:\.\w+)+")


def layers(page: str) -> list[list[str]]:
    """The rooms of each layer, the highest first: what stands before the arrow in the picture."""
    picture = page.partition("## Layers")[2].partition("```")[2].partition("```")[0]
    return [line.partition("←")[0].split() for line in picture.strip().splitlines()]


def modules(root: Path) -> dict[str, Path]:
    """All modules of the package by name."""
    files = [file for file in sorted((root / PACKAGE).rglob("*.py")) if not {"conf", "recipes"} & set(file.parts)]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of strings that are statements: they describe, and name nothing that is imported."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


@cache
def names_in(package: str, text: str) -> tuple[str, ...]:
    """Every dotted name in the text of a module of a package; copies of a module are read once."""
    return tuple(named(package, ast.parse(text)))


def named(package: str, tree: ast.Module) -> Iterator[str]:
    """Every dotted name that a module imports, or has as a string: a sentence that mentions one imports nothing."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from [node.value] if _NAME.fullmatch(node.value) else []


def imports(root: Path) -> dict[str, set[str]]:
    """For each module the modules of the package that it names."""
    known = modules(root)
    found: dict[str, set[str]] = {}
    for name, file in known.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        targets = {_module_in(dotted, known) for dotted in names_in(package, file.read_text("utf-8"))}
        found[name] = {target for target in targets if target is not None and target != name}
    return found


def _module_in(dotted: str, known: dict[str, Path]) -> str | None:
    """The longest part of a dotted name that is a module; the package itself only where nothing else is named."""
    parts = dotted.split(".")
    prefixes = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in known), None)


def room(module: str) -> str:
    """The folder, or the module at the root, that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def upward(root: Path, order: list[list[str]]) -> list[str]:
    """The imports that do not point down."""
    level = {name: i for i, names in enumerate(order) for name in names}
    level[room(f"{PACKAGE}.moved")] = -1
    wrong = []
    for name, targets in imports(root).items():
        if name not in DOORS:
            others = [target for target in sorted(targets) if target != PACKAGE and room(target) != room(name)]
            wrong += [f"{name} imports {target}" for target in others if level[room(target)] <= level[room(name)]]
    return wrong


def cycles(root: Path) -> list[str]:
    """Modules that import one another, along any path."""
    graph = {name: targets for name, targets in imports(root).items() if name not in DOORS}
    done: set[str] = set()
    found = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" → ".join([*path[path.index(name) :], name]))
        elif name not in done and name in graph:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


@pytest.fixture(scope="module")
def order():
    return layers((ROOT / "CONTRIBUTING.md").read_text("utf-8"))


def test_the_picture_shows_every_room_once(order):
    shown = [name for names in order for name in names]
    assert sorted(shown) == sorted({room(name) for name in modules(ROOT)} - {room(name) for name in DOORS})


def test_imports_point_down(order):
    assert upward(ROOT, order) == []


def test_no_modules_import_each_other():
    assert cycles(ROOT) == []


def test_a_dozen_modules_or_fewer_stand_at_the_root():
    assert 0 < len(list((ROOT / PACKAGE).glob("*.py"))) <= 12


def test_no_two_classes_share_a_name():
    names = Counter(
        node.name
        for file in modules(ROOT).values()
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert {"Sparsifier", "View"} <= set(names)
    assert [name for name, count in names.items() if count > 1] == []


PLANTED = {
    "at the top": "from sparse_lightning.engine.engine import Engine\n",
    "of a whole package": "import sparse_lightning.engine\n",
    "for types only": "if TYPE_CHECKING:\n    from sparse_lightning.engine import masks\n",
    "inside of a function": "def late():\n    from sparse_lightning.engine.sparsifier import Sparsifier\n",
    "in a string": "from importlib import import_module\nengine = import_module('sparse_lightning.engine.engine')\n",
    "relative": "from ..engine import engine\n",
}


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "conf", "recipes"))
    return tmp_path


@pytest.mark.parametrize("kind", PLANTED)
def test_an_upward_import_is_found(kind, copy, order):
    file = copy / PACKAGE / "blocks" / "view.py"
    file.write_text(file.read_text("utf-8") + PLANTED[kind], "utf-8")
    found = upward(copy, order)
    assert len(found) == 1
    assert found[0].startswith("sparse_lightning.blocks.view imports sparse_lightning.engine")


def test_a_module_beside_another_of_its_layer_may_not_import_it(copy, order):
    file = copy / PACKAGE / "budgets.py"
    file.write_text(file.read_text("utf-8") + "from sparse_lightning.methods import Gradual\n", "utf-8")
    assert upward(copy, order) == ["sparse_lightning.budgets imports sparse_lightning.methods"]


def test_a_cycle_is_found(copy):
    for one, other in (("one", "two"), ("two", "one")):
        text = f"def late():\n    from sparse_lightning.flow.{other} import late\n"
        (copy / PACKAGE / "flow" / f"{one}.py").write_text(text, "utf-8")
    assert cycles(copy) == ["sparse_lightning.flow.one → sparse_lightning.flow.two → sparse_lightning.flow.one"]

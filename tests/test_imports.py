"""Imports point one way (pipeline → model → kernels), and stay light where users wait for them."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pipeline

CHECKOUT = Path(__file__).parents[1]
INSTALLED = Path(pipeline.__file__).parents[1]
PACKAGES = ("kernels", "model", "pipeline")
HEAVY = ("apache_beam", "flax", "jax", "numpy", "pyarrow", "rich", "tensorflow", "tensorflow_text")
DEVICE = ("flax", "jax", "tensorflow", "tensorflow_text")


def modules(package: str) -> dict[str, Path]:
    """Every module of a package that is under test, and its file."""
    found = {}
    for path in sorted((INSTALLED / package).rglob("*.py")):
        parts = path.relative_to(INSTALLED).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_by(*names: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after importing these."""
    program = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    command = [sys.executable, "-P", "-c", program, *names]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", ["pipeline", "pipeline.cli", "pipeline.config"])
def test_what_the_command_line_needs_imports_nothing_slow(name):
    assert imported_by(name) & set(HEAVY) == set()


def test_no_module_of_the_pipeline_imports_jax_or_tensorflow():
    names = [name for name in modules("pipeline") if not name.endswith("__main__")]
    assert len(names) > 10
    assert imported_by(*names) & set(DEVICE) == set()


def test_the_models_configuration_imports_no_jax():
    assert imported_by("model.config") & set(DEVICE) == set()


@pytest.mark.parametrize("wrong", ["--model", "--input"])
def test_a_wrong_model_or_input_is_found_before_jax_is_imported(wrong, tiny_checkpoint, tmp_path):
    program = "import sys; from pipeline.cli import main; print(main(), 'jax' in sys.modules)"
    (tmp_path / "a.txt").write_text("text")
    flags = {"--model": tiny_checkpoint, "--input": tmp_path, "--output": tmp_path / "out"}
    flags[wrong] = tmp_path / "missing"
    command = [sys.executable, "-P", "-c", program, "run"]
    command += [str(part) for flag in flags.items() for part in flag]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.splitlines()[-1] == "2 False", result.stderr


@pytest.mark.parametrize(
    ("package", "forbidden"), [("kernels", {"model", "pipeline"}), ("model", {"pipeline"})]
)
def test_imports_point_one_way_also_inside_functions(package, forbidden):
    wrong = []
    for name, path in modules(package).items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            wrong += [f"{name}: {n}" for n in names if n.partition(".")[0] in forbidden]
    assert wrong == []


def imports_of(paths: Iterable[Path]) -> set[str]:
    """The top-level modules that these files import, also inside functions."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    return found


def declared(*extras: str) -> set[str]:
    """The distributions that pyproject.toml asks for by name."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return {Requirement(text).name for text in wanted}


def undeclared(modules: set[str], allowed: set[str]) -> set[str]:
    """Those that are not the standard library's and come from no allowed distribution."""
    distributions = importlib.metadata.packages_distributions()
    foreign = modules - sys.stdlib_module_names - set(PACKAGES)
    return {
        name
        for name in foreign
        if not allowed
        & {distribution.lower().replace("_", "-") for distribution in distributions.get(name, ())}
    }


def test_every_library_that_is_imported_is_declared():
    paths = [path for package in PACKAGES for path in modules(package).values()]
    assert undeclared(imports_of(paths), declared()) == set()


def test_every_library_that_the_tests_import_is_declared():
    # Generators of committed data, and what we are compared with, run in environments of their own.
    elsewhere = ("make_", "wordpiece_data", "peers")
    paths = (CHECKOUT / "tests").rglob("*.py")
    paths = [path for path in paths if not path.stem.startswith(elsewhere)]
    own = {path.stem for path in paths}
    assert undeclared(imports_of(paths) - own, declared("test")) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_packages_themselves_are_empty(package):
    # A foreign package of the same name is told by its __init__.py (pipeline/packages.py).
    assert (INSTALLED / package / "__init__.py").read_bytes() == b""


def test_an_installed_lengthwise_is_the_one_under_test():
    try:
        distribution = importlib.metadata.distribution("lengthwise")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed: this is the checkout, on purpose (PYTHONPATH)")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("an editable install is the checkout, on purpose")
    assert Path(str(distribution.locate_file("pipeline"))).resolve() == INSTALLED / "pipeline"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_file_of_the_packages(package):
    def files(home: Path) -> dict[str, bytes]:
        every = (p for p in (home / package).rglob("*") if p.is_file())
        return {str(p.relative_to(home)): p.read_bytes() for p in every if p.suffix != ".pyc"}

    assert files(INSTALLED) == files(CHECKOUT)


def test_the_top_level_of_the_repository_is_the_agreed_one():
    result = subprocess.run(
        ["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    if result.returncode == 0 and result.stdout:
        names = {line.partition("/")[0] for line in result.stdout.split("\0") if line}
    else:  # a copy without its history; README's commands add these
        names = {path.name for path in CHECKOUT.iterdir()} - {"embeddings"}
    shown = {name for name in names if not name.startswith(".")}
    assert shown == {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "constraints-py311.txt",
        "constraints-py312.txt",
        "kernels",
        "model",
        "pipeline",
        "pyproject.toml",
        "templates",
        "tests",
    }

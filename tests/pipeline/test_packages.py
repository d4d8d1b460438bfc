"""Our packages have common names: a foreign one in their place is found before it is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

HOME = Path(pipeline.__file__).parent.parent
NEEDED = ["run", "--input", "docs", "--output", "out", "--model", "folder"]


def lengthwise(*first_on_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command line with these folders, then ours, first on the module path."""
    path = os.pathsep.join(map(str, (*first_on_path, HOME)))
    program = "import sys; from pipeline.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *NEEDED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", ["model", "kernels"])
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
def test_a_foreign_module_that_comes_first_is_refused_and_not_run(tmp_path, name, file):
    foreign = tmp_path / file.format(name)
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("raise SystemExit('the foreign module was run')")
    result = lengthwise(tmp_path)
    assert result.returncode == 2
    assert f"lengthwise: the package `{name}`" in result.stderr
    assert str(foreign) in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_package_installed_over_ours_is_refused(tmp_path):
    for name in ("pipeline", "model", "kernels"):
        shutil.copytree(HOME / name, tmp_path / name)
    (tmp_path / "kernels/__init__.py").write_text("def get_kernel(): ...")
    result = lengthwise(tmp_path)
    assert result.returncode == 2
    assert "`kernels` of Lengthwise has been overwritten" in result.stderr
    assert str(tmp_path) in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_package_is_refused(tmp_path):
    shutil.copytree(HOME / "pipeline", tmp_path / "pipeline")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pipeline.packages import check_packages; check_packages()"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(tmp_path)],  # no site-packages
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "`kernels` of Lengthwise" in result.stderr
    assert "(nowhere)" in result.stderr

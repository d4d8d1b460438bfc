"""Whether `model` and `kernels` are ours: their names are common, and Python takes the first it finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from pipeline.config import SettingsError

NAMES = ("kernels", "model", "pipeline")


def check_packages() -> None:
    """Refuses to go on where one of our packages has been shadowed or overwritten by another of its name.

    Ours lie side by side and have an empty `__init__.py`. Nothing is imported.

    Raises:
      SettingsError: says what was found, where, and how to get rid of it.
    """
    home = Path(__file__).resolve().parent.parent
    for name in NAMES:
        ours = home / name / "__init__.py"
        found = _origin(name)
        if found != ours:
            where = "nowhere" if found is None else f"at {found}"
            raise SettingsError(
                f"the package `{name}` of Lengthwise, {ours}, is not the one Python finds ({where}): rename the "
                f"other one, or take its folder off the module path (PYTHONPATH, the working folder)"
            )
        if ours.stat().st_size > 0:
            raise SettingsError(
                f"the package `{name}` of Lengthwise has been overwritten by another one, in {ours.parent}"
                f"{_also(name)}: uninstall that, then reinstall lengthwise, "
                "best in an environment of its own"
            )


def _origin(name: str) -> Path | None:
    """The file that `import name` would run, or did; None where there is none."""
    module = sys.modules.get(name)
    if module is not None:  # find_spec raises for one that was made by hand
        file = getattr(module, "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        file = spec.origin if spec is not None else None
    return Path(file).resolve() if file is not None else None


def _also(name: str) -> str:
    from importlib import metadata  # slow, and only wanted for the message

    others = set(metadata.packages_distributions().get(name, ())) - {"lengthwise"}
    return f" (installed by {', '.join(sorted(others))})" if others else ""

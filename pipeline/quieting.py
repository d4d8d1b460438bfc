"""Keeps libraries from talking on the command line. Nothing here happens when the library is imported."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
import warnings


def quiet() -> None:
    """Silences what libraries tell themselves; for the command line only, before they are imported.

    What the user asked Python to show (`-W`, PYTHONWARNINGS) and what the user set stays.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow and XLA: errors only
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    for name in ("absl", "apache_beam", "google", "jax", "tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)


def import_quietly(name: str) -> None:
    """Imports a module whose native code writes to standard error before its log level is read (TensorFlow).

    What it wrote is shown if the import fails.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            importlib.import_module(name)
        except BaseException:
            written.seek(0)
            os.write(terminal, written.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)

"""A report as one HTML page that needs nothing else: no network, no script, any screen, light or dark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


def render(report: Mapping[str, Any]) -> str:
    """The page for the contents of a report.json."""
    return f"<!doctype html><title>{escape(report['run_id'])}</title>"

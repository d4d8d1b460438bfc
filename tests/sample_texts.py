"""The texts of the sample documents, for the goldens that end-to-end runs are compared with.

    python tests/sample_texts.py >texts.json
    goldens/bin/python tests/model/make_goldens.py texts.json tests/end_to_end/samples.npz

The second line runs in the throwaway environment that tests/model/make_goldens.py describes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import ReadingSettings
from pipeline.listing import list_units
from pipeline.reading import read_unit

SAMPLES = Path(__file__).parent / "data" / "documents"


def sample_texts() -> Iterator[tuple[str, str]]:
    """Name (path below the sample folder, then the record) and text of each sample document."""
    settings = ReadingSettings(inputs=(str(SAMPLES),))
    for unit in list_units(settings).units:
        for chunk in read_unit(unit, settings, []):
            for document in chunk.documents:
                yield name(document.uri, document.record), document.text


def name(uri: str, record: str) -> str:
    return f"{Path(uri).relative_to(SAMPLES)}#{record}"


if __name__ == "__main__":
    print(json.dumps(dict(sample_texts()), ensure_ascii=False))

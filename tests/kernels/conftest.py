"""Which tests of the interpreted TPU kernel are for every run: a program for it takes 5 s to compile on a CPU."""

from __future__ import annotations

import pytest

# What float32 does in other code than bfloat16; of the shapes, those that no other stands for.
ORDINARY_IN_FLOAT32 = (
    "test_packed_rows_give",
    "test_what_stands_at_padding",
    "test_a_text_that_is_not_finite",
    "test_where_in_a_row",
)
FULL_ANYWAY = ("test_a_row_of_8191", "test_odd_lengths[pallas_tpu-bfloat16-511]")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked `full`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "[pallas_tpu" not in item.name:
            continue
        float32 = "float32" in item.name and not item.name.startswith(ORDINARY_IN_FLOAT32)
        if float32 or item.name.startswith(FULL_ANYWAY) or "pallas_tpu-plain" in item.name:
            item.add_marker(pytest.mark.full)

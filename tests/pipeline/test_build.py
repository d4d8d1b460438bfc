"""The pipeline's shape, read from its graph."""

from __future__ import annotations

import apache_beam as beam
from apache_beam.pipeline import AppliedPTransform, PipelineVisitor

from pipeline.build import build
from staged_case import make_run, make_unit


def graph(tmp_path) -> list[AppliedPTransform]:
    pipeline = beam.Pipeline("FnApiRunner")
    build(pipeline, make_run(tmp_path, [make_unit()]))
    found: list[AppliedPTransform] = []

    class Visitor(PipelineVisitor):
        def enter_composite_transform(self, transform_node):
            found.append(transform_node)

        def visit_transform(self, transform_node):
            found.append(transform_node)

    pipeline.visit(Visitor())
    return found


def test_only_work_units_are_shuffled_and_no_document(tmp_path):
    found = graph(tmp_path)
    shuffles = [node for node in found if isinstance(node.transform, beam.Reshuffle)]
    assert [node.full_label for node in shuffles] == ["Spread"]
    [listed] = shuffles[0].inputs
    assert listed.producer.full_label == "Work units"
    grouped = [n.full_label for n in found if isinstance(n.transform, beam.GroupByKey)]
    assert [label for label in grouped if not label.startswith("Spread/")] == []
    assert not [n for n in found if isinstance(n.transform, beam.Flatten)]

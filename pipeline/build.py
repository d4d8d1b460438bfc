"""The whole pipeline: documents in, published Parquet out."""

from __future__ import annotations

import apache_beam as beam
from apache_beam.ml.inference.base import RunInference

from pipeline.assembling import assemble
from pipeline.batching import BatchByLength
from pipeline.inferring import FlaxModelHandler
from pipeline.listing import read_listing
from pipeline.progress import Control
from pipeline.publishing import publish
from pipeline.reading import Read
from pipeline.records import Run
from pipeline.tokenizing import Tokenize
from pipeline.writing import Write


def build(pipeline: beam.Pipeline, run: Run) -> beam.PCollection[None]:
    """Adds the run to a pipeline of any runner; the pipeline's end is the published (or refused) partition."""
    results = (
        pipeline
        | "List" >> beam.Create([run.todo])
        | "Work units" >> beam.FlatMap(read_listing)
        | "Spread"
        >> beam.Reshuffle()  # the only shuffle, of paths: documents never leave the stage below
        | "Read" >> beam.ParDo(Read(run))
        | "Tokenize" >> beam.ParDo(Tokenize(run))
        | "Batch by length" >> beam.ParDo(BatchByLength(run))
        | "Infer" >> RunInference(model_handler(run))
    )
    files = (
        results | "Assemble" >> beam.Map(assemble, run.schema) | "Write" >> beam.ParDo(Write(run))
    )
    published: beam.PCollection[None] = (
        pipeline
        | "Run" >> beam.Create([run])
        | "Publish" >> beam.Map(publish, beam.pvalue.AsIter(files))
    )
    return published


def model_handler(run: Run) -> FlaxModelHandler:
    return FlaxModelHandler(
        run.checkpoint,
        task=run.job.model.task,
        device=run.device,
        dtype=run.dtype,
        attention=run.job.model.attention,
        shapes=run.shapes.shapes,
        timeout_seconds=run.job.model.device_timeout_seconds,
        control=Control(run.control),
    )

"""Jobs for Dataflow: what Beam's own client sends, and that what it stages does the same as a local run."""

from __future__ import annotations

import io
import json
import sys

import pyarrow.parquet as pq
import pytest
from google.cloud import dataflow_v1beta3

from lengthwise_command import assert_same, job, run_here
from local_dataflow import local_dataflow
from local_gcs import client, local_gcs
from pipeline import cli
from pipeline.accelerators import ACCELERATORS
from pipeline.launching import launch

DATE = "2026-01-02"
IMAGE = "us-docker.pkg.dev/a-project/lengthwise/lengthwise:1"
CLOUD = ["--project", "a-project", "--region", "us-central1", "--staging", "gs://beam/jobs"]
CLOUD += ["--image", IMAGE]
JOB = ["--input", "gs://in/docs", "--output", "gs://out/jobs", "--date", DATE]


@pytest.fixture
def gcs(monkeypatch, tmp_path, tiny_checkpoint):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cli, "quiet", lambda: None)
    with local_gcs("in", "out", "beam") as faults:
        put("docs/a.txt", "a document in a bucket")
        put("docs/b.jsonl", "".join(json.dumps({"text": f"record {n}"}) + "\n" for n in range(40)))
        put("docs/broken.txt", b"\xff")
        for file in (path for path in tiny_checkpoint.rglob("*") if path.is_file()):
            put(f"model/{file.relative_to(tiny_checkpoint)}", file.read_bytes())
        yield faults


@pytest.fixture
def dataflow(gcs):
    with local_dataflow() as service:
        yield service


def put(name: str, content: str | bytes) -> None:
    client().bucket("in").blob(name).upload_from_string(content)


def read(name: str) -> bytes:
    return client().bucket("out").blob(name).download_as_bytes()


def submit(dataflow, *flags: str, model: str = "gs://in/model") -> int:
    endpoint = f"--dataflow_endpoint={dataflow.endpoint}"
    return cli.main(["submit", *JOB, "--model", model, *CLOUD, endpoint, *flags])


def partition(output: str):
    manifest = json.loads(read(f"{output}/documents/date={DATE}/_manifest.json"))
    [entry] = manifest["documents"]
    return pq.read_table(io.BytesIO(read(f"{output}/{entry['path']}"))).sort_by("document_id")


def staging() -> list[str]:
    return [blob.name for blob in client().bucket("out").list_blobs(prefix="jobs/_staging")]


def test_the_staged_pipeline_publishes_what_a_local_run_does(dataflow, monkeypatch, capsys):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "model.predictor", None)  # and so no JAX, no TensorFlow
        without.setitem(sys.modules, "tensorflow_text", None)
        assert submit(dataflow) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert (summary["status"], summary["date"]) == ("submitted", DATE)
    assert f"/dataflow/jobs/us-central1/{summary['job']}?project=a-project" in err
    dataflow.run(summary["job"])
    settings = {"date": DATE, "dtype": "float32"}
    assert run_here(job("gs://in/docs", "gs://out/here", "gs://in/model", **settings)) == 0
    here = partition("here")
    assert here.num_rows == 41
    assert_same(partition("jobs"), here)
    report = json.loads(read(summary["report"].removeprefix("gs://out/")))
    assert (report["status"], report["run_id"]) == ("published", summary["run_id"])
    assert (report["documents"]["written"], report["documents"]["failed"]) == (41, 1)
    assert [name for name in staging() if not name.endswith("/lock")] == []


def test_the_request_names_accelerator_image_workers_and_labels_exactly(dataflow):
    flags = ["--accelerator", "v5e-4", "--workers", "2", "--max-workers", "8"]
    flags += ["--zone", "us-central1-a", "--subnetwork", "regions/us-central1/subnetworks/s"]
    flags += ["--service-account", "worker@a-project.iam.gserviceaccount.com"]
    flags += ["--labels", "team=search", "--labels", "tier=night", "--experiments=an_experiment"]
    assert submit(dataflow, *flags) == 0
    [request] = dataflow.jobs.values()
    assert request["name"] == f"lengthwise-{DATE}"
    assert request["type"] == dataflow_v1beta3.JobType.JOB_TYPE_BATCH
    assert request["labels"] == {"team": "search", "tier": "night"}
    environment = request["environment"]
    assert environment["serviceOptions"] == [
        "worker_accelerator=type:tpu-v5-lite-podslice;topology:2x2"
    ]
    assert {"no_use_multiple_sdk_containers", "an_experiment"} <= set(environment["experiments"])
    assert "use_multiple_sdk_containers" not in environment["experiments"]
    assert environment["workerZone"] == "us-central1-a"
    assert environment["serviceAccountEmail"] == "worker@a-project.iam.gserviceaccount.com"
    [pool] = environment["workerPools"]
    assert pool["machineType"] == "ct5lp-hightpu-4t"
    assert (pool["numWorkers"], pool["autoscalingSettings"]["maxNumWorkers"]) == (2, 8)
    assert (pool["diskSizeGb"], pool["numThreadsPerWorker"]) == (200, 4)
    assert pool["subnetwork"] == "regions/us-central1/subnetworks/s"
    assert [image["containerImage"] for image in pool["sdkHarnessContainerImages"]] == [IMAGE]


def test_workers_elsewhere_get_device_dtype_and_shapes_from_the_table(gcs):
    a_job = job("gs://in/docs", "gs://out/jobs", "gs://in/model", date=DATE)
    with launch(a_job, workers=ACCELERATORS["v5e-4"]) as run:
        assert (run.device, run.dtype, run.local_devices) == ("tpu", "bfloat16", 4)
        assert all(B % 4 == 0 for B, _ in run.shapes.shapes)
        assert run.control is None


def test_a_second_job_of_the_same_date_is_refused_while_the_first_is_active(dataflow, capsys):
    assert submit(dataflow) == 0
    before = staging()
    assert submit(dataflow) == 2
    assert f"Dataflow has an active job lengthwise-{DATE}" in capsys.readouterr().err
    assert len(dataflow.jobs) == 1
    assert staging() == before
    dataflow.run("job-1")
    assert submit(dataflow) == 0


def test_a_job_does_not_replace_what_was_published_after_it_was_submitted(dataflow):
    assert submit(dataflow) == 0
    manifest = {"run_id": "another", "documents": [], "failures": [], "state": {}}
    name = f"jobs/documents/date={DATE}/_manifest.json"
    client().bucket("out").blob(name).upload_from_string(json.dumps(manifest))
    with pytest.raises(Exception, match=f"another run has published {DATE}"):
        dataflow.run("job-1")
    assert json.loads(read(name)) == manifest


def test_what_dataflow_says_is_passed_on_and_nothing_is_left(dataflow, capsys):
    dataflow.refuse = (403, "Quota TPU_LITE_PODSLICE_V5 exceeded")
    assert submit(dataflow) == 1
    err = capsys.readouterr().err
    assert "lengthwise: Dataflow has refused the job: " in err
    assert "Quota TPU_LITE_PODSLICE_V5 exceeded" in err
    assert staging() == []

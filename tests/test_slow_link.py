"""The slow line of benchmarks/slow_link.py carries what it says, and Flower's requests get through it."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.slow_link import HERE, Relay, slow_namespace

BODY = 100_000


class _Sink(BaseHTTPRequestHandler):
    """Takes a POST and answers with as many bytes."""

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response_only(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def sink() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def post(host: str, port: int, size: int = BODY) -> tuple[float, bytes]:
    """Return the seconds until the answer was read, and the answer."""
    content, began = os.urandom(size), time.monotonic()
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("POST", "/", content)
    answer = connection.getresponse().read()
    connection.close()
    assert answer == content
    return time.monotonic() - began, answer


def test_bytes_take_as_long_as_the_rate_says_in_each_direction(sink):
    relay = Relay(("127.0.0.1", sink), 2e6, 1e6)
    seconds, _ = post("127.0.0.1", relay.port)
    relay.close()
    assert 1.2 <= seconds < 2.2  # 100,000 bytes x 8 / 2e6 up, and / 1e6 down
    assert BODY <= relay.up.passed < BODY + 500  # with the headers
    assert BODY <= relay.down.passed < BODY + 500


def test_all_connections_share_the_rate(sink):
    relay = Relay(("127.0.0.1", sink), 2e6, 2e6)
    began = time.monotonic()
    threads = [threading.Thread(target=post, args=("127.0.0.1", relay.port)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    relay.close()
    assert 1.2 + 0.2 <= time.monotonic() - began < 2.8  # three up: 1.2 s; down overlaps all but the last
    assert relay.up.passed >= 3 * BODY


def test_without_a_rate_nothing_waits(sink):
    relay = Relay(("127.0.0.1", sink), 0.0, 0.0)
    seconds, _ = post("127.0.0.1", relay.port)
    relay.close()
    assert seconds < 1.0


def test_the_kernels_slow_link_is_as_slow(sink):
    try:
        with slow_namespace(1.0, 2.0) as inside:
            relay = Relay(("127.0.0.1", sink), 0.0, 0.0, HERE)
            seconds = _post_from(inside, relay.port)
            relay.close()
    except (PermissionError, FileNotFoundError) as refused:
        pytest.skip(f"no network namespace here: {refused}")
    assert 0.9 <= seconds < 2.6  # 0.8 s up and 0.4 s down, less what passes at once


def _post_from(prefix: list[str], port: int) -> float:

    code = (
        "import http.client, time\n"
        f"c = http.client.HTTPConnection('{HERE}', {port}, timeout=30); b = time.monotonic()\n"
        f"c.request('POST', '/', bytes({BODY})); assert len(c.getresponse().read()) == {BODY}; print(time.monotonic() - b)"
    )
    done = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout)

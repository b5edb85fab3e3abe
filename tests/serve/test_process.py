"""The command in a process of its own: signals, several workers, and thousands of fuzzed requests."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import bertsmith
from bertsmith.serve.app import create_app
from bertsmith.serve.settings import ServeConfig

ROOT = Path(__file__).parents[2]
FUZZED = 10_000
LONG = "the quick brown fox jumps over the lazy dog " * 4


@contextmanager
def running(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `bertsmith serve` on a free port; give the process and its address."""
    command = [sys.executable, "-m", "bertsmith", "serve", *map(str, arguments), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = next(match for line in process.stderr if (match := re.search(r"serving at (http://\S+)", line)))
        yield process, found.group(1)
    finally:
        process.kill()
        process.wait(20)


@pytest.mark.slow
def test_a_terminated_server_answers_what_it_accepted(served) -> None:
    with running(served["colours"]) as (process, url):
        client = bertsmith.Client(url)
        assert client.predict("the quick fox")["label"] in ("red", "green", "blue", "none")
        answers: list[list[dict[str, object]]] = []
        body = {"inputs": [LONG] * 1500}
        asking = threading.Thread(target=lambda: answers.append(client.post("/classify", body)))
        asking.start()
        while "bertsmith_batch_items_count 0.0" in (page := _page(url)) or "bertsmith_queue_tokens 0.0" in page:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        asking.join(60)
        assert len(answers[0]) == 1500
        process.wait(30)
        assert process.returncode in (0, -signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()


def _page(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as response:
        return response.read().decode()


@pytest.mark.slow
def test_several_workers_share_the_port_and_their_counters(served) -> None:
    with running(f"c={served['colours']}", "--workers", 2) as (_, url):
        client = bertsmith.Client(url)
        for _ in range(20):
            client.post("/classify", {"inputs": "the quick fox", "model": "c"})
        count = re.search(r'bertsmith_requests_total\{route="/classify",status="200"\} (\d+)', _page(url))
        assert count is not None
        assert int(count.group(1)) == 20
    # The process was killed; its workers end as well, and the port is free.
    deadline = time.monotonic() + 30
    while (refused := _refused(url)) is False and time.monotonic() < deadline:
        time.sleep(0.1)
    assert refused


def _refused(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except urllib.error.URLError as error:
        return isinstance(error.reason, ConnectionRefusedError)
    except OSError:  # closed while it was asked
        return False
    return False


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fuzzed_requests_never_get_a_5xx(served_models) -> None:
    """Requests that schemathesis draws from the OpenAPI schema, valid and invalid ones."""
    application = create_app(served_models, ServeConfig(wait_ms=0))  # schemathesis shuts its application down
    with TestClient(application, raise_server_exceptions=False) as client:
        _fuzz(client)


def _fuzz(client: TestClient) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    operations = [found.ok() for found in schema.get_all_operations()]
    bodies = sum(operation.method == "post" for operation in operations)
    assert bodies >= 11
    counts: dict[int, int] = {}
    each = -(-FUZZED // (2 * bodies))
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            def ask(case) -> None:
                arguments = case.as_transport_kwargs(base_url="http://testserver")
                arguments.pop("cookies", None)
                response = client.request(**arguments)
                counts[response.status_code] = counts.get(response.status_code, 0) + 1
                assert response.status_code < 500, (response.status_code, response.text, arguments)
                if response.status_code >= 400:
                    assert "\n" not in json.dumps(response.json()["error"])

            try:
                strategy = operation.as_strategy(generation_mode=mode)
                checks = list(HealthCheck)
                limits = settings(
                    max_examples=each,
                    deadline=None,
                    database=None,
                    suppress_health_check=checks,
                    phases=[Phase.generate],
                )
                limits(given(case=strategy)(ask))()
            except Unsatisfiable:  # a route without parameters has no invalid request
                assert operation.method == "get"
    assert sum(counts.values()) >= FUZZED
    assert counts[200] > 100
    assert client.post("/classify", json={"inputs": "the quick fox", "model": "colours"}).status_code == 200

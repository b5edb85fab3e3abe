"""The server on a local Ray cluster: the answers of the plain server, replicas that are replaced, scaling, draining."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bertsmith
from bertsmith.errors import UserError

pytest.importorskip("ray.serve")
from bertsmith.serve.ray import Arguments, app, bounds

ROOT = Path(__file__).parents[2]
KEY = "a-key-that-ray-never-sees"
TEXTS = ["the quick brown fox", "dogs bark", "the lazy dog jumps over the quick brown foxes " * 8]
LONG = "the quick brown fox jumps over the lazy dog " * 4


@pytest.mark.parametrize(("given", "expected"), [("1", (1, 1)), ("2", (2, 2)), ("1:4", (1, 4)), ("3:3", (3, 3))])
def test_replicas_are_a_number_or_a_range(given, expected) -> None:
    assert bounds(given) == expected


@pytest.mark.parametrize("given", ["0", "-1", "4:1", "1:", ":2", "two", "1.5", "1:2:3", ""])
def test_other_replicas_are_refused(given) -> None:
    with pytest.raises(UserError, match="is not a number such as 2"):
        bounds(given)


def test_builder_takes_what_rays_commands_give() -> None:
    typed = Arguments.model_validate({"models": "a,b=c", "replicas": 2, "wait_ms": "5"})  # `serve run … models=a,b=c`
    assert (typed.models, typed.replicas, typed.wait_ms) == (["a", "b=c"], "2", 5.0)
    with pytest.raises(ValueError, match="api_key") as error:
        Arguments.model_validate({"models": ["a"], "api_key": KEY})
    assert KEY not in str(error.value)
    deployment = app(Arguments(models=["a"], replicas="1:3", target_requests=7))._bound_deployment
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 3, 7)


def test_command_refuses_options_that_do_not_fit(run_command, served) -> None:
    for options, expected in (
        (["--replicas", "2"], "--replicas is for --ray"),
        (["--ray-address", "auto"], "--ray-address is for --ray"),
        (["--ray", "--workers", "2"], "write --replicas 2"),
        (["--ray", "--replicas", "many"], "--replicas many is not a number"),
        (["--ray", "--target-requests", "0"], "--target-requests 0.0 must be more than 0"),
        (["--ray", "--host", "256.256.256.256"], "cannot listen on 256.256.256.256"),
    ):
        code, _, err = run_command("serve", served["tags"], "--device", "cpu", *options)
        assert (code, expected in err.splitlines()[-1]) == (2, True), err


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those have."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def replicas_of(pid: int) -> set[int]:
    """The processes of the replicas of a server."""
    found = set()
    for each in descendants(pid):
        try:
            if b"ServeReplica" in Path(f"/proc/{each}/cmdline").read_bytes():
                found.add(each)
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def server(served, tmp_path_factory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with two replicas and a key, and its address."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "keys").write_text(f"{KEY}\n")
    models = [os.path.relpath(served[name], folder) for name in ("colours", "words", "tags")]
    command = [sys.executable, "-m", "bertsmith", "serve", *models, "--ray", "--replicas", "2", "--port", "0"]
    logs = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a short path: Ray puts sockets there
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--api-key-file", "keys", "--max-texts", "2000"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": logs},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        found = next(match for line in process.stderr if (match := re.search(r"serving at (http://\S+)", line)))
        yield process, found.group(1)
    finally:
        left = descendants(process.pid)
        process.kill()
        process.wait(20)
        for pid in left - {process.pid}:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        shutil.rmtree(logs, ignore_errors=True)


@pytest.fixture
def ray_client(server) -> bertsmith.Client:
    return bertsmith.Client(server[1], api_key=KEY)


@pytest.mark.slow
def test_ray_answers_as_the_plain_server(ray_client, server, client) -> None:
    for path, body in {
        "/classify": {"inputs": TEXTS, "model": "colours"},
        "/tag": {"inputs": TEXTS},
        "/fill-mask": {"inputs": "the [MASK] fox"},
        "/embed": {"inputs": TEXTS, "model": "words"},
    }.items():
        expected = client.post(path, json=body).json()
        assert json.loads(json.dumps(ray_client.post(path, body))) == _rounded(expected)
    with pytest.raises(UserError, match="the API key is wrong"):
        bertsmith.Client(server[1], api_key="another-key").models()
    with pytest.raises(UserError, match="send at most 2,000 at a time"):
        ray_client.post("/classify", {"inputs": ["a"] * 2001})
    with pytest.raises(UserError, match="the body has more than 4,194,304 bytes"):
        ray_client.post("/classify", {"inputs": "a" * 2**22})
    with pytest.raises(UserError, match="did you mean 'colours'"):
        ray_client.post("/classify", {"inputs": "a", "model": "colour"})


def _rounded(value: object) -> object:
    return json.loads(json.dumps(value), parse_float=lambda digits: pytest.approx(float(digits), abs=1e-5))


@pytest.mark.slow
def test_a_killed_replica_is_replaced_and_clients_notice_nothing(ray_client, server) -> None:
    process, url = server
    before = replicas_of(process.pid)
    assert len(before) == 2
    expected = _rounded(ray_client.predict("the quick fox"))
    wrong: list[object] = []
    done, stop = [0] * 8, threading.Event()

    def ask(number: int) -> None:
        client = bertsmith.Client(url, api_key=KEY, retries=10)
        while not stop.is_set():
            try:
                if (found := client.predict("the quick fox")) != expected:
                    wrong.append(found)
            except Exception as error:
                wrong.append(error)
            done[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(done))]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(done) > 100)
    assert _answered(before) == before  # both of them
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: len(replicas_of(process.pid) - {killed}) == 2)
    new = replicas_of(process.pid) - before
    wait_until(lambda: new <= _answered(new))  # the new one answers, too
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert min(done) > 1


def _answered(pids: set[int]) -> set[int]:
    """Which replicas have counted a response, in the files that they share."""
    from prometheus_client.mmap_dict import MmapedDict

    found = set()
    for pid in pids:
        for file in Path(tempfile.gettempdir()).glob(f"bertsmith-metrics-*/counter_{pid}.db"):
            counted = MmapedDict.read_all_values_from_file(str(file))
            if any("/classify" in key and value for key, value, *_ in counted):
                found.add(pid)
    return found


@pytest.mark.slow
def test_a_terminated_server_answers_what_it_accepted_and_kept_the_key_to_itself(ray_client, server) -> None:
    process, _ = server
    logs = {Path(name) for name in _environment(process.pid, "RAY_TMPDIR")}
    counted = ray_client_page(ray_client)
    answers: list[list[object]] = []
    asking = threading.Thread(target=lambda: answers.append(ray_client.post("/classify", {"inputs": [LONG] * 1500})))
    asking.start()
    wait_until(lambda: ray_client_page(ray_client) > counted)  # its first batch has been computed
    process.send_signal(signal.SIGTERM)
    asking.join(120)
    assert len(answers[0]) == 1500
    process.wait(120)
    assert process.returncode == 0
    assert "Traceback" not in process.stderr.read()
    files = [file for folder in logs for file in folder.rglob("*") if file.is_file()]
    assert any("serve" in file.name for file in files)
    assert not [file for file in files if KEY.encode() in file.read_bytes()]


def _environment(pid: int, name: str) -> list[str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return [entry.partition("=")[2] for entry in entries if entry.startswith(f"{name}=")]


def ray_client_page(client: bertsmith.Client) -> float:
    """The number of batches that the replicas have computed."""
    status, _, content = client._send("GET", "/metrics", None)
    assert status == 200
    return float(re.search(r"^bertsmith_batch_items_count (\S+)$", content.decode(), re.M)[1])


@pytest.mark.slow
def test_replicas_are_added_under_load(served, monkeypatch) -> None:
    import ray
    from ray import serve

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    quick = {"upscale_delay_s": 0.5, "look_back_period_s": 1, "metrics_interval_s": 0.5}
    models = [f"colours={served['colours']}"]
    arguments = Arguments(models=models, replicas="1:2", target_requests=2, autoscaling=quick, device="cpu")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stop = threading.Event()

    def ask() -> None:
        client = bertsmith.Client(f"http://127.0.0.1:{port}", retries=10)
        while not stop.is_set():
            assert len(client.post("/classify", {"inputs": [LONG] * 200})) == 200

    threads = [threading.Thread(target=ask) for _ in range(12)]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(http_options={"port": port})
        serve.run(app(arguments), name="bertsmith")

        def running() -> int:
            return serve.status().applications["bertsmith"].deployments["bertsmith"].replica_states.get("RUNNING", 0)

        assert running() == 1
        for thread in threads:
            thread.start()
        wait_until(lambda: running() == 2)
    finally:
        stop.set()
        for thread in threads:
            if thread.is_alive():
                thread.join(120)
        serve.shutdown()
        ray.shutdown()

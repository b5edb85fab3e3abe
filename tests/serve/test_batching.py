"""Batches across requests: nothing is swapped or lost, the queue is bounded, clients that leave are dropped."""

import asyncio
import threading
import time

import httpx
import pytest

from bertsmith.errors import UserError
from bertsmith.serve import batching
from bertsmith.serve.app import create_app
from bertsmith.serve.batching import Batcher, Lane, QueueFull, Stopped, TooLarge
from bertsmith.serve.settings import ServeConfig


class Machine:
    """A computation that doubles numbers, waits until it is released, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.started, self.released = threading.Event(), threading.Event()

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.started.set()
        assert self.released.wait(10)
        if any(item < 0 for item in items):
            raise UserError(f"{min(items)} is negative")
        return [2 * item for item in items]


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def batcher():
    batcher = Batcher(10, 0, 40)
    yield batcher
    batcher.close(10)


def busy(batcher: Batcher, machine: Machine) -> Lane:
    """A lane whose first batch is being computed and waits for its release."""
    lane = Lane("model", "double", compute=machine)
    batcher.submit(lane, [0], [1])
    assert machine.started.wait(10)
    return lane


def test_a_batch_takes_one_item_of_each_job_in_turn_up_to_its_tokens(batcher, machine) -> None:
    lane = busy(batcher, machine)
    long = batcher.submit(lane, list(range(1, 9)), [3] * 8)
    short = batcher.submit(lane, [100], [2])
    machine.released.set()
    assert short.result(10) == [200]
    assert long.result(10) == [2 * n for n in range(1, 9)]
    assert machine.batches[1] == [1, 100, 2]  # 3 + 2 + 3 tokens; another 3 would be more than 10
    assert max(map(len, machine.batches)) == 3
    assert batcher.tokens == 0


def test_an_item_larger_than_a_batch_is_computed_alone(batcher, machine) -> None:
    machine.released.set()
    lane = Lane("model", "double", compute=machine)
    assert batcher.submit(lane, [1, 2], [30, 1]).result(10) == [2, 4]


def test_lanes_are_never_mixed_and_take_turns(batcher, machine) -> None:
    lane = busy(batcher, machine)
    other = Lane("model", "double", ("other",), compute=machine)
    first = batcher.submit(lane, [1, 2, 3], [6, 6, 6])
    second = batcher.submit(other, [50, 60], [6, 6])
    machine.released.set()
    assert (first.result(10), second.result(10)) == ([2, 4, 6], [100, 120])
    assert machine.batches[1:4] == [[1], [50], [2]]


def test_engines_share_what_waits_and_threads(machine) -> None:
    """A first text takes one of two engines; the other computes those after it at the same time, in one batch."""
    computing: list[int] = []
    batcher = Batcher(10, 0, 100, engines=2, prepare=computing.append)
    lane = busy(batcher, machine)
    machine.started.clear()
    others = batcher.submit(lane, [1, 2, 3, 4], [4, 4, 4, 4])
    assert machine.started.wait(10)  # while the first is not done
    machine.released.set()
    assert others.result(10) == [2, 4, 6, 8]
    assert machine.batches[:2] == [[0], [1, 2]]
    assert computing[:2] == [1, 2]
    batcher.close(10)


def test_idle_engines_get_equal_shares(machine) -> None:
    batcher = Batcher(100, 50, 100, engines=2)
    lane = Lane("model", "double", compute=machine)
    futures = [batcher.submit(lane, [n], [5]) for n in range(6)]
    deadline = time.monotonic() + 10
    while len(machine.batches) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    machine.released.set()
    assert [future.result(10) for future in futures] == [[2 * n] for n in range(6)]
    assert machine.batches == [[0, 1, 2], [3, 4, 5]]
    batcher.close(10)


def test_engines_survive_items_of_one_job_that_fail_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    is_wanted = batching._is_wanted
    monkeypatch.setattr(batching, "_is_wanted", lambda job: (is_wanted(job), time.sleep(0.01))[0])  # let others run
    together = threading.Barrier(4)

    def fail(items: list[int]) -> list[int]:
        together.wait(10)
        raise UserError("no")

    batcher = Batcher(1, 0, 1000, engines=4)
    lane = Lane("model", "fail", compute=fail)
    for _ in range(3):
        with pytest.raises(UserError, match="no"):
            batcher.submit(lane, list(range(4)), [1] * 4).result(10)
    assert batcher.is_running
    batcher.close(10)


def test_items_of_a_lane_in_order_are_never_computed_at_a_time() -> None:
    running, done, most = 0, [], 0

    def compute(items: list[int]) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.002)
        running -= 1
        done.extend(items)
        return items

    batcher = Batcher(2, 0, 100, engines=4)
    lane = Lane("model", "view", in_order=True, compute=compute)
    assert batcher.submit(lane, list(range(20)), [1] * 20).result(10) == list(range(20))
    assert (done, most) == (list(range(20)), 1)
    batcher.close(10)


def test_waiting_fills_a_batch(machine) -> None:
    machine.released.set()
    batcher = Batcher(10, 200, 100)
    lane = Lane("model", "double", compute=machine)
    start = time.monotonic()
    futures = [batcher.submit(lane, [n], [5]) for n in (1, 2)]
    assert [future.result(10) for future in futures] == [[2], [4]]
    assert time.monotonic() - start < 0.15  # a full batch does not wait
    assert batcher.submit(lane, [3], [5]).result(10) == [6]  # one that stays half empty waits for at most 200 ms
    assert machine.batches == [[1, 2], [3]]
    batcher.close(10)


def test_a_full_queue_refuses_and_says_when_to_come_back(batcher, machine) -> None:
    lane = busy(batcher, machine)
    waiting = batcher.submit(lane, [1, 2], [20, 20])
    with pytest.raises(QueueFull) as full:
        batcher.submit(lane, [3], [1])
    assert 1 <= full.value.retry_after <= 60
    with pytest.raises(TooLarge, match="41 tokens and the queue takes 40"):
        batcher.submit(lane, [3], [41])
    assert batcher.tokens == 40
    machine.released.set()
    assert waiting.result(10) == [2, 4]
    assert batcher.submit(lane, [3], [1]).result(10) == [6]


def test_a_job_that_is_cancelled_leaves_the_queue(batcher, machine) -> None:
    lane = busy(batcher, machine)
    gone = batcher.submit(lane, [7, 8], [20, 20])
    assert gone.cancel()
    assert (batcher.tokens, batcher.jobs, batcher.dropped) == (0, 0, 1)
    stays = batcher.submit(lane, [9], [40])
    machine.released.set()
    assert stays.result(10) == [18]
    assert [7] not in machine.batches
    assert not any(7 in batch or 8 in batch for batch in machine.batches)


def test_a_bad_item_fails_only_its_own_job(batcher, machine) -> None:
    lane = busy(batcher, machine)
    good, bad = batcher.submit(lane, [1, 2], [2, 2]), batcher.submit(lane, [-1], [2])
    machine.released.set()
    assert good.result(10) == [2, 4]
    with pytest.raises(UserError, match="-1 is negative"):
        bad.result(10)
    assert batcher.is_running


def test_closing_computes_what_waits_and_refuses_new_jobs(batcher, machine) -> None:
    lane = busy(batcher, machine)
    waiting = [batcher.submit(lane, [n], [10]) for n in (1, 2, 3)]
    closing = threading.Thread(target=batcher.close)
    closing.start()
    while batcher.is_running:
        time.sleep(0.001)
    with pytest.raises(Stopped):
        batcher.submit(lane, [4], [1])
    machine.released.set()
    closing.join(10)
    assert [future.result(0) for future in waiting] == [[2], [4], [6]]


def gate(models, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Hold the engine of a model: events that it has started, and that it may go on."""
    started, released = threading.Event(), threading.Event()
    predictor = models.by_name[name].predictor
    compute = predictor.logits

    def held(examples):
        started.set()
        assert released.wait(20)
        return compute(examples)

    monkeypatch.setattr(predictor, "logits", held)
    return started, released


def over_http(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", timeout=30)


def test_64_clients_get_their_own_responses(served_models) -> None:
    words = "the quick brown fox jumps over the lazy dog and the dogs bark at foxes".split()
    colours, tags = served_models.by_name["colours"].predictor, served_models.by_name["tags"].predictor
    texts = [" ".join(words[i % 7 : i % 7 + 1 + i % 11]) + f" {i}" for i in range(128)]
    expected = [each["scores"] for each in colours(texts)], [each["words"] for each in tags(texts)]

    async def client(http: httpx.AsyncClient, number: int) -> None:
        for i in range(number, len(texts), 64):
            found = await http.post("/classify", json={"inputs": texts[i], "model": "colours"})
            assert found.json()["scores"] == pytest.approx(expected[0][i], abs=1e-5), texts[i]
            found = await http.post("/tag", json={"inputs": [texts[i]]})
            assert found.json()[0]["words"] == expected[1][i]

    async def everyone() -> None:
        app = create_app(served_models, ServeConfig(max_batch_tokens=512, wait_ms=5))
        async with over_http(app) as http:
            await asyncio.gather(*(client(http, number) for number in range(64)))
        items = app.state.service.metrics.batch_items
        batches = next(iter(items.collect())).samples
        count = {sample.name: sample.value for sample in batches if not sample.labels}
        assert count["bertsmith_batch_items_sum"] == 2 * len(texts)
        assert count["bertsmith_batch_items_count"] < len(texts)  # so texts of several clients shared batches
        app.state.service.close()

    asyncio.run(everyone())


def test_server_answers_429_and_drops_clients_that_leave(served_models, monkeypatch) -> None:
    started, released = gate(served_models, "colours", monkeypatch)
    body = {"inputs": "the quick brown fox", "model": "colours"}

    async def play() -> None:
        app = create_app(served_models, ServeConfig(max_batch_tokens=8, queue_tokens=16, wait_ms=0))
        batcher = app.state.service.batcher
        async with over_http(app) as http:
            first = asyncio.create_task(http.post("/classify", json=body))
            await asyncio.to_thread(started.wait, 10)
            others = [asyncio.create_task(http.post("/classify", json=body)) for _ in range(5)]
            await asyncio.wait(others[2:], timeout=10)  # they find no room, and are refused
            refused = [task.result() for task in others if task.done()]
            assert len(refused) >= 3
            assert [each.status_code for each in refused] == [429] * len(refused)
            assert all(int(each.headers["Retry-After"]) >= 1 for each in refused)
            assert (await http.get("/ready")).status_code == 200
            waiting = [task for task in others if not task.done()]
            before = batcher.tokens
            waiting[0].cancel()
            await asyncio.sleep(0.05)
            assert batcher.tokens < before
            assert batcher.dropped == 1
            released.set()
            assert (await first).status_code == 200
            assert [(await task).status_code for task in waiting[1:]] == [200] * (len(waiting) - 1)
        app.state.service.close()

    asyncio.run(play())


def test_shutdown_answers_the_requests_that_were_accepted(served_models, monkeypatch) -> None:
    started, released = gate(served_models, "colours", monkeypatch)

    async def play() -> None:
        app = create_app(served_models, ServeConfig(wait_ms=0))
        async with over_http(app) as http:
            async with app.router.lifespan_context(app):
                body = {"inputs": "the quick fox", "model": "colours"}
                accepted = asyncio.create_task(http.post("/classify", json=body))
                await asyncio.to_thread(started.wait, 10)
                released.set()
            assert (await accepted).status_code == 200
            late = await http.post("/classify", json=body)
            assert (late.status_code, late.headers["Retry-After"]) == (503, "1")
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200

    asyncio.run(play())

"""A request that ends its instance costs two restarts; then it is refused, and nobody else is disturbed."""

from __future__ import annotations

import io
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import zoo
from PIL import Image
from running import Server, StartServer, is_stub

from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE
from graphkiln_client import Client

pytestmark = pytest.mark.server

DEADLY = 10_000_000  # rounds: it computes until its process is killed


def ask(server: Server, rounds: int, retries: int = 0) -> float:
    with Client(server.url, timeout_s=120, max_retries=retries) as client:
        return float(client.model("slow").infer({"ROUNDS": np.array([[rounds]])})["SUM"][0, 0])


def die_of_it(server: Server) -> None:
    """Send the request, and kill the process that computes it: that stands for a fault of an engine."""

    def fail() -> None:
        with pytest.raises(ClientError):
            ask(server, DEADLY)

    caller = threading.Thread(target=fail)
    starts = server.log.count("serving HTTP")
    before = {process.pid: process.cpu_times().user for process in processes(server)}
    caller.start()
    busy: list[psutil.Process] = []

    def finds_busy() -> bool:
        busy[:] = [p for p in processes(server) if p.cpu_times().user > before[p.pid] + 1]
        return bool(busy)

    server.wait_until(finds_busy)
    busy[0].kill()
    caller.join(60)
    server.wait_until(lambda: server.log.count("serving HTTP") > starts, timeout_s=120)
    server.wait_ready()


def processes(server: Server) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.process.pid).children(recursive=True) if is_stub(child)]


def test_it_is_refused_the_third_time(start_server: StartServer, tmp_path: Path) -> None:
    zoo.add(tmp_path / "store", "slow", zoo.slow(), "max_batch_size: 4")
    server = start_server("--model-store", tmp_path / "store")
    server.wait_ready()
    for _ in range(2):
        die_of_it(server)
        assert ask(server, 1, retries=8) == 256
    assert "died of a request, the second time" in server.log
    errors: list[Exception] = []
    done = threading.Event()

    def go_on() -> None:
        with Client(server.url, timeout_s=60, max_retries=0) as client:
            while not done.is_set():
                try:
                    client.model("slow").infer({"ROUNDS": np.array([[1]])})
                except ClientError as error:
                    errors.append(error)

    neighbours = [threading.Thread(target=go_on) for _ in range(3)]
    for neighbour in neighbours:
        neighbour.start()
    begun = time.monotonic()
    for _ in range(10):
        with pytest.raises(InvalidInput, match="has ended two instances"):
            ask(server, DEADLY)
    assert time.monotonic() - begun < 60
    done.set()
    for neighbour in neighbours:
        neighbour.join(60)
    assert errors == []
    assert server.log.count("restarting the server") == 2


@pytest.mark.slow
def test_it_may_also_exceed_the_compute_limit(start_server: StartServer, tmp_path: Path) -> None:
    """A client that tries again meets the refusal by itself."""
    zoo.add(tmp_path / "store", "slow", zoo.slow(), "max_batch_size: 4")
    server = start_server("--model-store", tmp_path / "store", "--compute-limit=3")
    server.wait_ready()
    with pytest.raises(InvalidInput, match="has ended two instances"):
        ask(server, DEADLY, retries=20)
    assert server.log.count("restarting the server") == 2


@pytest.mark.wide
def test_an_image_that_ends_its_decoder(start_server: StartServer, digits: Path, tmp_path: Path) -> None:
    """The instances of NAME.images die of it, and NAME goes on afterwards."""
    shutil.copytree(digits, tmp_path / "store" / "digits")
    with (tmp_path / "store" / "digits" / "config.pbtxt").open("a") as config:
        config.write(ACCEPT_IMAGES_LINE)
    file = io.BytesIO()
    Image.new("L", (12_000, 12_000)).save(file, "PNG")  # half a second of decoding
    deadly, harmless = file.getvalue(), Path("docs/digits/seven.png").read_bytes()
    server = start_server("--model-store", tmp_path / "store")
    server.wait_until(lambda: "serving HTTP" in server.log)

    def infer(image: bytes, retries: int = 0) -> object:
        with Client(server.url, timeout_s=120, max_retries=retries) as client:
            return client.model("digits.images").infer({"IMAGE": np.array([[image]], dtype=object)})

    def find_busy() -> int:
        for path in server.temporary.glob("graphkiln-*/instances/digits.images_*.requests"):
            if path.read_bytes()[:4] != bytes(4):
                return int(path.stem.rpartition(".")[2])
        return 0

    for _ in range(2):
        starts = server.log.count("serving HTTP")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(infer, deadly)
            while not (pid := find_busy()):
                assert not answer.done()
            psutil.Process(pid).kill()
            with pytest.raises(ClientError):
                answer.result(60)
        server.wait_until(lambda starts=starts: server.log.count("serving HTTP") > starts, timeout_s=120)
        server.wait_ready()
        assert infer(harmless, retries=8)
    assert "died of a request, the second time" in server.log
    for _ in range(4):
        with pytest.raises(InvalidInput, match="has ended two instances"):
            infer(deadly)
        assert infer(harmless)
    assert server.log.count("an instance of digits.images died: restarting the server") == 2

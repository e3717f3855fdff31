"""Traffic of all kinds at once, every answer compared with its reference; a ledger of the outcomes."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from PIL import Image

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, DeadlineExceeded
from graphkiln_backend.system.closing import Closeable
from graphkiln_client import AsyncClient, Client
from graphkiln_client.tasks import Result
from graphkiln_client.transports.endpoint import Security
from soaking.models import (
    DIGIT_IMAGES,
    MODELS,
    TOLERANCE,
    Arrays,
    SoakModel,
    difference,
    digit_labels,
    digits_reference,
)
from soaking.service import Reach, Service

# The ledger: each request ends as right, wrong, refused with an error, or lost.

Verdict = Literal["right", "wrong", "refused", "lost"]

DEADLINE_S = 30.0  # of every request. One that has neither an answer nor an error by then is lost.
GRACE_S = 15.0  # how much later than its deadline a call may return on a busy machine


class WrongAnswer(Exception):
    """An answer that is not the reference's."""


class NoAnswer(Exception):
    """A request had neither an answer nor an error within its deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """End of one request that was not answered rightly.

    Attributes:
        sender: What sent it.
        verdict: How it ended.
        detail: Which error, or what is wrong with the answer.
        begun: When it was sent; monotonic seconds.
        ended: When it was over.
    """

    sender: str
    verdict: Verdict
    detail: str
    begun: float
    ended: float


@dataclass
class Ticket:
    """Of one request, for its sender.

    Attributes:
        verdict: How it ended, once it has.
    """

    verdict: Verdict = "right"


class Ledger:
    """Counts outcomes, and keeps those that were not right. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, Verdict]] = Counter()
        self._failures: list[Outcome] = []
        self._in_flight: dict[int, tuple[str, float]] = {}
        self._next = 0

    @contextmanager
    def request(self, sender: str) -> Iterator[Ticket]:
        """Around one request and the check of its answer: an exception says how it ended, and goes no further."""
        with self._lock:
            number = self._next
            self._next += 1
            begun = time.monotonic()
            self._in_flight[number] = (sender, begun)
        ticket = Ticket()
        detail = ""
        try:
            yield ticket
        except Exception as error:
            ticket.verdict, detail = judge(error)
        finally:
            self._end(number, sender, ticket.verdict, detail, begun)

    def _end(self, number: int, sender: str, verdict: Verdict, detail: str, begun: float) -> None:
        with self._lock:
            if self._in_flight.pop(number, None) is None:
                return  # it was given up as lost
            self._add(Outcome(sender=sender, verdict=verdict, detail=detail, begun=begun, ended=time.monotonic()))

    def _add(self, outcome: Outcome) -> None:
        self._counts[outcome.sender, outcome.verdict] += 1
        if outcome.verdict != "right":
            self._failures.append(outcome)

    def give_up_on_overdue(self) -> None:
        """Count requests that are far beyond their deadline as lost."""
        now = time.monotonic()
        with self._lock:
            overdue = {n: entry for n, entry in self._in_flight.items() if now - entry[1] > DEADLINE_S + GRACE_S}
            for number, (sender, begun) in overdue.items():
                del self._in_flight[number]
                self._add(Outcome(sender=sender, verdict="lost", detail="still waiting", begun=begun, ended=now))

    def counts(self) -> dict[str, dict[str, int]]:
        """Number of requests by sender and verdict."""
        with self._lock:
            table: dict[str, dict[str, int]] = {}
            for (sender, verdict), count in sorted(self._counts.items()):
                table.setdefault(sender, {})[verdict] = count
            return table

    def failures(self, *verdicts: Verdict) -> list[Outcome]:
        """Outcomes with one of these verdicts."""
        with self._lock:
            return [outcome for outcome in self._failures if outcome.verdict in verdicts]

    def errors_between(self, begin: float, end: float) -> Counter[str]:
        """The errors of requests that were under way at some time between two moments."""
        with self._lock:
            return Counter(
                outcome.detail for outcome in self._failures if outcome.ended >= begin and outcome.begun <= end
            )


def judge(error: Exception) -> tuple[Verdict, str]:
    """The verdict on an exception, and its kind in a few words."""
    if isinstance(error, WrongAnswer):
        return "wrong", str(error)[:200]
    if isinstance(error, NoAnswer | DeadlineExceeded | TimeoutError):
        return "lost", f"{type(error).__name__}: {error}"[:200]
    if isinstance(error, ClientError):
        return "refused", " ".join(filter(None, (type(error).__name__, str(error.status or ""))))
    return _judge_foreign(error)


def _judge_foreign(error: Exception) -> tuple[Verdict, str]:
    """Errors of tritonclient and http.client."""
    status = getattr(error, "status", getattr(error, "code", None))  # of tritonclient, of grpc
    code = str(status() if callable(status) else "")
    if "DEADLINE_EXCEEDED" in code:
        return "lost", f"gRPC {code}"
    if code:
        return "refused", f"gRPC {code.removeprefix('StatusCode.')}"
    text = str(error)
    return "refused", text if text.startswith("HTTP ") else type(error).__name__


# Senders: our clients, Triton's own clients, and bare HTTP; over both protocols.

# By itself, gRPC's library waits up to two minutes before it tries a server again that was away.
_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]

# Outputs by name, and the version that computed them if the client reports it.
Answer = tuple[dict[str, AnyArray], int | None]


class Sender(ABC):
    """Sends requests of one kind. Used by one thread."""

    name: str

    @abstractmethod
    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        """Send one request and wait for its answer; any exception is an error that the user of such a client sees."""

    def close(self) -> None:  # noqa: B027 - not all keep one
        """Close the connections."""


class OurClient(Sender):
    """graphkiln's blocking client; with an admin key its tensors are in shared memory."""

    def __init__(self, url: str, reach: Reach, *, retries: int = 0, admin_key: str = "") -> None:
        self.name = f"client {protocol(url)}{', retrying' if retries else ''}"
        if admin_key:
            self.name = f"shared memory {protocol(url)}"
        self._stack = ExitStack()
        security: Security = {**reach.security, "admin_key": admin_key}
        client = self._stack.enter_context(Client(url, timeout_s=DEADLINE_S, max_retries=retries, **security))
        self._client = self._stack.enter_context(client.shared_memory()) if admin_key else client

    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        return self._client.model(model.name, version).infer(feeds), None

    def close(self) -> None:
        self._stack.close()


class TritonGrpc(Sender):
    """Triton's own gRPC client."""

    name = "tritonclient grpc"

    def __init__(self, reach: Reach) -> None:
        self._client = triton_grpc.InferenceServerClient(**reach.triton_grpc(), channel_args=_RECONNECT)

    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        inputs = _triton_inputs(triton_grpc, model, feeds)
        result = self._client.infer(model.name, inputs, model_version=version, client_timeout=DEADLINE_S)
        response = result.get_response()
        return {each.name: result.as_numpy(each.name) for each in response.outputs}, int(response.model_version)

    def close(self) -> None:
        self._client.close()


class TritonHttp(Sender):
    """Triton's own HTTP client."""

    name = "tritonclient http"

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._client: Any = None

    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        if self._client is None:  # in the thread that uses it: its sockets belong to the thread's event loop
            self._client = triton_http.InferenceServerClient(
                **self._reach.triton_http(), connection_timeout=DEADLINE_S, network_timeout=DEADLINE_S
            )
        result = self._client.infer(model.name, _triton_inputs(triton_http, model, feeds), model_version=version)
        response = result.get_response()
        names = [each["name"] for each in response["outputs"]]
        return {name: result.as_numpy(name) for name in names}, int(response["model_version"])


class BareHttp(Sender):
    """`http.client` with one connection that is kept alive; tensors as JSON, or as binary data."""

    def __init__(self, reach: Reach, *, binary: bool) -> None:
        self.name = "http.client binary" if binary else "http.client JSON"
        self._reach = reach
        self._binary = binary
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        body, headers = binary_request(model, feeds) if self._binary else json_request(model, feeds)
        path = f"/v2/models/{model.name}{'/versions/' + version if version else ''}/infer"
        response, content = self._send(path, body, headers)
        if response.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"HTTP {response.status}")
        return read_response(response, content)

    def _send(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[http.client.HTTPResponse, bytes]:
        if self._connection is None:
            self._connection = self._reach.connect_http(DEADLINE_S)
        try:
            self._connection.request("POST", path, body, headers)
            response = self._connection.getresponse()
            content = response.read()
        except TimeoutError as error:
            self.close()
            raise NoAnswer(f"within {DEADLINE_S:.0f} s") from error
        except BaseException:
            self.close()
            raise
        if response.will_close:
            self.close()
        return response, content

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def protocol(url: str) -> str:
    """`http` or `grpc`, with TLS or without."""
    return url.partition(":")[0].removesuffix("s")


def json_request(model: SoakModel, feeds: Arrays) -> tuple[bytes, dict[str, str]]:
    """A request with its tensors in JSON."""
    inputs = [{**_tensor(model, name, array), "data": _plain(array)} for name, array in feeds.items()]
    return json.dumps({"inputs": inputs}).encode(), {"Content-Type": "application/json"}


def binary_request(model: SoakModel, feeds: Arrays) -> tuple[bytes, dict[str, str]]:
    """A request with its tensors behind the JSON, and so the response. Source: Triton's binary tensor extension."""
    inputs, parts = [], []
    for name, array in feeds.items():
        parts.append(to_bytes(array))
        inputs.append({**_tensor(model, name, array), "parameters": {"binary_data_size": len(parts[-1])}})
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return header + b"".join(parts), {"Inference-Header-Content-Length": str(len(header))}


def to_bytes(array: AnyArray) -> bytes:
    """A tensor as Triton's protocol carries it: strings with their length in front."""
    if array.dtype.kind != "O":
        return array.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in array.ravel())


def read_response(response: http.client.HTTPResponse, content: bytes) -> Answer:
    """The outputs of a response, in JSON or behind it."""
    length = int(response.headers.get("Inference-Header-Content-Length", len(content)))
    header, rest = json.loads(content[:length]), content[length:]
    outputs = {}
    for output in header["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        raw = output.get("data") if size is None else None
        if size is not None:
            raw, rest = rest[:size], rest[size:]
        outputs[output["name"]] = from_bytes(output["datatype"], output["shape"], raw)
    return outputs, int(header["model_version"])


def from_bytes(datatype: str, shape: list[int], raw: Any) -> AnyArray:
    """A tensor of a response: of bytes as `to_bytes` makes them, or of a list in JSON."""
    if datatype == "BYTES":
        texts = [text.encode() for text in raw] if isinstance(raw, list) else _split_texts(raw)
        return np.array(texts, dtype=object).reshape(shape)
    dtype = {"FP32": np.float32, "INT64": np.int64}[datatype]
    array: AnyArray = np.array(raw, dtype) if isinstance(raw, list) else np.frombuffer(raw, dtype)
    return array.reshape(shape)


def _split_texts(raw: bytes) -> list[bytes]:
    texts = []
    while raw:
        end = 4 + int.from_bytes(raw[:4], "little")
        texts.append(raw[4:end])
        raw = raw[end:]
    return texts


def _plain(array: AnyArray) -> Iterable[Any]:
    if array.dtype.kind == "O":
        return [text.decode() for text in array.ravel()]
    values: list[Any] = array.ravel().tolist()
    return values


def _tensor(model: SoakModel, name: str, array: AnyArray) -> dict[str, Any]:
    return {"name": name, "datatype": model.inputs[name][0], "shape": list(array.shape)}


def _triton_inputs(module: Any, model: SoakModel, feeds: Arrays) -> list[Any]:
    inputs = []
    for name, array in feeds.items():
        tensor = module.InferInput(name, list(array.shape), model.inputs[name][0])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def close_quietly(sender: Sender) -> None:
    """Close a sender whose server may be gone."""
    with suppress(Exception):
        sender.close()


# Classification of images, compared with labels and scores that are computed in this process.

IMAGES = tuple(sorted(DIGIT_IMAGES.glob("*.png")))


class Classifying(Closeable):
    """Sends images, alone and many at once."""

    def __init__(self, url: str, reach: Reach) -> None:
        self.name = f"classify {protocol(url)}"
        self._client = Client(url, timeout_s=DEADLINE_S, max_retries=0, **reach.security)

    def ask(self, chance: random.Random) -> None:
        """Classifies one image, or all.

        Raises:
            WrongAnswer: A label or score is not the reference's.
            ClientError: The request failed.
        """
        digits = self._client.model("digits")  # metadata, labels and preprocessing are asked for anew
        top_k = chance.randint(1, 10)
        if chance.random() < 0.7:
            image = chance.choice(IMAGES)
            check(image, digits.classify(image, top_k=top_k), top_k)
            return
        for image, result in zip(IMAGES, digits.classify_many(IMAGES, top_k=top_k), strict=True):
            if isinstance(result, ClientError):
                raise result
            check(image, result, top_k)

    def close(self) -> None:
        self._client.close()


def check(image: Path, result: Result, top_k: int) -> None:
    """Compare a ranking with the reference.

    Raises:
        WrongAnswer: It is another one.
    """
    scores = expected_scores(image)
    best = np.argsort(-scores, kind="stable")[:top_k]
    labels = digit_labels(int(result.version))
    got = [(entry.index, entry.label) for entry in result.classifications]
    if got != [(int(index), labels[index]) for index in best]:
        raise WrongAnswer(f"{image.name} is {got[:3]} instead of {[labels[index] for index in best[:3]]}")
    if not np.allclose([entry.score for entry in result.classifications], scores[best], TOLERANCE, TOLERANCE):
        raise WrongAnswer(f"{image.name} has other scores: {result.classifications[:2]}")


@cache
def expected_scores(image: Path) -> AnyArray:
    """The digits model's scores of an image `[10]`: shrunk to 32 x 32 by Pillow, and scaled to -1..1."""
    with Image.open(image) as opened:
        pixels = np.asarray(opened.convert("L").resize((32, 32), Image.Resampling.BILINEAR), np.float32)
    sample = ((pixels / 255 - 0.5) / 0.5)[np.newaxis, np.newaxis]
    scores: AnyArray = digits_reference(1, {"INPUT_0": sample})["OUTPUT_0"][0]
    return scores


_PAUSE_S = 0.08  # mean pause of a sender between two requests: load enough to hit every fault, on two cores
_REFUSED_PAUSE_S = 0.4  # after a refusal
_TASKS = 3
_LARGE_SHARE = 0.05
_JOIN_S = 60.0


class Versions:
    """Versions that may answer. Thread-safe: sets are replaced, not changed."""

    def __init__(self) -> None:
        self._live = {model.name: frozenset(model.versions) for model in MODELS}
        self._ever = dict(self._live)

    def add(self, model: str, version: int) -> None:
        """From now on a version may answer."""
        self._ever[model] |= {version}

    def announce(self, model: str, version: int) -> None:
        """A version is live: it is asked for by its number, too."""
        self._live[model] |= {version}

    def withdraw(self, model: str, version: int) -> None:
        """A version is no longer asked for by its number."""
        self._live[model] -= {version}

    def to_ask(self, model: str, chance: random.Random) -> str:
        """A version for a request; most name none."""
        return str(chance.choice(sorted(self._live[model]))) if chance.random() < 0.4 else ""

    def check(self, model: SoakModel, version: str, feeds: Arrays, answer: Answer) -> None:
        """Compare an answer with the reference of the version that gave it.

        Raises:
            WrongAnswer: It is not what any version that may answer computes.
        """
        outputs, reported = answer
        if version and reported is not None and reported != int(version):
            raise WrongAnswer(f"{model.name} version {reported} answered in place of {version}")
        exact = version or reported
        candidates = [int(exact)] if exact else sorted(self._ever[model.name])
        if reported is not None and reported not in self._ever[model.name]:
            raise WrongAnswer(f"{model.name} version {reported} answered: it should not be live")
        differences = [difference(model.reference(candidate, feeds), outputs) for candidate in candidates]
        if all(differences):
            raise WrongAnswer(f"{model.name} version {exact or 'any'}: {differences[0]}")


class Traffic:
    """Senders, each in a thread, until it is stopped.

    Args:
        service: What they ask.
        ledger: Where they note what became of each request.
        seed: Of all random choices.
        senders: How many of them; None for all.
    """

    def __init__(self, service: Service, ledger: Ledger, seed: int, *, senders: int | None = None) -> None:
        self.versions = Versions()
        self._service = service
        self._ledger = ledger
        self._seed = seed
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=job, daemon=True) for job in self._jobs()[:senders]]

    def _jobs(self) -> list[Callable[[], None]]:
        reach, key = self._service.reach, self._service.admin_key
        make: list[Callable[[], Sender]] = [
            partial(OurClient, reach.http_url, reach),
            partial(OurClient, reach.grpc_url, reach),
            partial(OurClient, reach.http_url, reach, retries=4),
            partial(OurClient, reach.grpc_url, reach, retries=4),
            partial(OurClient, reach.http_url, reach, retries=2, admin_key=key),
            partial(OurClient, reach.grpc_url, reach, retries=2, admin_key=key),
            partial(TritonGrpc, reach),
            partial(TritonHttp, reach),
            partial(BareHttp, reach, binary=False),
            partial(BareHttp, reach, binary=True),
        ]
        jobs: list[Callable[[], None]] = [partial(self._send, each, n) for n, each in enumerate(make)]
        urls = (reach.http_url, reach.grpc_url)
        jobs += [partial(self._classify, url, 100 + n) for n, url in enumerate(urls)]
        return jobs + [partial(self._send_async, url, 200 + n) for n, url in enumerate(urls)]

    def start(self) -> None:
        """Start all senders."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> int:
        """Wait until each sender has ended its last request; return how many have not."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._ledger.give_up_on_overdue()
        return sum(thread.is_alive() for thread in self._threads)

    def _pause(self, chance: random.Random, last: Ticket) -> bool:
        """Wait between two requests; whether there is to be another."""
        return not self._stopping.wait(_pause_s(chance, last))

    def _request(self, chance: random.Random) -> tuple[SoakModel, str, Arrays]:
        model = chance.choice(MODELS)
        large = chance.random() < _LARGE_SHARE
        rows = model.largest_batch if large else chance.randint(1, min(6, model.largest_batch))
        feeds = model.feeds(np.random.default_rng(chance.getrandbits(32)), rows)
        return model, self.versions.to_ask(model.name, chance), feeds

    def _send(self, make: Callable[[], Sender], number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        sender, last = make(), Ticket()
        while self._pause(chance, last):
            model, version, feeds = self._request(chance)
            with self._ledger.request(sender.name) as last:
                self.versions.check(model, version, feeds, sender.ask(model, version, feeds))
        close_quietly(sender)

    def _classify(self, url: str, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        last = Ticket()
        with Classifying(url, self._service.reach) as classifying:
            while self._pause(chance, last):
                with self._ledger.request(classifying.name) as last:
                    classifying.ask(chance)

    def _send_async(self, url: str, number: int) -> None:
        asyncio.run(self._send_in_loop(url, number))

    async def _send_in_loop(self, url: str, number: int) -> None:
        """Some tasks that share a client."""
        async with AsyncExitStack() as stack:
            security = self._service.reach.security
            client = await stack.enter_async_context(AsyncClient(url, timeout_s=DEADLINE_S, max_retries=0, **security))
            name = f"async client {protocol(url)}"
            await asyncio.gather(*(self._task(client, name, number * 10 + task) for task in range(_TASKS)))

    async def _task(self, client: AsyncClient, name: str, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        last = Ticket()
        while not self._stopping.is_set():
            await asyncio.sleep(_TASKS * _pause_s(chance, last))
            model, version, feeds = self._request(chance)
            with self._ledger.request(name) as last:
                answer = await client.model(model.name, version).infer(feeds)
                self.versions.check(model, version, feeds, (answer, None))


def _pause_s(chance: random.Random, last: Ticket) -> float:
    """Random seconds between two requests."""
    return chance.expovariate(1 / (_REFUSED_PAUSE_S if last.verdict == "refused" else _PAUSE_S))

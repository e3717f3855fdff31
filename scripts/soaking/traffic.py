"""Send traffic with all kinds of clients, compare every answer with its reference, and count the outcomes."""

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

# Each request ends as right, wrong, refused (with an error) or lost.

Verdict = Literal["right", "wrong", "refused", "lost"]

DEADLINE_S = 30.0  # for every request; one without answer or error by then is lost
GRACE_S = 15.0  # allowed delay of a call beyond its deadline on a busy machine


class WrongAnswer(Exception):
    """An answer differs from the reference."""


class NoAnswer(Exception):
    """A request got neither an answer nor an error before its deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of a request without a correct answer.

    Attributes:
        sender: Name of the sender.
        verdict: `wrong`, `refused` or `lost`.
        detail: The error, or the difference.
        begun: Time of sending; monotonic seconds.
        ended: Time of the outcome.
    """

    sender: str
    verdict: Verdict
    detail: str
    begun: float
    ended: float


@dataclass
class Ticket:
    """State of a request.

    Attributes:
        verdict: Outcome, once it is known.
    """

    verdict: Verdict = "right"


class Ledger:
    """Count outcomes, and keep those that are not right. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, Verdict]] = Counter()
        self._failures: list[Outcome] = []
        self._in_flight: dict[int, tuple[str, float]] = {}
        self._next = 0

    @contextmanager
    def request(self, sender: str) -> Iterator[Ticket]:
        """Wrap a request and the check of its answer: exceptions become outcomes."""
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
                return  # already counted as lost
            self._add(Outcome(sender=sender, verdict=verdict, detail=detail, begun=begun, ended=time.monotonic()))

    def _add(self, outcome: Outcome) -> None:
        self._counts[outcome.sender, outcome.verdict] += 1
        if outcome.verdict != "right":
            self._failures.append(outcome)

    def give_up_on_overdue(self) -> None:
        """Count requests far beyond their deadline as lost."""
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
        """Errors of requests in flight during an interval."""
        with self._lock:
            return Counter(
                outcome.detail for outcome in self._failures if outcome.ended >= begin and outcome.begun <= end
            )


def judge(error: Exception) -> tuple[Verdict, str]:
    """Verdict on an exception, and its kind."""
    if isinstance(error, WrongAnswer):
        return "wrong", str(error)[:200]
    if isinstance(error, NoAnswer | DeadlineExceeded | TimeoutError):
        return "lost", f"{type(error).__name__}: {error}"[:200]
    if isinstance(error, ClientError):
        return "refused", " ".join(filter(None, (type(error).__name__, str(error.status or ""))))
    return _judge_foreign(error)


def _judge_foreign(error: Exception) -> tuple[Verdict, str]:
    """Verdict on errors of tritonclient and http.client."""
    status = getattr(error, "status", getattr(error, "code", None))  # of tritonclient, of grpc
    code = str(status() if callable(status) else "")
    if "DEADLINE_EXCEEDED" in code:
        return "lost", f"gRPC {code}"
    if code:
        return "refused", f"gRPC {code.removeprefix('StatusCode.')}"
    text = str(error)
    return "refused", text if text.startswith("HTTP ") else type(error).__name__


# Senders: our clients, Triton's clients, and http.client, over both protocols.

# By default gRPC waits up to two minutes before it reconnects.
_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]

# Outputs by name, and the version, if the client reports it.
Answer = tuple[dict[str, AnyArray], int | None]


class Sender(ABC):
    """Send requests with one kind of client, from one thread."""

    name: str

    @abstractmethod
    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        """Send a request and wait for the answer; exceptions are those of the client."""

    def close(self) -> None:  # noqa: B027 - not all keep one
        """Close the connections."""


class OurClient(Sender):
    """graphkiln's blocking client; with an admin key it uses shared memory."""

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
    """Triton's gRPC client."""

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
    """Triton's HTTP client."""

    name = "tritonclient http"

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._client: Any = None

    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        if self._client is None:  # created in its thread, whose event loop owns the sockets
            self._client = triton_http.InferenceServerClient(
                **self._reach.triton_http(), connection_timeout=DEADLINE_S, network_timeout=DEADLINE_S
            )
        result = self._client.infer(model.name, _triton_inputs(triton_http, model, feeds), model_version=version)
        response = result.get_response()
        names = [each["name"] for each in response["outputs"]]
        return {name: result.as_numpy(name) for name in names}, int(response["model_version"])


class BareHttp(Sender):
    """`http.client` with one persistent connection; tensors in JSON or binary."""

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
    """Encode a request with tensors in JSON."""
    inputs = [{**_tensor(model, name, array), "data": _plain(array)} for name, array in feeds.items()]
    return json.dumps({"inputs": inputs}).encode(), {"Content-Type": "application/json"}


def binary_request(model: SoakModel, feeds: Arrays) -> tuple[bytes, dict[str, str]]:
    """Encode a request with binary tensors. Source: Triton's binary tensor extension."""
    inputs, parts = [], []
    for name, array in feeds.items():
        parts.append(to_bytes(array))
        inputs.append({**_tensor(model, name, array), "parameters": {"binary_data_size": len(parts[-1])}})
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return header + b"".join(parts), {"Inference-Header-Content-Length": str(len(header))}


def to_bytes(array: AnyArray) -> bytes:
    """Serialize a tensor for Triton: strings are prefixed with their length."""
    if array.dtype.kind != "O":
        return array.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in array.ravel())


def read_response(response: http.client.HTTPResponse, content: bytes) -> Answer:
    """Decode the outputs of a response, in JSON or binary."""
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
    """Decode a tensor of a response: bytes as made by `to_bytes`, or a JSON list."""
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


# Classification of images, compared with labels and scores computed in this process.

IMAGES = tuple(sorted(DIGIT_IMAGES.glob("*.png")))


class Classifying(Closeable):
    """Classify images, one or many at a time."""

    def __init__(self, url: str, reach: Reach) -> None:
        self.name = f"classify {protocol(url)}"
        self._client = Client(url, timeout_s=DEADLINE_S, max_retries=0, **reach.security)

    def ask(self, chance: random.Random) -> None:
        """Classify one image, or all.

        Raises:
            WrongAnswer: A label or score differs from the reference.
            ClientError: The request failed.
        """
        digits = self._client.model("digits")  # fetches metadata, labels and preprocessing again
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
        WrongAnswer: They differ.
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
    """Scores `[10]` of the digits model for an image, resized to 32 x 32 by Pillow and scaled to -1..1."""
    with Image.open(image) as opened:
        pixels = np.asarray(opened.convert("L").resize((32, 32), Image.Resampling.BILINEAR), np.float32)
    sample = ((pixels / 255 - 0.5) / 0.5)[np.newaxis, np.newaxis]
    scores: AnyArray = digits_reference(1, {"INPUT_0": sample})["OUTPUT_0"][0]
    return scores


_PAUSE_S = 0.08  # mean pause between two requests of a sender: enough load on two cores to meet every fault
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
        """Allow a version to answer."""
        self._ever[model] |= {version}

    def announce(self, model: str, version: int) -> None:
        """Request a live version by its number, too."""
        self._live[model] |= {version}

    def withdraw(self, model: str, version: int) -> None:
        """Stop to request a version by its number."""
        self._live[model] -= {version}

    def to_ask(self, model: str, chance: random.Random) -> str:
        """Choose a version for a request; mostly none."""
        return str(chance.choice(sorted(self._live[model]))) if chance.random() < 0.4 else ""

    def check(self, model: SoakModel, version: str, feeds: Arrays, answer: Answer) -> None:
        """Compare an answer with the reference of its version.

        Raises:
            WrongAnswer: No allowed version computes it.
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
    """Run senders, each in a thread, until `stop`.

    Args:
        service: The service.
        ledger: Counts the outcomes.
        seed: Random seed.
        senders: Number of senders; None for all.
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
        """Wait until each sender has finished its last request; return the number of those that have not."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._ledger.give_up_on_overdue()
        return sum(thread.is_alive() for thread in self._threads)

    def _pause(self, chance: random.Random, last: Ticket) -> bool:
        """Wait between two requests; return false to stop."""
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
        """Run some tasks that share a client."""
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

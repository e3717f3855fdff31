"""Send traffic with all kinds of clients, compare every answer with its reference, and count the outcomes."""

from __future__ import annotations

import asyncio
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from PIL import Image

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, DeadlineExceeded
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
HEADER_LENGTH = "Inference-Header-Content-Length"


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
    # Errors of tritonclient, of grpc and of http.client.
    status = getattr(error, "status", getattr(error, "code", None))
    code = str(status() if callable(status) else "")
    if "DEADLINE_EXCEEDED" in code:
        return "lost", f"gRPC {code}"
    if code:
        return "refused", f"gRPC {code.removeprefix('StatusCode.')}"
    text = str(error)
    return "refused", text if text.startswith("HTTP ") else type(error).__name__


# Senders: each has a client, and asks a model for the outputs of some inputs.

# By default gRPC waits up to two minutes before it reconnects.
_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]

ClosedClient = TypeVar("ClosedClient", bound=Any)
# Outputs by name, and the version, if the client reports it.
Answer = tuple[dict[str, AnyArray], int | None]
# Sends a request to a version of a model (any, if empty) and waits for the answer; raises what its client raises.
Ask = Callable[[SoakModel, str, Arrays], Answer]


@contextmanager
def our_client(url: str, reach: Reach, *, retries: int = 0, admin_key: str = "") -> Iterator[Ask]:
    """The blocking client of graphkiln; with an admin key it uses shared memory."""
    security: Security = {**reach.security, "admin_key": admin_key}
    with _closed_quietly(ExitStack()) as stack:
        client = stack.enter_context(Client(url, timeout_s=DEADLINE_S, max_retries=retries, **security))
        used = stack.enter_context(client.shared_memory()) if admin_key else client
        yield lambda model, version, feeds: (used.model(model.name, version).infer(feeds), None)


@contextmanager
def tritonclient_grpc(reach: Reach) -> Iterator[Ask]:
    """Triton's gRPC client."""
    client = triton_grpc.InferenceServerClient(**reach.triton_grpc(), channel_args=_RECONNECT)

    def ask(model: SoakModel, version: str, feeds: Arrays) -> Answer:
        inputs = [
            triton_grpc.InferInput(name, array.shape, model.inputs[name][0]).set_data_from_numpy(array)
            for name, array in feeds.items()
        ]
        result = client.infer(model.name, inputs, model_version=version, client_timeout=DEADLINE_S)
        response = result.get_response()
        return {each.name: result.as_numpy(each.name) for each in response.outputs}, int(response.model_version)

    with _closed_quietly(client):
        yield ask


@contextmanager
def tritonclient_http(reach: Reach) -> Iterator[Ask]:
    """Triton's HTTP client, whose sockets belong to the thread that made it."""
    client = triton_http.InferenceServerClient(
        **reach.triton_http(), connection_timeout=DEADLINE_S, network_timeout=DEADLINE_S
    )

    def ask(model: SoakModel, version: str, feeds: Arrays) -> Answer:
        return read_result(client.infer(model.name, http_inputs(model, feeds), model_version=version))

    with _closed_quietly(client):
        yield ask


@contextmanager
def bare_http(reach: Reach, *, binary: bool) -> Iterator[Ask]:
    """`http.client` with one persistent connection, and tensors in JSON or binary."""
    connection = reach.connect_http(DEADLINE_S)

    def ask(model: SoakModel, version: str, feeds: Arrays) -> Answer:
        path = f"/v2/models/{model.name}{'/versions/' + version if version else ''}/infer"
        try:
            connection.request("POST", path, *http_request(model, feeds, binary=binary))
            response = connection.getresponse()
            content = response.read()
        except BaseException as error:
            connection.close()  # the next request opens it again
            if isinstance(error, TimeoutError):
                raise NoAnswer(f"within {DEADLINE_S:.0f} s") from error
            raise
        if response.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"HTTP {response.status}")
        return read_response(response, content)

    with closing(connection):
        yield ask


@contextmanager
def _closed_quietly(client: ClosedClient) -> Iterator[ClosedClient]:
    """Close a client whose server may be gone."""
    try:
        yield client
    finally:
        with suppress(Exception):
            client.close()


def http_inputs(model: SoakModel, feeds: Arrays, *, binary: bool = True) -> list[Any]:
    """Inputs of Triton's HTTP client, as binary tensors or in JSON."""
    return [
        triton_http.InferInput(name, list(array.shape), model.inputs[name][0]).set_data_from_numpy(array, binary)
        for name, array in feeds.items()
    ]


def http_request(model: SoakModel, feeds: Arrays, *, binary: bool) -> tuple[bytes, dict[str, str]]:
    """Encode body and headers of an HTTP request; outputs are requested in the same form as the inputs."""
    outputs = [triton_http.InferRequestedOutput(name, binary) for name in model.reference(1, feeds)]
    inputs = http_inputs(model, feeds, binary=binary)
    body, header_length = triton_http.InferenceServerClient.generate_request_body(inputs, outputs)
    return body, {"Content-Type": "application/json"} if header_length is None else {HEADER_LENGTH: str(header_length)}


def read_response(response: http.client.HTTPResponse, content: bytes) -> Answer:
    """Decode an HTTP response."""
    length = response.headers.get(HEADER_LENGTH)
    parse = triton_http.InferenceServerClient.parse_response_body
    return read_result(parse(content, header_length=None if length is None else int(length)))


def read_result(result: Any) -> Answer:
    """Outputs and version of a result of Triton's HTTP client."""
    response = result.get_response()
    outputs = {each["name"]: result.as_numpy(each["name"]) for each in response["outputs"]}
    # Strings in JSON are decoded as `str`, in binary tensors as `bytes`.
    texts = {name: array for name, array in outputs.items() if array.dtype.kind == "O" and array.size}
    for name, array in texts.items():
        encoded = [text.encode() if isinstance(text, str) else text for text in array.ravel()]
        outputs[name] = np.array(encoded, dtype=object).reshape(array.shape)
    return outputs, int(response["model_version"])


def protocol(url: str) -> str:
    """`http` or `grpc`, with TLS or without."""
    return url.partition(":")[0].removesuffix("s")


# Classification of images, compared with labels and scores computed in this process.

IMAGES = tuple(sorted(DIGIT_IMAGES.glob("*.png")))


def classify(client: Client, chance: random.Random) -> None:
    """Classify one image, or all.

    Raises:
        WrongAnswer: A label or score differs from the reference.
        ClientError: The request failed.
    """
    digits = client.model("digits")  # fetches metadata, labels and preprocessing again
    top_k = chance.randint(1, 10)
    if chance.random() < 0.7:
        image = chance.choice(IMAGES)
        check(image, digits.classify(image, top_k=top_k), top_k)
        return
    for image, result in zip(IMAGES, digits.classify_many(IMAGES, top_k=top_k), strict=True):
        if isinstance(result, ClientError):
            raise result
        check(image, result, top_k)


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
        urls = (reach.http_url, reach.grpc_url)
        senders: dict[str, Callable[[], AbstractContextManager[Ask]]] = {
            **{f"client {protocol(url)}": partial(our_client, url, reach) for url in urls},
            **{f"client {protocol(url)}, retrying": partial(our_client, url, reach, retries=4) for url in urls},
            **{
                f"shared memory {protocol(url)}": partial(our_client, url, reach, retries=2, admin_key=key)
                for url in urls
            },
            "tritonclient grpc": partial(tritonclient_grpc, reach),
            "tritonclient http": partial(tritonclient_http, reach),
            "http.client JSON": partial(bare_http, reach, binary=False),
            "http.client binary": partial(bare_http, reach, binary=True),
        }
        jobs: list[Callable[[], None]] = [
            partial(self._send, name, sender, number) for number, (name, sender) in enumerate(senders.items())
        ]
        jobs += [partial(self._classify, url, 100 + number) for number, url in enumerate(urls)]
        jobs += [partial(self._send_async, url, 200 + number) for number, url in enumerate(urls)]
        return jobs

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

    def _request(self, chance: random.Random) -> tuple[SoakModel, str, Arrays]:
        model = chance.choice(MODELS)
        large = chance.random() < _LARGE_SHARE
        rows = model.largest_batch if large else chance.randint(1, min(6, model.largest_batch))
        feeds = model.feeds(np.random.default_rng(chance.getrandbits(32)), rows)
        return model, self.versions.to_ask(model.name, chance), feeds

    def _send(self, name: str, sender: Callable[[], AbstractContextManager[Ask]], number: int) -> None:
        chance, last = random.Random(self._seed * 1000 + number), Ticket()
        with sender() as ask:
            while not self._stopping.wait(_pause_s(chance, last)):
                model, version, feeds = self._request(chance)
                with self._ledger.request(name) as last:
                    self.versions.check(model, version, feeds, ask(model, version, feeds))

    def _classify(self, url: str, number: int) -> None:
        chance, last = random.Random(self._seed * 1000 + number), Ticket()
        with Client(url, timeout_s=DEADLINE_S, max_retries=0, **self._service.reach.security) as client:
            while not self._stopping.wait(_pause_s(chance, last)):
                with self._ledger.request(f"classify {protocol(url)}") as last:
                    classify(client, chance)

    def _send_async(self, url: str, number: int) -> None:
        asyncio.run(self._run_tasks(url, number))

    async def _run_tasks(self, url: str, number: int) -> None:
        """Send from some tasks that share a client."""
        security = self._service.reach.security
        async with AsyncClient(url, timeout_s=DEADLINE_S, max_retries=0, **security) as client:

            async def send(task: int) -> None:
                chance, last = random.Random(self._seed * 1000 + number * 10 + task), Ticket()
                while not self._stopping.is_set():
                    await asyncio.sleep(_TASKS * _pause_s(chance, last))
                    model, version, feeds = self._request(chance)
                    with self._ledger.request(f"async client {protocol(url)}") as last:
                        answer = await client.model(model.name, version).infer(feeds)
                        self.versions.check(model, version, feeds, (answer, None))

            await asyncio.gather(*map(send, range(_TASKS)))


def _pause_s(chance: random.Random, last: Ticket) -> float:
    """Random seconds between two requests."""
    return chance.expovariate(1 / (_REFUSED_PAUSE_S if last.verdict == "refused" else _PAUSE_S))

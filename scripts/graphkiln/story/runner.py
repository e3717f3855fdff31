"""Run a story: start every variant, prove it against eager PyTorch, then measure all variants in turn."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from graphkiln.bench.meters import ProcessMeter
from graphkiln.story.preparation import Conversions, ImageSet, ModelFacts, choose_images
from graphkiln.story.results import (
    Judgment,
    Observation,
    Record,
    Round,
    build_document,
    judge,
    judge_parameter_gradients,
)
from graphkiln.story.server import start_server
from graphkiln.story.variants import (
    BASE_GRAPH,
    FUSION_SWITCHES,
    LOWEST_PRECISIONS,
    TOP_K,
    Platform,
    StoryRequest,
    Variant,
    final_variants,
    initial_variants,
    repeat_commands,
    sample_paths,
    setting_flags,
    story_facts,
)
from graphkiln.story.workloads import (
    Predictions,
    Worker,
    Workload,
    eager_workload,
    served_workload,
    session_workload,
    static_workload,
)
from graphkiln_backend.graph.errors import GraphkilnError, InvalidInput, MeasurementError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.text import did_you_mean

ROUNDS = 5
_RECORD_FILE = "record.json"
_EAGER, _REDUCED = _ALWAYS = ("eager", "reduced")  # the reference of all proofs, and the noise of fp32
_BY_TRAINING = 16  # images that the training graph is proven on; its backward pass takes most of the time
_PRECISION_SWITCHES = ("mixed", "int8")  # decide the precision of the final variants


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningVariant:
    """A variant with its running processes.

    Attributes:
        pids: Process ids of the worker and its server.
    """

    variant: Variant
    worker: Worker
    pids: tuple[int, ...]

    def measure(self, number: int, jpegs: Sequence[bytes], seconds: float) -> Round:
        """Measure one round.

        Raises:
            MeasurementError: The workload failed, or its process ended.
        """
        meter = ProcessMeter(*self.pids)
        cpu_s, begun = meter.cpu_s(), time.perf_counter()
        throughput = self.worker.measure(jpegs, seconds)
        cores = (meter.cpu_s() - cpu_s) / (time.perf_counter() - begun)
        return Round(
            number=number,
            per_second=throughput.per_second,
            latencies_ms=tuple(round(latency, 3) for latency in throughput.latencies_ms),
            cores=cores,
            memory_mb=(meter.memory_bytes() or 0) / 1e6,
        )


@contextmanager
def start_variant(
    variant: Variant, conversions: Conversions, request: StoryRequest, platform: Platform
) -> Iterator[RunningVariant]:
    """Start the worker and the server of a variant, and stop them with the context.

    Raises:
        MeasurementError: The variant is not available on this platform, or cannot be started.
        ConversionError: Its graph cannot be converted.
        VerificationError: The outputs of its graph changed.
    """
    if variant.unavailable:
        raise MeasurementError(variant.unavailable)
    model, device = conversions.model, platform.device
    graphs = [conversions.graph(spec) for spec in variant.graphs]
    if "engine=auto" in variant.settings:
        conversions.wait()  # the server measures engines, which a conversion would disturb
    server_pids: tuple[int, ...] = ()
    workload: Workload
    with ExitStack() as stack:
        if variant.kind == "eager":
            workload = partial(eager_workload, request, model.derivative)
        elif variant.kind == "static":
            workload = partial(static_workload, graphs[0], graphs[1], model.preprocess, device)
        elif variant.kind == "session":
            workload = partial(session_workload, graphs[0], model.preprocess, device)
        else:
            name, log = variant.graphs[0].name, request.folder / f"{variant.key}.log"
            flags = setting_flags(name, variant)
            server = stack.enter_context(start_server(graphs[0].parents[2], flags=flags, log=log))
            top_k = TOP_K if variant.kind == "images" else 0
            address = server.grpc_url, name, platform.callers
            workload = partial(served_workload, *address, top_k=top_k, gradient=request.gradient)
            server_pids = (server.pid,)
        worker = stack.enter_context(Worker(workload, variant.title))
        worker.wait_open()
        yield RunningVariant(variant=variant, worker=worker, pids=(worker.pid, *server_pids))


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a story.

    Attributes:
        done_s: Completed seconds of measurement; 0 during the preparation.
        total_s: Total seconds of measurement.
    """

    activity: str
    done_s: float = 0.0
    total_s: float = 0.0
    figure: str = ""


ProgressReport = Callable[[Progress], None]


def _start_order(variant: Variant) -> tuple[bool, bool]:
    """Start eager PyTorch first, then what runs the first graph, while the training graph is exported."""
    return variant.kind != "eager", variant.graph is not BASE_GRAPH


class StoryRunner:
    """A story, with its results stored in the folder of the request."""

    def __init__(self, request: StoryRequest, platform: Platform, *, resume: bool, report: ProgressReport) -> None:
        self._request = request
        self._platform = platform
        self._report = report
        self._path = request.folder / _RECORD_FILE
        self._running: dict[str, RunningVariant] = {}
        if resume:
            self.record = Record.read(self._path)
        else:
            shutil.rmtree(request.folder, ignore_errors=True)
            request.folder.mkdir(parents=True)
            self.record = Record(facts=story_facts(request, platform))

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Known variants in the order of the table; the last two depend on the proven precision."""
        final = self._final_variants() if self.record.precision else ()
        return (*initial_variants(self._platform), *final)

    def _final_variants(self) -> tuple[Variant, ...]:
        fused = not all(self.record.observation(key).refused for key in FUSION_SWITCHES)
        return final_variants(self.record.precision or Precision.FP32, fused=fused)

    @property
    def proven(self) -> bool:
        """True if all judged steps of the chain passed."""
        chain = [self.record.observation(variant.key) for variant in self.variants if not variant.switch]
        return all(observation.passed for observation in chain if observation.judgment)

    def document(self) -> dict[str, Any]:
        """Return the results as the plain data of `--json`."""
        facts = self._request, self._platform, self.record.derivative
        commands = {variant.key: repeat_commands(variant, *facts) for variant in self.variants}
        return build_document(self.variants, self.record, commands)

    def run(self, seconds: float, only: Sequence[str] = ()) -> None:
        """Prepare, prove and measure the variants, except for results in the record.

        Args:
            seconds: Duration of the measurement of each variant, all rounds together.
            only: Keys of the variants to measure; empty for all.

        Raises:
            InvalidInput: A step is unknown.
            GraphkilnError: The model cannot be opened. Errors of other variants are stored in the record.
        """
        known = [variant.key for variant in (*initial_variants(self._platform), *final_variants(Precision.FP32))]
        for key in only:
            if key not in known:
                raise InvalidInput(f"unknown step '{key}'", hint=did_you_mean(key, known))
        self._report(Progress(activity="opening the model"))
        keys = {*only, *_ALWAYS, *(_PRECISION_SWITCHES if {"compiled", "served"} & {*only} else ())} if only else known
        with ExitStack() as stack:
            stack.callback(self._running.clear)
            with Conversions(self._request, self._platform) as conversions:
                images = self._choose_images(conversions.model)

                def start(variants: Sequence[Variant]) -> None:
                    chosen = [
                        variant
                        for variant in variants
                        if variant.key in keys and not self.record.observation(variant.key).refused
                    ]
                    conversions.order(spec for each in chosen if not each.unavailable for spec in each.graphs)
                    for variant in chosen:
                        self._start(variant, conversions, images, stack)

                start(sorted(initial_variants(self._platform), key=_start_order))
                if not self.record.precision:
                    self.record = replace(self.record, precision=self._lowest_proven())
                    self.record.write(self._path)
                start(self._final_variants())
            self._measure(images, seconds)

    def _choose_images(self, model: ModelFacts) -> ImageSet:
        images = choose_images(self._request.samples, model.classes)
        facts = {**self.record.facts, "images": images.description}
        self.record = replace(self.record, facts=facts, derivative=model.derivative)
        images.write(*sample_paths(self._request.folder))
        return images

    def _start(self, variant: Variant, conversions: Conversions, images: ImageSet, stack: ExitStack) -> None:
        """Start and prove one variant, or store the reason why that failed."""
        observation = self.record.observation(variant.key)
        try:
            with ExitStack() as own:
                self._report(Progress(activity=f"preparing: {variant.title}"))
                running = own.enter_context(start_variant(variant, conversions, self._request, self._platform))
                if observation.judgment is None:
                    self._report(Progress(activity=f"proving: {variant.title}"))
                    observation = replace(observation, judgment=self._judge(running, images))
                stack.push(own.pop_all())  # keep it running; a variant that failed is already stopped
        except GraphkilnError as error:
            if variant.kind == "eager":
                raise
            observation = replace(observation, refused=str(error))
        else:
            self._running[variant.key] = running
        self._keep(variant, observation)

    def _judge(self, running: RunningVariant, images: ImageSet) -> Judgment:
        variant, worker = running.variant, running.worker
        kept = {key: self._request.folder / f"{key}.npz" for key in _ALWAYS}
        if variant.kind == "static":
            if not kept[_REDUCED].exists():
                raise MeasurementError("the forward graph is that of step 2, which was not proven")
            by_training, forward = worker.predict(images.evaluation[:_BY_TRAINING]), Predictions.read(kept[_REDUCED])
            predictions = Predictions(scores=np.concatenate([by_training.scores, forward.scores[_BY_TRAINING:]]))
        else:
            predictions = worker.predict(images.evaluation)
        if variant.key in kept:
            predictions.write(kept[variant.key])
        reference = Predictions.read(kept[_EAGER])
        judgment = judge(
            reference, predictions, variant.limits, noise=self._fp32_noise(variant), targets=images.targets
        )
        if variant.kind == "static":
            jpeg = images.evaluation[0]
            expected, noise = self._running["eager"].worker.parameter_gradients(jpeg)
            gradients, _ = worker.parameter_gradients(jpeg)
            judgment = judge_parameter_gradients(judgment, expected, gradients, noise)
        return judgment

    def _fp32_noise(self, variant: Variant) -> float:
        """Return the largest score difference of the fp32 variant of step 2; 0 for variants in fp32."""
        if variant.precision is Precision.FP32:
            return 0.0
        reduced = self.record.observation("reduced").judgment
        if reduced is None:
            raise MeasurementError("the noise of fp32 is unknown because step 2 was not proven")
        return reduced.difference

    def _lowest_proven(self) -> Precision:
        """Return the lowest precision whose switch passed."""
        switches = {variant.precision: variant.key for variant in initial_variants(self._platform) if variant.switch}
        for precision in LOWEST_PRECISIONS[self._platform.device.kind]:
            if self.record.observation(switches[precision]).passed:
                return precision
        return Precision.FP32

    def _measure(self, images: ImageSet, seconds: float) -> None:
        """Measure all variants in turn; each round begins with another variant."""
        round_s = seconds / ROUNDS
        running = [self._running[variant.key] for variant in self.variants if variant.key in self._running]
        total_s, done_s = seconds * len(running), 0.0
        for number in range(ROUNDS):
            first = number % len(running)
            for current in (*running[first:], *running[:first]):
                variant = current.variant
                observation = self.record.observation(variant.key)
                if all(measured.number != number for measured in observation.rounds):
                    progress = Progress(activity=variant.title, done_s=done_s, total_s=total_s)
                    self._report(progress)
                    measured = current.measure(number, images.evaluation, round_s)
                    self._keep(variant, replace(observation, rounds=(*observation.rounds, measured)))
                    figure = f"{variant.title}: {measured.per_second:.1f} images/s"
                    self._report(replace(progress, done_s=done_s + round_s, figure=figure))
                done_s += round_s

    def _keep(self, variant: Variant, observation: Observation) -> None:
        self.record = replace(self.record, seen={**self.record.seen, variant.key: observation})
        self.record.write(self._path)

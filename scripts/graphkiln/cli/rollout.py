"""`graphkiln rollout`: try a new version on live requests, then promote or abort it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.console import print_json, print_table, printable
from graphkiln.cli.options import AsJson
from graphkiln_backend.graph.errors import InvalidInput

if TYPE_CHECKING:
    from graphkiln_backend.server.rollout_changes import Rollout, RolloutStatus
    from graphkiln_backend.server.rollouts import Gates, Latencies, Progress

_DEFAULT_ERRORS = "1%"
_TIMEOUT_S = 600.0  # includes proving and loading the version
_EXAMPLES_SHOWN = 8

_Model = Annotated[
    str, typer.Argument(help="STORE/NAME, as the server serves it; also s3:// and others.", metavar="STORE/NAME")
]
_State = Annotated[
    Path | None,
    typer.Option(
        help="State folder of the server.",
        envvar="GRAPHKILN_STATE",
        show_default="~/.local/state/graphkiln",
        metavar="DIR",
    ),
]
_Timeout = Annotated[
    float, typer.Option(help="Time limit for the server to apply the change.", min=0.001, metavar="SECONDS")
]

app = typer.Typer(help="Try a new version on live requests, then promote or abort it.", no_args_is_help=True)


@app.command()
def start(
    model: _Model,
    version: Annotated[int, typer.Option(help="Version to try.", min=0, metavar="NUMBER")],
    shadow: Annotated[
        str, typer.Option(help="Share of the requests that it computes, too, for comparison.", metavar="SHARE")
    ] = "5%",
    agree: Annotated[
        str, typer.Option(help="Least share of requests with the same decision.", metavar="SHARE", show_default="none")
    ] = "",
    p99_ratio: Annotated[
        float,
        typer.Option(
            help="Largest ratio of the p99 latencies, once it answers requests.",
            min=0,
            metavar="RATIO",
            show_default="none",
        ),
    ] = 0.0,
    errors: Annotated[
        str,
        typer.Option(
            help="Largest share of requests on which it fails.",
            metavar="SHARE",
            show_default=f"{_DEFAULT_ERRORS} with other conditions",
        ),
    ] = "",
    requests: Annotated[
        int, typer.Option(help="Requests to see in each step.", min=0, metavar="NUMBER", show_default="none")
    ] = 0,
    then: Annotated[
        str,
        typer.Option(
            help="Go on by itself with these shares of the traffic, then promote: 10%,50%,100%.",
            metavar="SHARES",
            show_default="wait for promote or traffic",
        ),
    ] = "",
    state: _State = None,
    timeout: _Timeout = _TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Compare the answers of another version with those of the one that serves.

    A share of the requests is also computed by the other version, after they have
    been answered, and the decisions are compared. SHARE is 5% or 0.05.

    With conditions, the rollout is aborted when one is proven to be violated, and
    with --then it goes on by itself when all are met. They are judged by bounds
    that are wrong in at most 5% of all rollouts, however often they are looked at.
    A version that is not proven to agree within --requests is never promoted.
    """
    gates = _gates(agree, p99_ratio, errors, requests, then)
    status = _open(model, state, timeout).start(version, shadow=parse_share(shadow, "--shadow"), gates=gates)
    _show(status, as_json)


@app.command(name="status")
def status_(model: _Model, state: _State = None, as_json: AsJson = False) -> None:
    """Show how a rollout goes: decisions, latencies and failures of both versions."""
    _show(_open(model, state, _TIMEOUT_S).status(), as_json)


@app.command()
def traffic(
    model: _Model,
    share: Annotated[str, typer.Argument(help="10% or 0.1; 0% for none.", metavar="SHARE")],
    state: _State = None,
    timeout: _Timeout = _TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Let the new version answer a share of the requests."""
    _show(_open(model, state, timeout).traffic(parse_share(share, "SHARE")), as_json)


@app.command()
def promote(model: _Model, state: _State = None, timeout: _Timeout = _TIMEOUT_S, as_json: AsJson = False) -> None:
    """Let the new version answer all requests.

    Clients that name a version still get it.
    """
    _show(_open(model, state, timeout).promote(), as_json)


@app.command()
def abort(model: _Model, state: _State = None, timeout: _Timeout = _TIMEOUT_S, as_json: AsJson = False) -> None:
    """Let the version that serves answer all requests, and unload the new one."""
    _show(_open(model, state, timeout).abort(), as_json)


def parse_share(text: str, option: str) -> float:
    """Parse `5%` or `0.05`.

    Raises:
        InvalidInput: The text is not a share.
    """
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        hint = f"{number}%" if number.isdecimal() and int(number) <= 100 else "5% or 0.05"
        raise InvalidInput(f"{option} {text[:40]}: expected a share between 0% and 100%", hint=f"write {hint}")
    return share


def _gates(agree: str, p99_ratio: float, errors: str, requests: int, then: str) -> Gates:
    """Create the conditions.

    Raises:
        InvalidInput: A share is not one, or they do not fit each other.
    """
    from graphkiln_backend.server.rollouts import Gates

    if not (agree or p99_ratio or errors or requests or then):
        return Gates()
    shares = tuple(parse_share(each, "--then") for each in then.split(",")) if then else ()
    if list(shares) != sorted(set(shares)) or 0.0 in shares:
        raise InvalidInput(f"--then {then}: expected shares that grow", hint="--then 10%,50%,100%")
    if then and not (agree and requests):
        raise InvalidInput(
            "--then promotes without asking again: it needs --agree and --requests",
            hint="for example --agree 0.995 --requests 5000",
        )
    return Gates(
        agree=parse_share(agree, "--agree") if agree else 0.0,
        p99_ratio=p99_ratio,
        errors=parse_share(errors or _DEFAULT_ERRORS, "--errors"),
        requests=requests,
        then=shares,
    )


def _open(model: str, state: Path | None, timeout_s: float) -> Rollout:
    from graphkiln_backend.server.rollout_changes import rollout

    return rollout(model, state=state, timeout_s=timeout_s)


# What is shown.


def _show(status: RolloutStatus, as_json: bool) -> None:
    if as_json:
        print_json(document(status))
        return
    typer.echo(_headline(status))
    if status.progress is None:
        return
    print_table((), _rows(status))
    # Requests without an id are told apart by their decisions only.
    last = status.progress.examples[::-1][:_EXAMPLES_SHOWN]
    if examples := Counter((each.request, each.serving, each.candidate) for each in last):
        wanted = status.wanted
        typer.echo(f"The last {len(last)} of {status.progress.disagreed:,} requests with another decision:")
        print_table(
            ("request", f"version {wanted.serving}", f"version {wanted.candidate}"),
            [
                tuple(map(printable, (request or f"{count} without id", *decisions)))
                for (request, *decisions), count in examples.items()
            ],
        )


def document(status: RolloutStatus) -> dict[str, Any]:
    """Return the JSON document of a rollout."""
    progress, verdict = status.progress, status.verdict
    return {
        "model": status.wanted.model,
        "candidate": status.wanted.candidate,
        "serving": status.wanted.serving,
        "phase": status.phase,
        "share": progress.share if progress else 0.0,
        "reason": status.reason,
        "applied": status.is_applied,
        "silence_s": status.silence_s,
        "seconds_left": status.seconds_left,
        "wanted": asdict(status.wanted),
        "agreement": {"low": verdict.low, "high": verdict.high} if verdict else None,
        "gates": {"outcome": verdict.outcome, "reason": verdict.reason} if verdict else None,
        "latency": _latencies(progress) if progress else None,
        "progress": asdict(progress) if progress else None,
    }


def _latencies(progress: Progress) -> dict[str, Any]:
    return {
        name: {"p50_s": latency.p50, "p99_s": latency.p99, "requests": latency.total}
        for name, latency in (("serving", progress.serving_latency), ("candidate", progress.candidate_latency))
    }


def _headline(status: RolloutStatus) -> str:
    wanted, progress = status.wanted, status.progress
    versions = f"{wanted.model}: version {wanted.candidate}"
    if progress is None or not status.phase:
        return f"{versions} is not tried yet: {_waiting(status)}"
    if status.phase == "shadow":
        share = _percent(progress.share)
        return f"{versions} is compared with version {wanted.serving} on {share} of the requests"
    if status.phase == "traffic":
        return f"{versions} answers {_percent(progress.share)} of the requests, version {wanted.serving} the others"
    if status.phase == "promoted":
        return f"{versions} was promoted and answers all requests"
    return f"{versions} was aborted, version {wanted.serving} answers all requests"


def _waiting(status: RolloutStatus) -> str:
    from graphkiln_backend.server.rollout_changes import SILENCE_S

    if status.silence_s > SILENCE_S:
        silence = f"for {_duration(status.silence_s)}"
        return f"no server has written about it {silence}; is one running with this store and --state?"
    return status.reason or "it is being proven and loaded"


def _rows(status: RolloutStatus) -> Iterator[tuple[str, str]]:
    progress, verdict = status.progress, status.verdict
    assert progress is not None  # noqa: S101 - checked by the caller
    assert verdict is not None  # noqa: S101 - belongs to the progress
    decided = progress.agreed + progress.disagreed
    yield "compared", f"{progress.compared:,} requests; {progress.dropped:,} copies dropped, earlier ones under way"
    if status.phase == "shadow" and progress.dropped > progress.compared + progress.failed:
        yield "", "most copies are dropped: the candidate gets only processor time that nothing else needs"
    if decided:
        share = progress.agreed / decided
        bounds = f"between {_percent(verdict.low)} and {_percent(verdict.high)} at 95% confidence"
        yield "same decision", f"{_percent(share)}, {bounds}"
    yield (
        "other decision",
        f"{progress.disagreed:,}"
        + (f", and {progress.undecided:,} are within the noise of the policy" if progress.undecided else ""),
    )
    if progress.answered or status.phase == "traffic":
        yield "answered", f"{progress.answered:,} requests by version {progress.candidate}"
    failures = f"{progress.failed:,} of {progress.requests:,}"
    yield "failed", f"{failures}: {printable(progress.failure)}" if progress.failure else failures
    for name, value in (("p50", 0.5), ("p99", 0.99)):
        yield name, _compared_latency(progress.candidate_latency, progress.serving_latency, value, progress.serving)
    if status.phase == "shadow" and progress.candidate_latency.total:
        yield "", "in shadow on idle processor time: --p99-ratio counts in traffic only"
    yield from _end_rows(status)


def _end_rows(status: RolloutStatus) -> Iterator[tuple[str, str]]:
    from graphkiln_backend.server.rollout_changes import SILENCE_S

    wanted, verdict = status.wanted, status.verdict
    if not status.is_applied:
        yield "asked for", f"{_next_step(wanted.phase, wanted.share)}; the server has not applied it yet"
    if wanted.is_running and wanted.gates.are_set and verdict:
        yield (
            "next",
            f"{_after(wanted.share if wanted.phase == 'traffic' else 0.0, wanted.gates.then)}: {verdict.reason}",
        )
        if (left := status.seconds_left) is not None and verdict.outcome == "wait":
            yield "time left", f"about {_duration(left)}"
    if status.reason and not wanted.is_running:
        yield "reason", printable(status.reason)
    if wanted.is_running and status.silence_s > SILENCE_S:
        yield "server", f"has not written for {_duration(status.silence_s)}: is it running?"


def _compared_latency(candidate: Latencies, serving: Latencies, share: float, version: int) -> str:
    mine, other = candidate.quantile(share), serving.quantile(share)
    if not mine:
        return "-"
    beside = f"; version {version}: {_milliseconds(other)}, ratio {mine / other:.2f}" if other else ""
    return f"{_milliseconds(mine)}{beside}"


def _after(share: float, then: Sequence[float]) -> str:
    following = [each for each in then if each > share]
    if not then:
        return "promote by hand"
    return _next_step("traffic", following[0]) if following else "promotion"


def _next_step(phase: str, share: float) -> str:
    return {"shadow": f"shadow of {_percent(share)}", "traffic": f"{_percent(share)} of the traffic"}.get(phase, phase)


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _duration(seconds: float) -> str:
    from graphkiln.cli.score_display import format_duration

    return format_duration(seconds)

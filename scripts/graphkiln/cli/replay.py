"""`graphkiln replay`: answer recorded requests again with a version, and compare the answers.

The result is printed as JSON or as tables, and written as an HTML report with the changed requests, worst first.
"""

from __future__ import annotations

import base64
import heapq
import io
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.console import (
    Html,
    check_html,
    command_line,
    facts,
    print_json,
    print_table,
    printable,
    progress_bar,
    write_html,
)
from graphkiln.cli.options import COMPUTE_LIMIT_S, AsJson, Cache, Set, local_path, version_folder
from graphkiln_backend.engines.compute_limit import limit_computing
from graphkiln_backend.graph.errors import GraphkilnError, InvalidInput, ManifestError
from graphkiln_backend.graph.text import parse_duration
from graphkiln_backend.repository.version_folders import is_version

if TYPE_CHECKING:
    from graphkiln_backend.engines.base import Session, SessionConfig
    from graphkiln_backend.graph.contract import Contract
    from graphkiln_backend.graph.dtypes import AnyArray
    from graphkiln_backend.graph.preprocess import Preprocess
    from graphkiln_backend.lowering.deployment import Deployment
    from graphkiln_backend.lowering.proven_session import ProvenSession
    from graphkiln_backend.proof.answers import AnswerDifference
    from graphkiln_backend.proof.policy import Limits
    from graphkiln_backend.repository.records import Record, RecordedRequest

_MOST_SHOWN = 50  # requests whose inputs are kept for the report
_UPDATE_EVERY = 50
_COLUMNS = ("request", "time (UTC)", "version", "decision", "difference", "relative L2")
_PRINTED = 10
_NUMBERS = 8  # values of an input that is no image
_SMALLEST_PIXELS, _LARGEST_PIXELS = 96, 256  # sides of a picture


def replay(
    record: Annotated[Path, typer.Argument(help="Folder of serve --record, or of one model in it.", metavar="DIR")],
    model: Annotated[
        str, typer.Option(help="STORE/NAME (newest version) or STORE/NAME:VERSION; also s3:// and others.")
    ],
    since: Annotated[
        str, typer.Option(help="Only requests of this last time, such as 2h.", metavar="TIME", show_default="all")
    ] = "",
    limit: Annotated[
        int | None, typer.Option(help="Only the newest N requests.", min=1, metavar="N", show_default="all")
    ] = None,
    set_: Set = None,
    cache: Cache = "",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Answer recorded requests again with a version.

    The version is built as the server builds it. Its answers are compared with
    the recorded ones by what they decide (top-1 class, boxes, class map, cosine
    of vectors) and by the numeric policy.

    Exit code 1 if a decision changed, or a request could not be answered.
    """
    from graphkiln.cli.lower import open_artifact_cache, read_deployment
    from graphkiln_backend.repository.records import Record

    check_html(html)
    since_ns = time.time_ns() - int(parse_duration(since, "--since", "2h") * 1e9) if since else 0
    name, colon, number = model.rpartition(":")
    path = f"{name}/{number}" if colon and is_version(number) else model
    with local_path(path) as folder, limit_computing(COMPUTE_LIMIT_S), open_artifact_cache(cache) as artifacts:
        version = version_folder(folder).absolute()
        found = Record.find(record, version.parent.name)
        deployment = read_deployment(version, set_, artifacts)
        with progress_bar("replaying", None) as update:
            replayed = replay_record(
                found, deployment, deployment.build(artifacts), since_ns=since_ns, limit=limit, update=update
            )
    document = document_of(replayed, record, version)
    if as_json:
        print_json(document)
    else:
        print_replay(document)
    if html:
        write_html(html, render_page(document, replayed, facts(), command_line()))
    raise typer.Exit(0 if replayed.same == replayed.count else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedRequest:
    """A request whose decision changed, or whose numbers are outside the policy."""

    request_id: str
    time: str
    version: int
    difference: AnswerDifference


@dataclass(kw_only=True, slots=True)
class Replayed:
    """Result of a replay.

    Attributes:
        config: Configuration of the session that answered.
        contract: Contract of the version that answered.
        limits: Names of the policy rows that were applied.
        count: Requests that were answered again.
        same: Those with the same decision.
        equal: Those with the same bits.
        outside: Those with numbers outside the policy.
        digests: Requests that were left out, because only digests of their inputs were recorded.
        versions: Requests by the version that answered the user.
        first: Time of the oldest request.
        last: Time of the newest request.
        changed: Requests with another decision or numbers outside the policy.
        worst: Severity, number, request and inputs of the worst of these.
    """

    config: SessionConfig
    contract: Contract
    limits: set[str] = field(default_factory=set)
    count: int = 0
    same: int = 0
    equal: int = 0
    outside: int = 0
    digests: int = 0
    versions: Counter[int] = field(default_factory=Counter)
    first: str = ""
    last: str = ""
    changed: list[ChangedRequest] = field(default_factory=list)
    worst: list[tuple[tuple[bool, float, float], int, ChangedRequest, Mapping[str, AnyArray]]] = field(
        default_factory=list
    )

    def add(self, request: RecordedRequest, inputs: Mapping[str, AnyArray], difference: AnswerDifference) -> None:
        """Count a request."""
        self.count += 1
        self.same += difference.same
        self.equal += difference.equal
        self.outside += not difference.within
        self.versions[request.version] += 1
        self.first = min(self.first or request.time, request.time)
        self.last = max(self.last, request.time)
        if difference.same and difference.within:
            return
        changed = ChangedRequest(
            request_id=request.request_id, time=request.time, version=request.version, difference=difference
        )
        self.changed.append(changed)
        entry = (difference.severity, -self.count, changed, inputs)
        (heapq.heappush if len(self.worst) < _MOST_SHOWN else heapq.heappushpop)(self.worst, entry)


def replay_record(
    record: Record,
    deployment: Deployment,
    proven: ProvenSession,
    *,
    since_ns: int = 0,
    limit: int | None = None,
    update: Callable[..., None] | None = None,
) -> Replayed:
    """Answer requests with a version.

    Args:
        record: The requests.
        deployment: The version.
        proven: Its session; it is closed.
        since_ns: Leave out requests before this time, in nanoseconds since 1970.
        limit: Number of the newest requests to answer; None for all.
        update: Shows the progress; None for nothing.

    Raises:
        InvalidInput: There is no request of this time, or only digests of inputs were recorded.
    """
    from graphkiln_backend.lowering.acceptance import limits_of
    from graphkiln_backend.proof.answers import AnswerComparison, AnswerDifference
    from graphkiln_backend.proof.policy import BY_PRECISION

    replayed = Replayed(config=proven.config, contract=deployment.version.contract)
    own = limits_of(deployment.saved, proven.config)
    contract = deployment.version.contract
    total = record.count()
    wanted = range(max(0, total - limit), total) if limit else range(total)
    with proven.session as session:
        for number, request in enumerate(record.requests(wanted)):
            if update and number % _UPDATE_EVERY == 0:
                update(completed=number, total=len(wanted))
            if request.time_ns < since_ns:
                continue
            if request.inputs is None:
                replayed.digests += 1
                continue
            # The answers differ by at least the rounding of the lower precision.
            recorded = BY_PRECISION.get(request.precision, own)  # type: ignore[call-overload]
            limits: Limits = max(own, recorded, key=lambda row: row.relative_l2)
            replayed.limits.add(limits.name)
            outputs = _answer(session, request, request.inputs)
            if isinstance(outputs, AnswerDifference):
                replayed.add(request, request.inputs, outputs)
            else:
                difference = AnswerComparison(contract, limits).compare(request.outputs, outputs)
                replayed.add(request, request.inputs, difference)
    if replayed.digests and not replayed.count:
        raise InvalidInput(
            f"nothing can be replayed: {record.path} holds only digests of the inputs",
            hint="serve with --record-inputs full",
        )
    if not replayed.count:
        raise InvalidInput(f"{record.path} holds no request of this time", hint=f"it holds {total}: leave out --since")
    return replayed


def _answer(
    session: Session, request: RecordedRequest, inputs: Mapping[str, AnyArray]
) -> Mapping[str, AnyArray] | AnswerDifference:
    """Compute the recorded outputs, as far as the version has them."""
    from graphkiln_backend.proof.answers import AnswerDifference

    names = [spec.name for spec in session.signature.outputs if spec.name in request.outputs]
    try:
        session.signature.check(inputs)
        return session.run(inputs, names) if names else {}
    except GraphkilnError as error:
        text = f"not answered: {error}"
        return AnswerDifference(same=False, within=False, relative_l2=math.inf, share=1.0, text=text)


def document_of(replayed: Replayed, record: Path, version: Path) -> dict[str, Any]:
    """Return the JSON document; its `changed` requests are in order, worst first."""
    from graphkiln_backend.proof.decision import confidence_interval

    config = replayed.config
    changed = sorted(replayed.changed, key=lambda each: each.difference.severity, reverse=True)
    return {
        "record": str(record),
        "model": version.parent.name,
        "version": int(version.name),
        "engine": config.engine,
        "precision": str(config.precision or "as saved"),
        "requests": replayed.count,
        "first": replayed.first,
        "last": replayed.last,
        "answered_by_versions": {str(number): count for number, count in sorted(replayed.versions.items())},
        "same_decision": replayed.same,
        "same_decision_interval": list(confidence_interval(replayed.same, replayed.count)),
        "bit_equal": replayed.equal,
        "outside_policy": replayed.outside,
        "policy": sorted(replayed.limits),
        "digests_left_out": replayed.digests,
        "changed": [_describe(each) for each in changed],
    }


def _describe(changed: ChangedRequest) -> dict[str, Any]:
    difference = changed.difference
    return {
        "request_id": changed.request_id,
        "time": changed.time,
        "version": changed.version,
        "same_decision": difference.same,
        "within_policy": difference.within,
        "relative_l2": difference.relative_l2,
        "difference": difference.text,
    }


def _short(time: str) -> str:
    """Shorten ISO 8601 to seconds."""
    return time[:19].replace("T", " ")


def _summary(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    count, same = document["requests"], document["same_decision"]
    low, high = document["same_decision_interval"]
    versions = ", ".join(f"{name}: {number:,}" for name, number in document["answered_by_versions"].items())
    policy = ", ".join(document["policy"]) or "none"
    rows = [
        ("requests", f"{count:,} of {document['model']} (version {versions})"),
        ("recorded", f"{_short(document['first'])} to {_short(document['last'])} UTC"),
        ("answered by", f"version {document['version']}, {document['engine']}, {document['precision']}"),
        ("same decision", f"{same:,} of {count:,} = {same / count:.2%} (95%: {low:.2%} to {high:.2%})"),
        ("bit-equal", f"{document['bit_equal']:,}"),
        ("outside the numeric policy", f"{document['outside_policy']:,} (row {policy})"),
    ]
    if left_out := document["digests_left_out"]:
        rows.append(("left out", f"{left_out:,}, recorded as digests"))
    return rows


def _cells(row: Mapping[str, Any]) -> list[str]:
    decision = "same" if row["same_decision"] else "changed"
    return [
        row["request_id"] or "-",
        _short(row["time"]),
        str(row["version"]),
        decision,
        row["difference"],
        f"{row['relative_l2']:.2g}",
    ]


def print_replay(document: Mapping[str, Any]) -> None:
    """Print the summary and the worst requests."""
    print_table((), _summary(document))
    if rows := document["changed"]:
        print_table(_COLUMNS, ([printable(cell) for cell in _cells(row)] for row in rows[:_PRINTED]))
        if len(rows) > _PRINTED:
            print_table((), [("more", f"{len(rows) - _PRINTED:,}: --json or --html")])


def render_page(document: Mapping[str, Any], replayed: Replayed, facts: Mapping[str, str], command: str) -> str:
    """Render the report as a self-contained page."""
    from graphkiln.reporting.report import Report, Section, Table, render

    worst = sorted(replayed.worst, key=lambda each: each[:2], reverse=True)
    rows = [
        [_show_input(inputs, replayed.contract.preprocess), *_cells(_describe(changed))]
        for _, _, changed, inputs in worst
    ]
    changed = document["requests"] - document["same_decision"]
    more = (
        f" The {_MOST_SHOWN} worst of {len(document['changed']):,}." if len(document["changed"]) > _MOST_SHOWN else ""
    )
    report = Report(
        title=f"{changed:,} of {document['requests']:,} decisions changed: {document['model']} {document['version']}",
        about=f"Recorded requests, {_short(document['first'])} to {_short(document['last'])} UTC",
        sections=(
            Section(
                name="summary", title="Summary",
                text="Each answer beside the one that the user got; the interval by Clopper and Pearson (1934).",
                table=Table(columns=("figure", "value"), rows=_summary(document), texts=2),
            ),
            Section(
                name="changed", title="Changed requests, worst first",
                text=f"Decisions that changed, then numbers outside the policy.{more}",
                table=Table(columns=("input", *_COLUMNS), rows=rows, texts=6),
            ),
        ),
        facts=facts,
        command=command,
    )  # fmt: skip
    return render(report)


def _show_input(inputs: Mapping[str, AnyArray], preprocess: Preprocess | None) -> str:
    """Return the first image of a request as HTML, or else the first numbers of each input."""
    from markupsafe import Markup
    from PIL import Image

    if preprocess and len(inputs) == 1:
        (array,) = inputs.values()
        batched = array.ndim > 3
        try:
            picture = Image.fromarray(preprocess.picture(array[0] if batched else array))
        except ManifestError:
            pass
        else:
            picture.thumbnail((_LARGEST_PIXELS, _LARGEST_PIXELS))
            content = io.BytesIO()
            picture.save(content, "PNG")
            encoded = base64.b64encode(content.getvalue()).decode()
            what = f"first of {len(array)} images" if batched and len(array) > 1 else "image"
            width = max(picture.width, _SMALLEST_PIXELS)
            return Markup('<img src="data:image/png;base64,{}" alt="{}" width="{}">').format(encoded, what, width)
    return "; ".join(f"{name} {_numbers(array)}" for name, array in inputs.items())


def _numbers(array: AnyArray) -> str:
    values = ", ".join(
        f"{value:.4g}" if isinstance(value, float) else str(value) for value in array.ravel()[:_NUMBERS].tolist()
    )
    return f"{list(array.shape)}: {values}{', ...' if array.size > _NUMBERS else ''}"

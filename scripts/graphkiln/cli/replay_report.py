"""Result of a replay as JSON, as tables, and as an HTML report with the changed requests, worst first."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphkiln.cli.console import print_table, printable
from graphkiln.cli.replaying import MOST_SHOWN, ChangedRequest, Replayed
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.proof.decision import confidence_interval

_COLUMNS = ("request", "time (UTC)", "version", "decision", "difference", "relative L2")
_PRINTED = 10
_NUMBERS = 8  # values of an input that is no image
_SMALLEST_PIXELS, _LARGEST_PIXELS = 96, 256  # sides of a picture


def document_of(replayed: Replayed, record: Path, version: Path) -> dict[str, Any]:
    """Return the JSON document; its `changed` requests are in order, worst first."""
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
    more = f" The {MOST_SHOWN} worst of {len(document['changed']):,}." if len(document["changed"]) > MOST_SHOWN else ""
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

"""Results of a run as data, `docs/conformance.json`, and the page that is generated from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conforming.cases import Case
from conforming.outcome import Outcome, Verdict, kind_of

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "conformance.md"
RESULTS = REPOSITORY / "docs" / "conformance.json"
BARE, SERVED, CONVERTED, OPENVINO = WAYS = ("bare", "served", "converted", "openvino")
_NAMES = {
    BARE: "ONNX Runtime alone",
    SERVED: "served by the real server, with ONNX Runtime",
    CONVERTED: "converted by `graphkiln convert`, then as an instance computes it",
    OPENVINO: "`engine: openvino`, as an instance computes it",
}
_LIBRARIES = ("onnx", "onnxruntime", "openvino", "nvidia-pytriton")
_LONGEST = 220
# Cases with two correct answers, of which the suite expects one, with the reason.
TIES = {
    "node_dynamicquantizelinear": "-2.5 is 127.5 steps below zero, and the last bit of the scale rounds it",
    "node_dynamicquantizelinear_expanded": "0.5 is 25.5 steps above zero, and the last bit of the scale rounds it",
}
# Cases whose graph is served, and whose request gets an error, as from ONNX Runtime alone.
SIZES = {
    "node_reduce_max_empty_set_bool": "it has no elements, for which ONNX Runtime has no answer; it computes others",
}


def to_document(cases: Sequence[Case], outcomes: Mapping[str, Mapping[str, Outcome]]) -> dict[str, Any]:
    """Convert a run to data."""
    versions = {name: version(name) for name in _LIBRARIES}
    return {
        "cases": dict(Counter(case.kind for case in cases)),
        "ways": {way: {"versions": versions, **_way(outcomes[way])} for way in WAYS if way in outcomes},
    }


def _way(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    others = {name: each for name, each in sorted(outcomes.items()) if each.verdict is not Verdict.PASSES}
    refused: dict[str, list[str]] = {}
    for name, each in others.items():
        if each.verdict is Verdict.REFUSED:
            refused.setdefault(kind_of(each.reason), []).append(name)
    answered = {
        name: [each.verdict, each.reason[:_LONGEST]]
        for name, each in others.items()
        if each.verdict is not Verdict.REFUSED
    }
    return {"asked": len(outcomes), "passes": len(outcomes) - len(others), "refused": refused, "answered": answered}


def others_of(way: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Verdict and reason of each case that does not pass, by name; the reason's kind for one that is refused."""
    refused = {name: (str(Verdict.REFUSED), kind) for kind, names in way["refused"].items() for name in names}
    return refused | {name: (verdict, reason) for name, (verdict, reason) in way["answered"].items()}


def find_violations(document: Mapping[str, Any]) -> list[str]:
    """Find wrong answers, failed requests, and refusals that neither Triton nor ONNX Runtime explains.

    A server may differ from the expected answer where ONNX Runtime alone does.
    """
    ways = document["ways"]
    bare = others_of(ways[BARE])
    found = []
    for way in [name for name in ways if name != BARE]:
        for name, (verdict, reason) in others_of(ways[way]).items():
            alone = bare.get(name, (Verdict.PASSES, ""))[0]
            wrong = verdict == Verdict.DIFFERS and not _may_differ(way, name, bare)
            fails = verdict == Verdict.FAILS and name not in SIZES
            refused = verdict == Verdict.REFUSED and way == SERVED and alone == Verdict.PASSES
            if wrong or fails or (refused and not reason.startswith("Triton ")):
                found.append(f"{way} {name}: {verdict}: {reason}")
    return found


def to_page(document: Mapping[str, Any]) -> str:
    """Render docs/conformance.md."""
    total = sum(document["cases"].values())
    parts = ", ".join(f"{count} {kind}" for kind, count in document["cases"].items())
    lines = [
        "# ONNX's own test suite",
        "",
        "<!-- written by scripts/conformance from docs/conformance.json -->",
        "",
        f"The {total} cases of ONNX's backend test suite ({parts}), answers compared at the suite's own tolerance.",
        *_libraries(document["ways"]),
        "`scripts/conformance` runs them again; `docs/conformance.json` names the cases of each row.",
        "",
        *_summary(document["ways"]),
        "",
        *_notes(document["ways"]),
        *_tables(document["ways"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _libraries(ways: Mapping[str, Any]) -> Iterator[str]:
    """Versions of libraries, by way if they differ: each way may be run again alone."""
    asked: dict[str, list[str]] = {}
    for way, each in ways.items():
        libraries = ", ".join(f"{name} {number}" for name, number in each["versions"].items())
        asked.setdefault(libraries, []).append(_NAMES[way].partition(",")[0])
    for libraries, names in asked.items():
        yield f"With {libraries}." if len(asked) == 1 else f"{'; '.join(names)}: with {libraries}."


def _summary(ways: Mapping[str, Any]) -> Iterator[str]:
    yield "| how | cases | pass | refused | differ as ONNX Runtime alone does, or by a tie | wrong | ready, but fail |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    bare = others_of(ways[BARE])
    for way, each in ways.items():
        others = others_of(each)
        verdicts = Counter(verdict for verdict, _ in others.values())
        allowed = sum(
            verdict == Verdict.DIFFERS and _may_differ(way, name, bare) for name, (verdict, _) in others.items()
        )
        cells = [each["asked"], each["passes"], verdicts[Verdict.REFUSED]]
        cells += [allowed, verdicts[Verdict.DIFFERS] - allowed, verdicts[Verdict.FAILS]]
        yield f"| {_NAMES[way]} | {' | '.join(map(str, cells))} |"


def _may_differ(way: str, name: str, bare: Mapping[str, tuple[str, str]]) -> bool:
    return bare.get(name, ("", ""))[0] == Verdict.DIFFERS or (way == OPENVINO and name in TIES)


def _notes(ways: Mapping[str, Any]) -> Iterator[str]:
    bare, served = others_of(ways[BARE]), others_of(ways[SERVED]) if SERVED in ways else {}
    border = [name for name in served if name not in bare]
    if border:
        yield f"Of what ONNX Runtime alone passes, the server refuses {len(border)} cases, whose inputs or outputs no"
        yield "request of Triton's protocol can hold."
        yield ""
    yield "Cases with two correct answers, of which the suite expects one:"
    yield ""
    yield from (f"- `{name}` (OpenVINO): {reason}." for name, reason in TIES.items())
    yield ""
    yield "The graph is served, and one request is answered with an error:"
    yield ""
    yield from (f"- `{name}`: {reason}." for name, reason in SIZES.items())
    yield ""


def _tables(ways: Mapping[str, Any]) -> Iterator[str]:
    for way, each in ways.items():
        kinds = Counter(
            f"refused: {reason}" if verdict == Verdict.REFUSED else str(verdict)
            for verdict, reason in others_of(each).values()
        )
        yield f"## {_NAMES[way][0].upper()}{_NAMES[way][1:]}"
        yield ""
        yield "| what, and why | cases |"
        yield "|---|---:|"
        yield from (f"| {kind} | {count} |" for kind, count in kinds.most_common())
        yield ""


def write_report(document: Mapping[str, Any]) -> None:
    """Save a run of all cases and write the page; ways that did not run stay as saved."""
    ways = {**json.loads(RESULTS.read_text())["ways"], **document["ways"]}
    kept = {**document, "ways": {way: ways[way] for way in WAYS if way in ways}}
    RESULTS.write_text(json.dumps(kept, indent=0) + "\n")
    write_page()


def write_page() -> None:
    """Write the page from the saved run."""
    PAGE.write_text(to_page(json.loads(RESULTS.read_text())))

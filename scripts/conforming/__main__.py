"""Run ONNX's backend test suite by the real server, `convert`, OpenVINO, and ONNX Runtime alone.

    scripts/conformance                    every case in every way; writes docs/conformance.json and docs/conformance.md
    scripts/conformance --way converted    every case in one way; results of the others stay
    scripts/conformance --only REGEX       cases whose names match; prints violations, writes nothing
    scripts/conformance --scratch FOLDER   save outcomes there; an interrupted run continues
    scripts/conformance --page             only write docs/conformance.md from docs/conformance.json
    scripts/conformance --sweep            edge values in each operator and type by OpenVINO, beside its table

The exit code is 1 when an answer is wrong, a request fails, or a case is refused that ONNX Runtime alone passes and
Triton's protocol can express.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from conforming.cases import Case, select
from conforming.outcome import Outcome, Record
from conforming.report import (
    BARE,
    CONVERTED,
    OPENVINO,
    SERVED,
    WAYS,
    find_violations,
    to_document,
    write_page,
    write_report,
)
from conforming.ways import run_bare, run_converted, run_openvino, run_served

_RUNNERS: dict[str, Callable[[Sequence[Case]], Iterable[tuple[Case, Outcome]]]] = {
    BARE: run_bare,
    SERVED: run_served,
    CONVERTED: run_converted,
    OPENVINO: run_openvino,
}
_PRINT_EVERY = 100


def main() -> int:
    """Run the suite and write its report."""
    parser = argparse.ArgumentParser(
        prog="scripts/conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose names match: KIND_NAME")
    parser.add_argument("--way", choices=WAYS[1:], action="append", help="default: each")
    parser.add_argument("--scratch", type=Path, metavar="FOLDER", help="save outcomes here")
    parser.add_argument("--page", action="store_true", help="only write the page, from the saved run")
    parser.add_argument("--sweep", action="store_true", help="compare OpenVINO with its table, for edge values")
    options = parser.parse_args()
    if options.page:
        write_page()
        return 0
    if options.sweep:
        from conforming.sweep import report, sweep

        missing = report(sweep(select(options.only)))
        print("\n".join(("the table has all differences",) if not missing else ("not in the table:", *missing)))
        return 1 if missing else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ways = [BARE, *(options.way or WAYS[1:])]
    document = run(select(options.only), ways, options.scratch)
    if not options.only:
        write_report(document)
    violations = find_violations(document)
    print(
        "\n".join(
            [*violations, *(f"{way}: {each['passes']} of {each['asked']}" for way, each in document["ways"].items())]
        )
    )
    return 1 if violations else 0


def run(cases: Sequence[Case], ways: Sequence[str], scratch: Path | None = None) -> dict[str, Any]:
    """Run cases in some ways.

    Args:
        cases: The cases.
        ways: The ways.
        scratch: Folder of saved outcomes; None to save none.

    Returns:
        The results; see `report.to_document`.
    """
    with ExitStack() as stack:
        folder = scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conforming-")))
        folder.mkdir(parents=True, exist_ok=True)
        return to_document(cases, {way: _run_way(way, cases, Record(folder / f"{way}.jsonl")) for way in ways})


def _run_way(way: str, cases: Sequence[Case], record: Record) -> dict[str, Outcome]:
    for number, (case, outcome) in enumerate(_RUNNERS[way](record.pending(cases)), 1):
        record.add(case, outcome)
        if number % _PRINT_EVERY == 0:
            print(f"{way}: {number}", file=sys.stderr)
    return {case.served_name: record.outcomes[case.served_name] for case in cases}


if __name__ == "__main__":
    sys.exit(main())

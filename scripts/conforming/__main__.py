"""Asks every case of ONNX's backend test suite: of the real server, of `convert`, of OpenVINO, of ONNX Runtime alone.

    scripts/conformance                    every case in every way; writes docs/conformance.json and docs/conformance.md
    scripts/conformance --way converted    every case in one way; what is known of the others stays
    scripts/conformance --only REGEX       the cases whose names match; writes nothing, prints what may not be
    scripts/conformance --scratch FOLDER   keeps what came of each case there: a run that was ended goes on
    scripts/conformance --page             asks nothing, writes docs/conformance.md from docs/conformance.json

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
from conforming.ways import ask_bare, ask_converted, ask_openvino, ask_served

_ASKERS: dict[str, Callable[[Sequence[Case]], Iterable[tuple[Case, Outcome]]]] = {
    BARE: ask_bare,
    SERVED: ask_served,
    CONVERTED: ask_converted,
    OPENVINO: ask_openvino,
}
_TOLD_EVERY = 100


def main() -> int:
    """Run the suite and write its report."""
    parser = argparse.ArgumentParser(
        prog="scripts/conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="the cases whose names match: KIND_NAME")
    parser.add_argument("--way", choices=WAYS[1:], action="append", help="default: each")
    parser.add_argument("--scratch", type=Path, metavar="FOLDER", help="keep what came of each case here")
    parser.add_argument("--page", action="store_true", help="ask nothing, write the page from the run that was kept")
    options = parser.parse_args()
    if options.page:
        write_page()
        return 0
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
    """Ask cases in some ways.

    Args:
        cases: The cases.
        ways: The ways.
        scratch: Where what came of them is kept and was kept before; None for nowhere.

    Returns:
        What came of them; see `report.to_document`.
    """
    with ExitStack() as stack:
        folder = scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conforming-")))
        folder.mkdir(parents=True, exist_ok=True)
        return to_document(cases, {way: _ask(way, cases, Record(folder / f"{way}.jsonl")) for way in ways})


def _ask(way: str, cases: Sequence[Case], record: Record) -> dict[str, Outcome]:
    for number, (case, outcome) in enumerate(_ASKERS[way](record.pending(cases)), 1):
        record.add(case, outcome)
        if number % _TOLD_EVERY == 0:
            print(f"{way}: {number}", file=sys.stderr)
    return {case.served_name: record.outcomes[case.served_name] for case in cases}


if __name__ == "__main__":
    sys.exit(main())

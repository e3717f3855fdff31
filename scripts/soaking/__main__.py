"""Soak test: serve small models under traffic, inject faults, compare every answer with a reference.

    scripts/soak --minutes 5               print a report
    scripts/soak --minutes 30 --json FILE  also write all results as JSON
    scripts/soak --fuzz 20000              send generated requests instead of injecting faults
    scripts/soak --tables                  write the tables of docs/operations.md from docs/soak/*.json

The exit code is 1 if an answer was wrong, a request got neither an answer nor an error in time, the service did not
recover within the limit, memory grew, or anything was left behind. No process survives the soak.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
from pathlib import Path

from graphkiln_backend.graph.errors import GraphkilnError
from soaking.fuzz import fuzz, fuzz_to_json, fuzz_to_text
from soaking.report import to_json, to_text, write_tables
from soaking.soak import soak


def main() -> int:
    """Run a soak and print its report."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="duration of fault injection (default: 5)")
    parser.add_argument("--fuzz", type=int, metavar="N", help="send N generated requests instead")
    parser.add_argument("--seed", type=int, help="random seed (default: random; it is printed)")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    parser.add_argument("--log", type=Path, help="write the service's log to this file")
    parser.add_argument("--tables", action="store_true", help="only write the tables of docs/operations.md")
    options = parser.parse_args()
    if options.tables:
        write_tables()
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it logs each failed handshake
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("graphkiln.soak").setLevel(logging.INFO)
    print(f"seed {seed}", file=sys.stderr)
    try:
        if options.fuzz:
            fuzzed = fuzz(options.fuzz, seed, options.log)
            text, document = fuzz_to_text(fuzzed), fuzz_to_json(fuzzed)
        else:
            results = soak(options.minutes, seed, keep_log=options.log)
            text, document = to_text(results), to_json(results)
    except GraphkilnError as error:
        print(f"the soak cannot start: {error}", file=sys.stderr)
        return 2
    print(text)
    if options.json:
        options.json.write_text(json.dumps(document, indent=2))
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

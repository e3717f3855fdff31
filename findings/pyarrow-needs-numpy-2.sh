#!/usr/bin/env bash
# pyarrow 26.0.1 cannot be imported beside numpy 1, which its metadata allows: pip installs both, and `pip check` is content.
#
# pyarrow declares no numpy at all, so that pip keeps a numpy 1 that something else asks for; the refusal comes at the import.
# What pins numpy below 2 must therefore pin pyarrow by itself.
#
# Seen, with Python 3.11 and numpy 1.26.4:
#   pip check: No broken requirements found.
#   ImportError: pyarrow requires NumPy 2.0 or newer, found 1.26.4
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pyarrow==26.0.1 numpy==1.26.4
echo "pip check: $("$folder/venv/bin/pip" check)"
"$folder/venv/bin/python" - <<'P'
try:
    import pyarrow
except ImportError as error:
    print(f"ImportError: {error}")
else:
    raise SystemExit("changed: read the text above again")
P

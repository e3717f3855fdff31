"""Save the results of each architecture in `docs/families.json`, and write `docs/families.md` from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "docs" / "families.json"
PAGE = REPOSITORY / "docs" / "families.md"
COLUMNS = ("library", "architecture", "input", "convert s", "load s", "ask ms", "convert MiB", "serve MiB", "error")

_HEAD = """# Architectures

Written by `scripts/test -m families` from `docs/families.json`; not by hand. Each architecture got random weights, was
converted, loaded by one running server in explicit mode, asked over HTTP in batches of 1 and 3, compared with eager
PyTorch, and unloaded. An architecture that failed is not in the table.

- `convert s`, `convert MiB`: `graphkiln convert` with its proofs, and the peak memory of its process. The libraries,
  which are imported before, take {imported} MiB of it.
- `load s`: until the server has proven it and answers. `ask ms`: the median of ten requests of one sample.
- `serve MiB`: peak memory of the model's instance. `error`: relative L2 beside eager PyTorch, the largest of all
  outputs: 1e-4 at most. visformer_tiny's random weights amplify each rounding: PyTorch's own fp32 is 1.8e-4 from its
  fp64 in the memory format channels_last, and no served output may be more than twice that off.

{machine}. The machine was shared with other work: seconds are upper bounds, memory is not affected.

{counts}

"""


def forget(library: str, architecture: str, path: Path = RESULTS) -> None:
    """Remove an earlier result, so that a failure leaves none."""
    _write({**_read(path), "rows": _others(path, library, architecture)}, path)


def keep(row: dict[str, Any], facts: dict[str, Any], path: Path = RESULTS) -> None:
    """Save a result.

    Args:
        row: A value for each of `COLUMNS`.
        facts: `machine`, a description, and `imported`, MiB of the imported libraries.
        path: The file.
    """
    rows = [*_others(path, row["library"], row["architecture"]), row]
    rows.sort(key=lambda each: (each["library"], each["architecture"]))
    _write({"facts": facts, "rows": rows}, path)


def render(results: dict[str, Any]) -> str:
    """Render docs/families.md."""
    rows, facts = results["rows"], results["facts"]
    libraries = sorted({row["library"] for row in rows})
    counts = ", ".join(f"{library}: {sum(row['library'] == library for row in rows)}" for library in libraries)
    align = ["---" if column in ("library", "architecture", "input", "error") else "---:" for column in COLUMNS]
    table = [COLUMNS, align, *([str(row[column]) for column in COLUMNS] for row in rows)]
    return _HEAD.format(**facts, counts=counts) + "".join(f"| {' | '.join(line)} |\n" for line in table)


def _read(path: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"facts": {"machine": "", "imported": 0}, "rows": []}
    return json.loads(path.read_text()) if path.exists() else empty


def _others(path: Path, library: str, architecture: str) -> list[dict[str, Any]]:
    this = (library, architecture)
    return [row for row in _read(path)["rows"] if (row["library"], row["architecture"]) != this]


def _write(results: dict[str, Any], path: Path) -> None:
    head = json.dumps({"facts": results["facts"]}, indent=1)[:-2]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in results["rows"])
    path.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')
    path.with_suffix(".md").write_text(render(results))

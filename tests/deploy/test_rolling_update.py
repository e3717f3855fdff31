"""A rolling update under load: two real servers behind a real haproxy, each replaced, and no request fails."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.server,
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy: apt-get install haproxy"),
]


def test_no_request_is_lost_while_servers_are_replaced(repository: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [repository / "scripts/rolling-update", "--rate", "50", "--rounds", "1", "--json", result],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(result.read_text())
    assert outcome["failed"] == {}
    assert outcome["replacements"] == 2
    assert outcome["answered"] == outcome["sent"] > 100


def test_the_saved_run_of_containers(repository: Path) -> None:
    saved = json.loads((repository / "docs" / "rolling-update.json").read_text())
    assert (saved["kind"], saved["rate"], saved["replacements"], saved["failed"]) == ("containers", 200, 4, {})
    assert saved["answered"] == saved["sent"]
    assert saved["sent"] / saved["seconds"] > 199
    text = (repository / "docs" / "deploying.md").read_text()
    assert f"{saved['answered']:,}" in text


def test_the_manual_has_the_measured_cost_of_a_missing_pause(repository: Path) -> None:
    saved = json.loads((repository / "docs" / "rolling-update-without-pause.json").read_text())
    assert (saved["pause"], saved["kind"], saved["rate"], saved["replacements"]) == (False, "processes", 60, 2)
    assert saved["answered"] + sum(saved["failed"].values()) == saved["sent"]
    text = (repository / "docs" / "deploying.md").read_text()
    assert f"{saved['failed']['HTTP 503']} of {saved['sent']:,} got 503" in text
    assert f"a load of {saved['machine']['load_average'][0]:.0f}]" in text

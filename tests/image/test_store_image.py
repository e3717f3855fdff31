"""The image of the target `store`: it serves the models that it was built with, without a volume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from containers import STORE_IMAGE, run_in_image, serving
from running import run_command

pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(not STORE_IMAGE, reason="the image was not built: scripts/test-image builds it"),
]


def test_it_serves_its_own_store(repository: Path) -> None:
    sample = repository / "docs" / "digits" / "seven.png"
    with serving((), "--model-store=/models", image=STORE_IMAGE) as container:
        asked = run_command("classify", sample, "--model", "digits", "--url", container.url, "--json")
        assert json.loads(asked.stdout)[0]["classifications"][0]["label"] == "seven", asked.stderr
        assert container.stop()[0] == 0


def test_its_user_cannot_change_the_store() -> None:
    writing = "find /models -user graphkiln -o -perm -o+w ! -type l | head -1; touch /models/x 2>&1 || true"
    printed = run_in_image(("--network", "none"), "sh", "-c", writing, image=STORE_IMAGE).stdout
    assert printed == "touch: cannot touch '/models/x': Permission denied\n"

"""The image of the target `remote`: it serves from S3, as the overlay `s3` tells it to, into a volume of a pod."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from containers import REMOTE_IMAGE, pods_volume, serving
from object_store import CREDENTIALS, ObjectStore
from running import run_command

pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(not REMOTE_IMAGE, reason="the image was not built: scripts/test-image --remote"),
]


def test_it_serves_a_store_in_s3_and_keeps_the_copy(repository: Path) -> None:
    model = repository / "model_repository" / "digits"
    with ObjectStore() as objects, pods_volume() as volume:
        for path in sorted(path for path in model.rglob("*") if path.is_file()):
            objects.bucket("models").upload_file(str(path), f"store/digits/{path.relative_to(model)}")
        keys = [option for name, value in CREDENTIALS.items() for option in ("-e", f"{name}={value}")]
        options = (*keys, "-e", "GRAPHKILN_TRUSTED_VOLUME=/cache", "-v", f"{volume}:/cache")
        store = f"--model-store=s3://{objects.address}/models/store"
        poll = ("--model-control-mode=poll", "--repository-poll-secs=30")
        with serving(options, store, "--cache=/cache", *poll, image=REMOTE_IMAGE) as container:
            sample = repository / "docs" / "digits" / "seven.png"
            asked = run_command("classify", sample, "--model", "digits", "--url", container.url, "--json")
            assert json.loads(asked.stdout)[0]["classifications"][0]["label"] == "seven", asked.stderr
            assert "digits" in container.exec("sh", "-c", "ls /cache/stores/*/models")
            assert container.stop()[0] == 0

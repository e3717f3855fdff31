"""Unusual stores: files from Windows, links, long names and large numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zoo
from running import Server, Serving

from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

LONG = "m" * 200
ONES = {"x": np.ones((1, 3), np.float32)}
BOM = "\ufeff"


def from_windows(store: Path) -> None:
    """Configuration and labels with a byte order mark and Windows line ends."""
    config = 'max_batch_size: 4\r\n# a remark\r\noutput [ { name: "y" label_filename: "labels.txt" } ]\r\n'
    zoo.add(store, "windows", zoo.scale(("batch", 3)))
    (store / "windows" / "config.pbtxt").write_bytes((BOM + config).encode())
    (store / "windows" / "labels.txt").write_bytes(f"{BOM}red\r\ngreen\r\nred\r\n".encode())


def with_links(store: Path, elsewhere: Path) -> None:
    """A version folder that is a link, and weights of two models in one linked file."""
    zoo.add(elsewhere, "held", zoo.scale(("batch", 3)))
    (store / "linked").mkdir(parents=True)
    (store / "linked" / "1").symlink_to(elsewhere / "held" / "1")
    weights = zoo.add_external(store, "owner") / "weights.bin"
    for name in ("hard", "soft"):
        other = zoo.add_external(store, name) / "weights.bin"
        other.unlink()
        if name == "hard":
            other.hardlink_to(weights)
        else:
            other.symlink_to(weights)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server started with unusual environment variables."""
    folder = tmp_path_factory.mktemp("odd")
    store = folder / "store"
    from_windows(store)
    with_links(store, folder / "elsewhere")
    zoo.add(store, LONG, zoo.scale(("batch", 3)))
    for version in ("7", "3000000000", "0000000009"):
        (store / "numbers" / version).mkdir(parents=True)
        model = zoo.scale(("batch", 3), factor=float(version[0]))
        (store / "numbers" / version / "model.onnx").write_bytes(model.SerializeToString())
    before = os.umask(0o077)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("HOME", raising=False)
            patch.setenv("LC_ALL", "C")
            patch.setenv("TZ", "Asia/Kathmandu")
            with Serving(folder, "--model-store", store) as running:
                running.wait_ready()
                yield running
    finally:
        os.umask(before)


def test_every_model_answers(server: Server) -> None:
    with Client(server.grpc_url) as client:
        for name in ("windows", "linked", LONG):
            np.testing.assert_array_equal(client.model(name).infer(ONES)["y"], [[2, 2, 2]])
        np.testing.assert_array_equal(client.model("numbers").infer(ONES)["y"], [[3, 3, 3]])
        for name in ("owner", "hard", "soft"):
            found = client.model(name).infer({"x": np.zeros((1, 4), np.float32)})["y"]
            np.testing.assert_array_equal(found, [[0, 1, 2, 3]])


def test_labels_from_windows(server: Server) -> None:
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as raw:
        given = triton.InferInput("x", [1, 3], "FP32")
        given.set_data_from_numpy(np.array([[1, 3, 2]], np.float32))
        output = triton.InferRequestedOutput("y", class_count=3)
        found = raw.infer("windows", [given], outputs=[output]).as_numpy("y")
    assert found.ravel().tolist() == [b"6.000000:1:green", b"4.000000:2:red", b"2.000000:0:red"]

"""The pod of deploy/kubernetes, run by podman (`podman kube play`).

podman ignores unknown objects (Service, NetworkPolicy, PodDisruptionBudget, some kinds of probes) and runs one pod of a
Deployment, with the real user, read-only root, capabilities, volumes and command line.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from graphkiln.story.server import free_ports
from rolling.servers import is_ready, wait

_ROOT = Path(__file__).resolve().parents[2]
_OVERLAY = _ROOT / "deploy" / "kubernetes" / "overlays" / "cpu"
_GRACE_S = 45
_TIMEOUT_S = 300
# A container in a container may not raise limits, crun refuses the cgroups of some hosts, and `kube play` has no
# options for either.
_CONFIGURATION = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
shm_size = "1g"
[engine]
runtime = "runc"
"""


class Pod:
    """The pod of some manifests, in the network of this machine; use it as a context manager.

    Attributes:
        name: Name of the running container.
    """

    def __init__(self, manifest: Path, claim: str, folder: Path) -> None:
        (folder / "containers.conf").write_text(_CONFIGURATION)
        self._environment = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
        self._manifest, self._claim = manifest, claim
        self.name = ""

    def podman(self, *arguments: str, send: bytes = b"", fails: bool = False) -> str:
        """Run podman; return its standard output.

        Args:
            arguments: Arguments of podman.
            send: Standard input.
            fails: Whether it may fail.

        Raises:
            RuntimeError: It failed.
        """
        command = ["podman", *arguments]
        done = subprocess.run(
            command, env=self._environment, input=send, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode and not fails:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.decode()}")
        return done.stdout.decode()

    def exec(self, *command: str, fails: bool = False) -> str:
        """Run a command in the container; return its output."""
        return self.podman("exec", self.name, *command, fails=fails)

    def fill(self, store: Path) -> None:
        """Copy a store into the claim, whether or not the server runs."""
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            tar.add(store, ".")
        self.podman("volume", "import", self._claim, "-", send=content.getvalue())

    def play(self) -> None:
        """Start it."""
        self.name = self.podman("kube", "play", str(self._manifest)).split()[-1]

    def end(self) -> str:
        """End it as a cluster does, with SIGTERM and some time; return its last state and exit code.

        After a plain `podman kill`, podman would start it again.
        """
        self.podman("stop", "--time", str(_GRACE_S), self.name)
        return self.podman("inspect", self.name, "--format", "{{.State.Status}} {{.State.ExitCode}}").strip()

    def remove(self) -> None:
        """Remove the pod, but not its volume."""
        self.podman("kube", "down", str(self._manifest), fails=True)

    def __enter__(self) -> Pod:
        self.play()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
        self.podman("volume", "rm", "--force", self._claim, fails=True)


def on_this_machine(
    manifests: Sequence[Mapping[str, Any]],
    name: str,
    ports: Mapping[str, int],
    image: str,
    secrets: Mapping[str, Path] | None = None,
) -> list[dict[str, Any]]:
    """Adapt manifests to one pod of an image, with unique names and ports.

    Args:
        manifests: Rendered manifests.
        name: Name of the pod and of its volume.
        ports: Ports of `http`, `grpc`, `metrics` and optionally `page`.
        image: Image on this machine.
        secrets: Folder of the files of each Secret, by name.
    """
    text = yaml.safe_dump_all(manifests).replace("claimName: graphkiln-models", f"claimName: {name}")
    found: list[dict[str, Any]] = [each for each in yaml.safe_load_all(text) if each]
    for claim in (each for each in found if each["kind"] == "PersistentVolumeClaim"):
        claim["metadata"]["name"] = name
    (deployment,) = (each for each in found if each["kind"] == "Deployment")
    deployment["metadata"]["name"] = name
    deployment["spec"]["replicas"] = 1
    spec = deployment["spec"]["template"]["spec"]
    spec["hostNetwork"] = True
    (container,) = spec["containers"]
    container["image"] = f"localhost/{image}"
    container["args"] += [
        f"--page-address=:{port}" if service == "page" else f"--{service}-port={port}"
        for service, port in ports.items()
    ]
    del container["ports"]  # podman would map them, which takes a network of its own
    # podman supports neither the memory medium nor fsGroup; `shm_size` of its configuration sets /dev/shm.
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "shm"]
    container["volumeMounts"] = [each for each in container["volumeMounts"] if each["name"] != "shm"]
    for volume in (each for each in spec["volumes"] if "secret" in each):
        volume["hostPath"] = {"path": str((secrets or {})[volume.pop("secret")["secretName"]])}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        container[probe]["httpGet"]["port"] = ports["http"]
    return found


class ServedPod:
    """The pod of the overlay `cpu` on fixed ports; use it as a context manager.

    Args:
        store: Model store, which is copied into its volume.
        folder: Folder of its manifest.
        image: Image of `scripts/test-image`.
    """

    def __init__(self, store: Path, folder: Path, image: str) -> None:
        ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
        self.http_port, self._store = ports["http"], store
        name = f"graphkiln-rolling-{self.http_port}"
        manifests = on_this_machine(_rendered(), name, ports, image)
        # podman would make a volume for the claim; this one outlives the pod, as a claim does.
        played = [each for each in manifests if each["kind"] == "Deployment"]
        folder.mkdir()
        (folder / "manifest.yaml").write_text(yaml.safe_dump_all(played))
        self._pod = Pod(folder / "manifest.yaml", name, folder)
        self._claim = name

    def start(self) -> None:
        """Start the next one and wait until it is ready."""
        self._pod.play()
        wait(lambda: is_ready(self.http_port), f"the pod {self._pod.name}")

    def stop(self) -> None:
        """End it with SIGTERM, and remove it.

        Raises:
            RuntimeError: Its exit code is not 0.
        """
        state = self._pod.end()
        log = self._pod.podman("logs", self._pod.name, fails=True) if state != "exited 0" else ""
        self._pod.remove()
        if state != "exited 0":
            raise RuntimeError(f"the pod is '{state}':\n{log}")

    def __enter__(self) -> ServedPod:
        self._pod.podman("volume", "create", self._claim)
        self._pod.fill(self._store)
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pod.__exit__()


def _rendered() -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", _OVERLAY], capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each]

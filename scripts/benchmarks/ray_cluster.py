"""A private Ray cluster of several nodes on this machine."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

_TRIES = 4
_TOO_LATE = "timed out during startup"  # in the message of Ray's exception


class RayNodes:
    """Nodes of one core each; the head has no core and survives."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        arguments = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
        self._cluster = Cluster(initialize_head=True, head_node_args=arguments, shutdown_at_exit=False)

    @property
    def address(self) -> str:
        """Address of the cluster for a run."""
        address: str = self._cluster.address
        return address

    @property
    def nodes(self) -> list[Any]:
        """Nodes with a core."""
        return sorted(self._cluster.worker_nodes, key=lambda node: node.node_id)

    def add(self, cores: int = 1) -> Any:
        """Add a node; on a busy machine it may need more than Ray's single try of 30 s."""
        for _ in range(_TRIES - 1):
            try:
                return self._cluster.add_node(num_cpus=cores, wait=False)
            except Exception as error:
                if _TOO_LATE not in str(error):  # Ray has no exception class for it
                    raise
        return self._cluster.add_node(num_cpus=cores, wait=False)

    def kill(self, node: Any) -> None:
        """Kill a node's raylet and all its children with SIGKILL."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()  # type: ignore[no-untyped-call]


def processes_of(marker: str) -> list[psutil.Process]:
    """Find descendants of this process by a part of their command line."""
    found = []
    for each in psutil.Process().children(recursive=True):
        try:
            if each.status() != psutil.STATUS_ZOMBIE and any(marker in word for word in each.cmdline()):
                found.append(each)
        except psutil.Error:
            continue
    return found


def kill(process: psutil.Process) -> None:
    """Kill a process if it still exists."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return


@contextmanager
def ray_nodes(count: int, path: str = "") -> Iterator[RayNodes]:
    """Run a cluster until the end of the block.

    Args:
        count: Number of nodes without the head.
        path: First folder of the workers' import path; empty for none.
    """
    with tempfile.TemporaryDirectory(prefix="rays-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        values = {
            "RAY_AUTH_MODE": "disabled",  # Ray reads it at import, which may have happened in this process
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # or other programs' memory ends workers
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "4",
            "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH")))),
            "TMPDIR": folder,  # files that killed workers leave are removed with it
        }
        (Path(folder) / "ray").mkdir()
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            nodes = RayNodes(folder)
            try:
                for _ in range(count):
                    nodes.add()
                yield nodes
            finally:
                nodes.close()
        finally:
            for left in processes_of(folder):  # of nodes that did not start in time
                kill(left)
            _forget()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _forget() -> None:
    """Drop Ray's handles of ended processes, which would warn at exit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()

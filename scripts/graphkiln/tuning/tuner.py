"""One run of `graphkiln tune`: journal, trials, search and temporary files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphkiln.tuning.candidate import MAX_BATCH_SIZE
from graphkiln.tuning.journal import Journal, RecordedTrials, Report
from graphkiln.tuning.local_trials import LocalTrials
from graphkiln.tuning.measure import Arriving, Loading
from graphkiln.tuning.requests import Requests
from graphkiln.tuning.result import Result
from graphkiln.tuning.search import Search
from graphkiln.tuning.space import Space
from graphkiln.tuning.subject import Subject, check_unchanged
from graphkiln.tuning.target import Target
from graphkiln_backend.cache.settings import user_cache_folder
from graphkiln_backend.engines.hardware import identity
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.modules import installed_version
from graphkiln_backend.repository.version import find_graph
from graphkiln_backend.server.run_folder import remove_leftovers
from graphkiln_backend.system.owned_folder import OTHER_PARENTS, OwnedFolder, owned_folders
from graphkiln_backend.system.processes import keep_temporary_files_in

# Timeout of a request: a multiple of the target's p99 within these bounds in seconds, but at least twice the p99.
_PATIENCE, _TIMEOUT_S, _LEAST_PATIENCE = 20, (5.0, 60.0), 2
# Bounds on the seconds that a candidate may take to become ready: a hanging one must not use up the budget.
_DEADLINE_S = (60.0, 180.0)
# Packages that affect speed: a search with other versions has another journal.
_SOFTWARE = ("graphkiln", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt")
_LONGEST_NAME = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Definition of a search.

    Attributes:
        subject: Model to tune.
        space: Candidates.
        target: Required p99, rate and objective.
        requests: Contents of requests.
        arriving: Arrival process of requests.
        budget_s: Seconds for all measurements.
        folder: Folder of the journals; below the user's cache folder by default.
    """

    subject: Subject
    space: Space
    target: Target
    requests: Requests
    arriving: Arriving = field(default_factory=Arriving)
    budget_s: float = 1200.0
    folder: Path | None = None

    @property
    def journal(self) -> Path:
        """Path of the journal; it differs for another model, machine, space or target."""
        text = json.dumps(self.identity(), sort_keys=True)
        name = self.subject.name.encode()[:_LONGEST_NAME].decode(errors="ignore")  # file names have at most 255 bytes
        folder = self.folder or user_cache_folder("graphkiln-tune")
        return folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"

    def identity(self) -> dict[str, Any]:
        """Return the identity of the search as JSON data: a journal with another one is not continued."""
        subject, space, trace = self.subject, self.space, self.arriving.trace
        axes = {axis.key: [list(v) if isinstance(v, tuple) else v for v in axis.values] for axis in space.axes}
        moments = "" if trace is None else hashlib.sha256(trace.tobytes()).hexdigest()[:16]
        return {
            "model": str(subject.folder),
            "version": subject.version,
            "graph": sha256_of(subject.deployment.version.graph_path),
            **({"int8": sha256_of(find_graph(subject.int8))} if subject.int8 else {}),
            "configuration": subject.config_sha256,
            "machine": f"{identity(subject.config.device)}, {subject.cores} cores",
            "software": {name: version for name in _SOFTWARE if (version := installed_version(name))},
            "server": "our own",  # this and "limit" are constant: older journals contain them
            "space": axes,
            "limit": "",
            "target": str(self.target),
            "floor": self.target.accuracy_floor,
            "load": f"{self.arriving}; {moments}",
            "requests": _digest_of(self.requests),
        }

    @property
    def loading(self) -> Loading:
        """Load for all candidates."""
        least, most = _TIMEOUT_S
        timeout_s = max(min(most, max(least, _PATIENCE * self.target.p99_s)), _LEAST_PATIENCE * self.target.p99_s)
        return Loading(requests=self.requests, arriving=self.arriving, timeout_s=timeout_s)

    def run(self, report: Report) -> Result:
        """Run the search or continue an interrupted one; call `report` after each new measurement.

        Raises:
            MeasurementError: The journal is locked, damaged or not writable.
            RepositoryError: The configuration or the graph was changed during the search.
        """
        identity = self.identity()
        least_s, most_s = _DEADLINE_S
        deadline_s = min(most_s, max(least_s, self.budget_s / 4))
        with (
            Journal(self.journal, identity) as journal,
            LocalTrials(
                subject=self.subject,
                loading=self.loading,
                batch_sizes=batch_sizes(self.space),
                deadline_s=deadline_s,
            ) as trials,
        ):
            recorded = RecordedTrials(trials, journal, time.monotonic, report)
            search = Search(self.space, self.target, recorded, budget_s=self.budget_s, cores=self.subject.cores)
            result = search.run()
            check_unchanged(self.subject)
            if self.identity()["graph"] != identity["graph"]:
                raise RepositoryError(
                    f"the graph of '{self.subject.name}' was replaced during the search: the measurements are of two",
                    hint="run the same command again to measure the new one",
                )
            return result


def batch_sizes(space: Space) -> tuple[int, ...]:
    """Return the batch sizes to time sessions with: 1 and each max_batch_size of the space."""
    tried = [value for axis in space.axes if axis.key == MAX_BATCH_SIZE for value in axis.values]
    return tuple(sorted({1, *(value for value in tried if isinstance(value, int) and value > 0)}))


def _digest_of(requests: Requests) -> str:
    digest = hashlib.sha256(requests.origin.encode())
    for feeds in requests.feeds:
        for name, array in feeds.items():
            digest.update(name.encode() + (repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()))
    return digest.hexdigest()[:16]


_log = logging.getLogger("graphkiln.tuning")

_PREFIX = "graphkiln-search-"
_VARIABLE = "TMPDIR"


@contextmanager
def search_folder() -> Iterator[Path]:
    """Create a folder for all temporary files of this process and its children; remove it at the end of the context.

    Files of killed searches are removed first, and running searches are logged.

    Raises:
        ServerSetupError: The folder cannot be created.
    """
    remove_leftovers()
    for parent in sorted({Path(tempfile.gettempdir()), *OTHER_PARENTS}):
        for running in owned_folders(parent, _PREFIX):
            _log.warning("another search is running (%s): both will measure a slower machine", running)
    directory, variable = tempfile.tempdir, os.environ.get(_VARIABLE)
    with OwnedFolder(prefix=_PREFIX) as folder:
        keep_temporary_files_in(str(folder.path))
        try:
            yield folder.path
        finally:
            tempfile.tempdir = directory
            if variable is None:
                os.environ.pop(_VARIABLE, None)
            else:
                os.environ[_VARIABLE] = variable

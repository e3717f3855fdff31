"""Outcomes of cases: verdicts, kinds of reasons, and a record from which an interrupted run continues."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conforming.cases import Case
from graphkiln_backend.engines.openvino_numbers import TABLE

# Kinds of refusals, by patterns of the engines' errors; the first match counts.
_KINDS = (
    (r"is an? (?:sequence|optional|map|sparse)", "Triton carries tensors only: a sequence, an optional value"),
    (
        r"element type \w+ is not one that Triton can carry",
        "Triton has no such element type: 8-bit floats, 2 and 4 bits",
    ),
    (r"Unsupported model IR version", "newer than ONNX Runtime: the IR version"),
    (r"Numpy_type \d+", "ONNX Runtime's Python binding has no such element type"),
    (r"ValidateOpsetForDomain|Opset \d+ is under development", "newer than ONNX Runtime: the opset"),
    (r"is not a registered function/op", "ONNX Runtime does not know the operator"),
    (r"Could not find an implementation|Failed to find kernel", "ONNX Runtime has no kernel for these types"),
    (r"INVALID_GRAPH|Type Error: ", "ONNX Runtime does not take the graph for valid"),
    (r"Exception during initialization", "ONNX Runtime does not initialize the operator: a layout, a locale"),
    (r"every synthetic request fails with the same error", "ONNX Runtime fails every request, for any values"),
    (r"OpenVINO computes FP64 in FP32", "OpenVINO computes FP64 in FP32"),
    (
        r"OpenVINO (?:computes integers in 32 bits|" + "|".join(re.escape(row.reason) for row in TABLE) + ")",
        "OpenVINO computes the operator otherwise than ONNX",
    ),
    (r"OpenVINO cannot load|OpenVINO cannot serve", "OpenVINO does not load the graph"),
    (r"not those of the saved graph: fp", "OpenVINO computed something else before it served"),
    (r"of the session differ from those of the", "OpenVINO sees outputs of another shape"),
    (
        r"session fails where the saved graph does not|OpenVINO failed: ",
        "OpenVINO fails on what the saved graph computes",
    ),
    (
        r"ONNX Runtime cannot load it for a comparison",
        "nothing to compare with: ONNX Runtime does not load the graph",
    ),
    (r"refuses every synthetic request", "nothing to compare: it refuses every request that was made up"),
    (r"(?:refuses|rejects) the samples|refuses every request", "the graph refuses its samples, its own as well"),
    (r"holds no finite number|the samples prove nothing", "samples of its own give no number to compare"),
    (r"the outputs changed|does not run with", "the rewritten graph did not pass its proof"),
    (r"the pass '", "a pass does not take the graph"),
    (r"cannot be loaded", "ONNX Runtime does not load the graph"),
)
OTHER = "another reason"
_SYNTHETIC = r"(?:refuses|rejects) the samples|refuses every request|holds no finite number|the samples prove nothing"
_PATHS = re.compile(r"(?:/[\w.+-]+){2,}/?")
_STACK = re.compile(r"\s*At:.*", re.DOTALL)
_LONGEST = 800


class Verdict(enum.StrEnum):
    """Comparison of an answer with the expected one."""

    PASSES = "passes"
    REFUSED = "refused"  # not served; the reason says why
    DIFFERS = "differs"  # another value than the suite expects, beyond its tolerance
    FAILS = "fails"  # ready, but the request failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict and its reason; no reason if the case passes."""

    verdict: Verdict
    reason: str = ""

    @classmethod
    def of(cls, verdict: Verdict, reason: object) -> Outcome:
        """Make an outcome with a reason in one line, without the folders of this run."""
        text = _PATHS.sub("the file", _STACK.sub(" ", str(reason)))
        return cls(verdict, " ".join(text.split())[:_LONGEST])


PASSED = Outcome(Verdict.PASSES)


def kind_of(reason: str) -> str:
    """Kind of the reason of a refusal."""
    return next((kind for pattern, kind in _KINDS if re.search(pattern, reason)), OTHER)


def needs_samples(reason: str) -> bool:
    """Return true if a conversion was refused because of its synthetic samples."""
    return re.search(_SYNTHETIC, reason) is not None


class Record:
    """Outcomes of one way to run the cases, by served name, in a file that grows case by case."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[str, Outcome] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # interrupted while writing: the case runs again
                saved = json.loads(line)
                self.outcomes[saved["case"]] = Outcome(Verdict(saved["verdict"]), saved["reason"])

    def add(self, case: Case, outcome: Outcome) -> None:
        """Save an outcome."""
        self.outcomes[case.served_name] = outcome
        line = {"case": case.served_name, "verdict": outcome.verdict, "reason": outcome.reason}
        with self._path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def pending(self, cases: Iterable[Case]) -> list[Case]:
        """The cases without an outcome."""
        return [case for case in cases if case.served_name not in self.outcomes]

"""The tree of errors."""

from __future__ import annotations

from copy import copy

import pytest

from graphkiln_backend.graph import errors
from graphkiln_backend.graph.errors import (
    ClientError,
    ConversionError,
    EngineUnavailable,
    GraphkilnError,
    LoweringError,
    VerificationError,
)


def all_errors(base: type[GraphkilnError] = GraphkilnError) -> list[type[GraphkilnError]]:
    return [base, *(error for child in base.__subclasses__() for error in all_errors(child))]


def test_docstring_lists_all_errors() -> None:
    drawn = {line.split("─ ")[-1].split()[0] for line in (errors.__doc__ or "").splitlines() if "─ " in line}
    defined = {error.__name__ for error in all_errors() if error.__module__ == errors.__name__}
    assert drawn == defined - {"GraphkilnError"}
    assert issubclass(ClientError, GraphkilnError)


def test_triton_and_exit_codes() -> None:
    known = {"INTERNAL", "INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "UNSUPPORTED", "ALREADY_EXISTS"}
    assert {error.triton_code for error in all_errors()} <= known
    assert {error.exit_code for error in all_errors()} <= {1, 2}


def test_hint_follows_the_message() -> None:
    assert str(GraphkilnError("it broke")) == "it broke"
    error = GraphkilnError("it broke", hint="mend it")
    assert (str(error), error.message, error.hint) == ("it broke (mend it)", "it broke", "mend it")


@pytest.mark.parametrize(
    "error",
    [
        ConversionError("no such model", hint="name another"),
        VerificationError("the outputs changed", report="0.2 of the signal", relative_l2=0.2),
        LoweringError("no engine", attempts=("onnxruntime: out of memory",)),
    ],
)
def test_errors_are_sent_between_processes(error: GraphkilnError) -> None:
    received = copy(error)  # as pickle does it
    assert (type(received), str(received), vars(received)) == (type(error), str(error), vars(error))


def test_missing_engine_names_its_extra() -> None:
    assert str(EngineUnavailable("no openvino", extra="openvino")) == (
        "no openvino (pip install 'graphkiln[openvino]')"
    )
    assert EngineUnavailable("no GPU", extra="gpu", hint="use a CPU").hint == "use a CPU"
    assert EngineUnavailable("no GPU").extra is None


def test_invalid_arguments_exit_with_2() -> None:
    """INVALID_ARG in Triton is exit code 2 of a command: the user must change something."""
    for error in all_errors():
        if error.triton_code == "INVALID_ARG":
            assert error.exit_code == 2, error

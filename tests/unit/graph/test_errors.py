"""The tree of errors."""

from __future__ import annotations

from graphkiln_backend.graph import errors
from graphkiln_backend.graph.errors import (
    ClientError,
    EngineUnavailable,
    GraphkilnError,
    LoweringError,
    SignatureError,
    VerificationError,
)


def all_errors(base: type[GraphkilnError] = GraphkilnError) -> list[type[GraphkilnError]]:
    return [base, *(error for child in base.__subclasses__() for error in all_errors(child))]


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn = {line.split("─ ")[-1].split()[0] for line in (errors.__doc__ or "").splitlines() if "─ " in line}
    defined = {error.__name__ for error in all_errors() if error.__module__ == errors.__name__}
    assert drawn == defined - {"GraphkilnError"}
    assert issubclass(ClientError, GraphkilnError)


def test_every_error_has_a_code_that_triton_knows() -> None:
    known = {"INTERNAL", "INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "UNSUPPORTED", "ALREADY_EXISTS"}
    assert {error.triton_code for error in all_errors()} <= known
    assert {error.exit_code for error in all_errors()} <= {1, 2}


def test_a_hint_stands_behind_the_message() -> None:
    assert str(GraphkilnError("it broke")) == "it broke"
    error = GraphkilnError("it broke", hint="mend it")
    assert (str(error), error.message, error.hint) == ("it broke (mend it)", "it broke", "mend it")


def test_a_signature_error_says_both_sides() -> None:
    error = SignatureError("wrong dtype", expected="x FP32[1]", got="INT8[1]")
    assert str(error) == "wrong dtype: expected x FP32[1], got INT8[1]"
    assert (error.expected, error.got) == ("x FP32[1]", "INT8[1]")


def test_a_missing_engine_says_what_to_install() -> None:
    assert str(EngineUnavailable("no openvino", extra="openvino")) == (
        "no openvino (pip install 'graphkiln[openvino]')"
    )
    assert EngineUnavailable("no GPU", extra="gpu", hint="use a CPU").hint == "use a CPU"
    assert EngineUnavailable("no GPU").extra is None


def test_a_lowering_error_tells_every_attempt() -> None:
    error = LoweringError("cannot serve", attempts=("a: no", "b: neither"), hint="convert it")
    assert str(error) == "cannot serve; a: no; b: neither (convert it)"
    assert error.attempts == ("a: no", "b: neither")
    assert str(LoweringError("cannot serve", attempts=())) == "cannot serve"


def test_a_verification_error_keeps_its_report() -> None:
    error = VerificationError("the outputs changed", report="fp16: FAIL")
    assert (str(error), error.report) == ("the outputs changed: fp16: FAIL", "fp16: FAIL")


def test_a_client_error_keeps_what_the_server_said() -> None:
    error = ClientError("refused", status=429, body="slow down", request_id="7", retry_after_s=1.5)
    assert (error.status, error.body, error.request_id, error.retry_after_s) == (429, "slow down", "7", 1.5)
    assert (ClientError("x").status, ClientError("x").body) == (None, None)


def test_every_error_is_told_in_a_sentence_of_its_own() -> None:
    texts = [(error.__doc__ or "").split("\n")[0] for error in all_errors() if error.__module__ == errors.__name__]
    assert all(text.endswith((".", ":")) or ". " in text for text in texts)
    assert len(set(texts)) == len(texts)


def test_bad_input_is_the_callers_fault_for_triton_and_for_the_shell() -> None:
    """What Triton calls INVALID_ARG the command line ends with 2: the user must change something."""
    for error in all_errors():
        if error.triton_code == "INVALID_ARG":
            assert error.exit_code == 2, error

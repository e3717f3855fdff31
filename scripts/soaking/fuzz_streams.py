"""gRPC streams: several requests behind each other, valid ones whose answers are checked, and mixtures."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from soaking.fuzz_grpc import GrpcCase, damaged_calls, nearly_valid_calls, valid_calls
from soaking.models import SoakModel

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass(frozen=True, kw_only=True)
class StreamCase:
    """Requests of one stream.

    Attributes:
        kind: Which strategy made it.
        bodies: The serialized messages.
        valid: What must be answered, by the request's id; empty where some requests are not valid.
    """

    kind: str
    bodies: tuple[bytes, ...]
    valid: tuple[GrpcCase, ...] = ()

    @property
    def model(self) -> SoakModel | None:
        """What a valid stream asks first, else None."""
        return self.valid[0].model if self.valid else None

    def __str__(self) -> str:
        return f"{self.kind}: {[body[:200] for body in self.bodies]!r}"


@st.composite
def valid_streams(draw: st.DrawFn) -> StreamCase:
    """Requests that must all be answered rightly, in whatever order; the id says which."""
    cases = tuple(draw(st.lists(valid_calls(), min_size=1, max_size=4)))
    return StreamCase(kind="gRPC valid stream", bodies=tuple(map(_numbered, range(len(cases)), cases)), valid=cases)


@st.composite
def mixed_streams(draw: st.DrawFn) -> StreamCase:
    """Valid, nearly valid and damaged requests."""
    any_call = st.one_of(valid_calls(), nearly_valid_calls(), nearly_valid_calls(), damaged_calls())
    cases = draw(st.lists(any_call, max_size=5))
    return StreamCase(kind="gRPC mixed stream", bodies=tuple(case.body for case in cases))


def _numbered(number: int, case: GrpcCase) -> bytes:
    request = service_pb2.ModelInferRequest.FromString(case.body)
    request.id = str(number)
    serialized: bytes = request.SerializeToString()
    return serialized

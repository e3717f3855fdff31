"""Refuses a request that was made for another contract than that of the version that it came to."""

from __future__ import annotations

import json

from graphkiln_backend.graph.contract import REQUEST_PARAMETER, ContractChanged

_KEY = f'"{REQUEST_PARAMETER}"'


def check_contract(parameters: str, digest: str) -> None:
    """Compares the contract that a request names, if it names one, with the version's.

    Args:
        parameters: The request's parameters as Triton hands them over: a JSON object, or nothing.
        digest: Of the version's contract.

    Raises:
        ContractChanged: They differ.
    """
    if _KEY not in parameters:  # parsing what most requests hold would cost more than all else here
        return
    named = json.loads(parameters).get(REQUEST_PARAMETER, digest)
    if named != digest:
        raise ContractChanged

"""Requests that name the contract that they were made for."""

from __future__ import annotations

import json

import pytest

from graphkiln_backend.graph.contract import ContractChanged
from graphkiln_backend.triton.executor import check_contract


@pytest.mark.parametrize(
    "parameters", ["", "{}", '{"other":"x"}', '{"contract":"abc"}', '{"x": "\\"contract\\""}', '{"a":"contract"}']
)
def test_what_fits(parameters: str) -> None:
    check_contract(parameters, "abc")


@pytest.mark.parametrize("value", ["abd", "", 1, True, None])
def test_what_does_not(value: object) -> None:
    with pytest.raises(ContractChanged):
        check_contract(json.dumps({"contract": value}), "abc")

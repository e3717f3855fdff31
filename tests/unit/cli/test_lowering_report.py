"""What --json says of a lowering: plain data, whatever was left open."""

from __future__ import annotations

import json
from typing import Any

from graphkiln.cli.lowering_report import plan_document, session_document, settings_in_words
from graphkiln_backend.engines.base import Placement, SessionConfig
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.measurement import Basis
from graphkiln_backend.lowering.plan import LoweringPlan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.settings import Settings

CONFIG = SessionConfig(
    engine="openvino", device=CPU, threads=2, spin=False, reason="requested", precision=Precision.BF16
)
SESSION: Any = None


def test_settings_and_plan() -> None:
    settings = Settings(engine="openvino", threads=2, origins={"engine": "--set", "threads": "parameters.threads"})
    plan = LoweringPlan(candidates=(CONFIG,), rejected=("onnxruntime: not requested",))
    document = json.loads(json.dumps(plan_document(settings, Precision.FP32, plan)))
    assert document["settings"]["engine"] == {"value": "openvino", "origin": "--set"}
    assert document["settings"]["precision"] == {"value": "as saved (fp32)", "origin": None}
    assert document["settings"].keys() == settings_in_words(settings, Precision.FP32).keys()
    assert document["candidates"][0]["precision"] == "bf16"
    assert (document["fallback"], document["rejected"]) == ([], ["onnxruntime: not requested"])


def test_a_session() -> None:
    placement = Placement(nodes={"CPU": 8}, precision=Precision.BF16, products={Precision.BF16: 5})
    proven = ProvenSession(session=SESSION, config=CONFIG, placement=placement, self_test=None, notes=("a note",))
    document = json.loads(json.dumps(session_document(proven)))
    assert document["placement"] == {"nodes": {"CPU": 8}, "precision": "bf16", "products": {"bf16": 5}, "elsewhere": []}
    assert (document["device"], document["self_test"], document["notes"]) == ("cpu", None, ["a note"])


def test_one_that_could_not_be_run_has_no_placement() -> None:
    proven = ProvenSession(session=SESSION, config=CONFIG, placement=None, self_test=None)
    assert session_document(proven)["placement"] is None


def test_what_a_choice_was_based_on() -> None:
    basis = Basis(
        chosen="a",
        rates={"a": 2.0, "b": 1.0},
        batch=8,
        machine="a CPU",
        measured_at="2026-01-01T00:00:00+00:00",
        remembered=True,
    )
    proven = ProvenSession(session=SESSION, config=CONFIG, placement=None, self_test=None, basis=basis)
    assert json.loads(json.dumps(session_document(proven)))["choice"] == {
        "chosen": "a",
        "rates": {"a": 2.0, "b": 1.0},
        "batch": 8,
        "machine": "a CPU",
        "measured_at": "2026-01-01T00:00:00+00:00",
        "remembered": True,
    }
    alone = ProvenSession(session=SESSION, config=CONFIG, placement=None, self_test=None)
    assert session_document(alone)["choice"] is None

"""The machine's own counters of energy."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.tuning.measure import EnergyMeter


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "energy_uj").write_text("1000000\n")
        (folder / "max_energy_range_uj").write_text("9000000\n")
    return tmp_path


def test_whole_processors_are_counted(powercap: Path) -> None:
    meter = EnergyMeter(powercap, dict)
    meter.begin()
    for name, value in (("intel-rapl:0", 3_000_000), ("intel-rapl:1", 1_500_000), ("intel-rapl:0:0", 9_000_000)):
        (powercap / name / "energy_uj").write_text(str(value))
    assert meter.joules() == pytest.approx(2.5)


def test_a_counter_starts_again_beyond_its_range(powercap: Path) -> None:
    meter = EnergyMeter(powercap, dict)
    meter.begin()
    (powercap / "intel-rapl:0" / "energy_uj").write_text("500000")
    assert meter.joules() == pytest.approx(8.5)


def test_gpus_count_beside_them(powercap: Path) -> None:
    read = iter([{"gpu:0": 10.0}, {"gpu:0": 14.0}])
    meter = EnergyMeter(powercap, lambda: next(read))
    meter.begin()
    assert meter.joules() == pytest.approx(4)


def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path, powercap: Path) -> None:
    meter = EnergyMeter(tmp_path / "none", dict)
    meter.begin()
    assert meter.joules() is None
    for folder in powercap.glob("intel*"):
        (folder / "energy_uj").write_text("not for you")
    meter = EnergyMeter(powercap, dict)
    meter.begin()
    assert meter.joules() is None

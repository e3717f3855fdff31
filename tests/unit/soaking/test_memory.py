"""When memory counts as growing."""

from __future__ import annotations

from soaking.memory import Sample, grows, growth


def samples(*megabytes: float, instances: int = 5) -> list[Sample]:
    return [
        Sample(at=10.0 * number, instances=instances, mb=mb, supervisor_mb=70, files=11)
        for number, mb in enumerate(megabytes)
    ]


def test_flat_memory_does_not_grow() -> None:
    figures = growth(samples(*[400.0, 410.0, 395.0] * 5))
    assert not grows(figures)
    assert abs(figures["slope_mb_per_minute"]) < 5


def test_steady_growth_is_seen() -> None:
    figures = growth(samples(*[400 + 20 * number for number in range(15)]))
    assert grows(figures)
    assert figures["slope_mb_per_minute"] == 120


def test_moments_with_fewer_instances_do_not_count() -> None:
    restarting = samples(50.0, 60.0, 70.0, instances=1)
    assert growth(restarting + samples(*[400.0] * 9))["start_mb"] == 400


def test_one_reading_has_no_slope() -> None:
    assert growth(samples(400.0))["slope_mb_per_minute"] == 0

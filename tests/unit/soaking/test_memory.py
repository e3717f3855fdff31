"""When memory counts as growing, and which process took it."""

from __future__ import annotations

from soaking.soak import YOUNG_S, Life, Sample, by_role, grows, growth, leaking


def samples(*megabytes: float, instances: int = 5) -> list[Sample]:
    return [
        Sample(at=10.0 * number, instances=instances, mb=mb, regions_mb=9.0, files=11)
        for number, mb in enumerate(megabytes)
    ]


def life(*megabytes: float, role: str = "tritonserver", period_s: float = 30.0) -> Life:
    return Life(role, 100.0, [(100.0 + period_s * number, mb) for number, mb in enumerate(megabytes)])


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


def test_what_a_young_process_takes_is_no_leak() -> None:
    grown = [50.0 + 10 * number for number in range(int(YOUNG_S / 30))]
    roles = by_role([life(*grown, *[200.0] * 8)])
    assert roles["tritonserver"]["slope_mb_per_minute"] == 0
    assert leaking(roles) == []


def test_what_an_old_process_takes_is_a_leak() -> None:
    roles = by_role([life(*range(100, 130)), life(*[50.0] * 30, role="supervisor")])
    assert leaking(roles) == ["tritonserver 2.0 MB/min"]


def test_processes_that_never_got_old_tell_nothing_of_leaks() -> None:
    roles = by_role([life(10, 20, 30), life(20, 30, 40)])
    assert roles["tritonserver"] == {
        "processes": 2,
        "mb_by_minute": {0: 20.0, 1: 35.0},
        "slope_mb_per_minute": None,
    }
    assert leaking(roles) == []

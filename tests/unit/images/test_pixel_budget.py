"""How many pixels are in memory at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from graphkiln_backend.images.encoded import PixelBudget


class TestPixelBudget:
    def test_what_fits_together_does_not_wait(self) -> None:
        budget, together = PixelBudget(100), threading.Barrier(3, timeout=30)

        def hold(pixels: int) -> int:
            with budget.take(pixels):
                return together.wait()

        with ThreadPoolExecutor(3) as pool:
            assert sorted(pool.map(hold, (60, 30, 10))) == [0, 1, 2]

    def test_what_does_not_fit_waits_and_never_do_more_lie_in_memory(self) -> None:
        budget, lock, held, most = PixelBudget(100), threading.Lock(), [0], [0]

        def hold(pixels: int) -> None:
            with budget.take(pixels):
                with lock:
                    held[0] += pixels
                    most[0] = max(most[0], held[0])
                with lock:
                    held[0] -= pixels

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(hold, [70, 40, 30, 90, 10] * 40))
        assert 0 < most[0] <= 100

    def test_what_is_larger_than_all_of_it_has_it_alone(self) -> None:
        budget = PixelBudget(100)
        other, over = threading.Event(), threading.Event()

        def small() -> bool:
            other.set()
            with budget.take(1):
                return over.is_set()

        with ThreadPoolExecutor(1) as pool:
            with budget.take(1000):
                waiting = pool.submit(small)
                assert other.wait(30)
                assert not waiting.done()
                over.set()
            assert waiting.result(30)

    def test_an_error_gives_the_room_back(self) -> None:
        budget = PixelBudget(10)
        for _ in range(3):
            with pytest.raises(ValueError, match="damaged"), budget.take(10):
                raise ValueError("damaged")

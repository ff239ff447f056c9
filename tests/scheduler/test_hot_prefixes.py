from __future__ import annotations

import pytest

from poolweave.errors import ConfigError
from poolweave.scheduler.hot_prefixes import HotPrefixes


def test_heat_is_work_a_second() -> None:
    hot = HotPrefixes(window_s=10.0)
    heats = [hot.observe(1, 0.3, i * 0.5) for i in range(200)]
    assert heats[0] == pytest.approx(0.03)
    assert heats[-1] == pytest.approx(0.6, rel=0.05)
    assert hot.observe(1, 0.0, 100.0 + 10.0) == pytest.approx(heats[-1] / 2.718281828, rel=0.06)
    assert hot.observe(2, 0.3, 110.0) == pytest.approx(0.03)


def test_claimed_once_a_window() -> None:
    hot = HotPrefixes(window_s=10.0)
    assert not hot.claim(1, 0.0)  # never seen
    hot.observe(1, 1.0, 0.0)
    assert hot.claim(1, 1.0)
    assert not hot.claim(1, 10.9)
    assert hot.claim(1, 11.0)


def test_the_coolest_are_forgotten() -> None:
    hot = HotPrefixes(window_s=10.0, max_prefixes=4)
    for key, seconds in ((1, 5.0), (2, 0.1), (3, 0.2), (4, 4.0), (5, 0.3)):
        hot.observe(key, seconds, 0.0)
    assert len(hot) == 3
    assert hot.observe(1, 0.0, 0.0) == pytest.approx(0.5)
    assert hot.observe(4, 0.0, 0.0) == pytest.approx(0.4)


def test_time_set_back_heats_nothing_twice() -> None:
    hot = HotPrefixes(window_s=10.0)
    hot.observe(1, 1.0, 100.0)
    assert hot.observe(1, 0.0, 50.0) == pytest.approx(0.1)
    assert hot.observe(1, 0.0, 110.0) == pytest.approx(0.1 / 2.718281828)


@pytest.mark.parametrize("settings", [{"window_s": 0.0}, {"max_prefixes": 1}])
def test_settings(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="window_s"):
        HotPrefixes(**settings)  # type: ignore[arg-type]

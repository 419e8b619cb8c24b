"""Virtual CPU devices: how many threads they have."""

import pytest

from crossshard.shards import devices


@pytest.mark.parametrize("given", ["²", "", "eight", "-1"])
def test_an_nproc_that_is_not_a_number_counts_for_nothing(given, monkeypatch):
    monkeypatch.setenv("NPROC", given)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert devices._threads() == 3


def test_nproc_is_the_number_of_threads(monkeypatch):
    monkeypatch.setenv("NPROC", "32")
    assert devices._threads() == 32

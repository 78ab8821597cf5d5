"""Planted settings are named in logs of every form, and clean logs get nothing."""

import pytest

from reproduction.benchmarks.advice.planted_logs import EVERY, PLANTED, WRITERS, ask, clean, is_named

FORMS = [form for form in WRITERS if form != "tensorboard"]


@pytest.mark.parametrize("every", EVERY)
def test_95_of_100_planted_settings_are_named(every):
    named = [is_named(name, seed, every, FORMS[seed % 3]) for name in PLANTED for seed in range(9)]
    assert sum(named) >= 0.95 * len(named)


@pytest.mark.parametrize("every", EVERY)
def test_clean_logs_get_nothing(every):
    assert not any(ask(clean(seed, every), FORMS[seed % 3]).reasons for seed in range(9))


def test_event_files_hold_the_same_facts():
    pytest.importorskip("tensorboard")
    assert all(is_named(name, 1, 50, "tensorboard") for name in PLANTED)

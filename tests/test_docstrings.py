"""Every public function says what it returns and what it raises."""

import inspect
import re

import pytest

import curvestep as cs


def public_functions():
    """Functions that users call: those of the package itself, step rules, clip rules and loggers."""
    modules = (cs.steps, cs.loggers)
    found = [getattr(cs, name) for name in cs.__all__ if inspect.isfunction(getattr(cs, name))]
    found += [cs.report.__call__, *cs.clip_rules.RULES]
    for module in modules:
        own = (one for one in vars(module).values() if inspect.isfunction(one))
        found += [one for one in own if one.__module__ == module.__name__ and one.__name__[0] != "_"]
    return sorted(found, key=lambda one: one.__qualname__)


@pytest.mark.parametrize("function", public_functions(), ids=lambda one: one.__qualname__)
def test_docstring_says_what_a_function_returns_and_raises(function):
    words = inspect.getdoc(function)
    assert "Returns:" in words or function.__annotations__["return"] in ("None", None)
    checks = re.search(r"\braise \w|\bcheck_\w+\(", inspect.getsource(function))
    assert "Raises:" in words or not checks

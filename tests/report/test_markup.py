"""Results as HTML and in a line: names in them are text."""

import re

import curvestep as cs
from curvestep.report.markup import html_table


def test_a_result_at_a_prompt_is_one_short_line_with_its_numbers(shown):
    for result in shown.values():
        assert "\n" not in repr(result)
        assert len(repr(result)) < 150
    assert (
        repr(shown["fit"]) == f"<SmoothnessFit: L0 {shown['fit'].L0:.4g}, L1 {shown['fit'].L1:.4g}, 40 rows>"
    )
    assert repr(shown["advice"]) == f"<Advice: {shown['advice'].verdict}>"
    assert f"lr {shown['calibration'].lr:.3g}" in repr(shown["calibration"])
    assert repr(cs.Advice(action="no sign", kind="no-sign", verdict="why " * 90)).endswith("why …>")


def test_a_notebook_shows_a_table_with_everything_that_is_printed(shown):
    for name, result in shown.items():
        page = result._repr_html_()
        assert re.fullmatch(r"<p>.*</p>(<table>(<tr>.*</tr>)+</table>)?(<ul>.*</ul>)?", page, re.DOTALL), name
        for warning in getattr(result, "warnings", ()):
            assert str(warning).partition(" ")[0] in page
    assert f"{shown['calibration'].last_trials[0].gain:.4g}" in shown["calibration"]._repr_html_()
    assert "<th>grad_norm</th>" in shown["trace"]._repr_html_()
    assert cs.Trace()._repr_html_().startswith("<p>Trace: 0 rows</p>")


def test_names_in_a_table_are_text():
    assert html_table("nothing to set", []) == "<p>nothing to set</p>"
    assert html_table("<b>", [("\x1b", "<i>")], ["&"]) == (
        "<p>&lt;b&gt;</p><table><tr><th>\\u001b</th><td>&lt;i&gt;</td></tr></table><ul><li>&amp;</li></ul>"
    )

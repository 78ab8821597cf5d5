"""``cs.report``: what it takes, where it writes, and what it leaves alone."""

import pytest

pytest.importorskip("plotly", reason="needs the extra `report`")
from torch import nn

import curvestep as cs


def test_a_probe_makes_a_page_as_it_makes_advice(trace, tmp_path):
    probe = cs.SmoothnessProbe(nn.Linear(2, 2))
    for row in trace:
        probe.trace.append(dict(row))
    page = cs.report(probe, output=tmp_path / "page.html")
    assert page.verdicts[0]["verdict"] == cs.advise(probe).verdict
    with pytest.raises(TypeError, match=r"report\(\*runs\)"):
        cs.report([probe], output=tmp_path / "page.html")


def test_a_trace_in_memory_makes_a_page_with_a_title(trace, tmp_path):
    ours = cs.Trace(header={"model": "mine"})
    for row in trace:
        ours.append(row)
    page = cs.report(ours, output=tmp_path / "page.html", title="From a notebook")
    assert repr(page) == f"<Page: 1 runs, {str(tmp_path / 'page.html')!r}>"
    text = page.path.read_text(encoding="utf-8")
    assert "<h1>From a notebook</h1>" in text
    assert page.runs[0].name == "mine"
    assert page.verdicts[0]["verdict"] == cs.advise(trace).verdict


def test_an_earlier_page_is_replaced_and_no_other_file(folder, tmp_path):
    output = tmp_path / "page.html"
    output.write_text("mine")
    with pytest.raises(ValueError, match="is there already and is no page of curvestep"):
        cs.report(folder, output=output)
    assert output.read_text() == "mine"
    cs.report(folder, output=output, overwrite=True)
    cs.report(folder / "trace.jsonl", output=output)
    with pytest.raises(ValueError, match="must be an HTML file, got the folder"):
        cs.report(folder, output=tmp_path)

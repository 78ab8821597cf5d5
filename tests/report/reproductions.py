"""What a reproduction leaves beside its runs: claims and figures."""

import math

from curvestep.report.charts import comparison, run_charts
from curvestep.report.views import find_views
from curvestep.trace.run import write_json
from tests.report.pages import make_run


def made_up_claim(paper="p", verdict="reproduced"):
    """One row of the table of a reproduction."""
    return {
        "name": "one", "kind": "paper", "source": "Figure 4", "paper": paper, "scale": "laptop",
        "verdict": verdict, "sentence": "It is 2.", "numbers": {"ratio": "2 [1, 3]"}, "beside": {},
        "note": "",
    }  # fmt: skip


def write_claims(claims, folder, *, data=(), notes=()):
    """What a reproduction leaves of its claims."""
    found = f"{len(claims)} claims were looked at."
    about = {"title": "A reproduction", "found": found, "data": list(data), "notes": list(notes)}
    looks = {
        "headings": {"paper": ["The paper's claims", "the paper says"]},
        "badges": {"reproduced": "supported"},
    }
    write_json(folder / "claims.json", {**about, **looks, "claims": list(claims)})


def make_reproduction(folder):
    """A reproduction of two runs: their charts as its figures, and a claim of each verdict."""
    from curvestep.report.drawing import figure_of, save

    for setting, lr, max_norm in (("a", 0.3, 0.5), ("b", 0.1, math.inf)):
        make_run(folder / "runs" / setting, lr=lr, max_norm=max_norm, steps=100)
    views = find_views([folder])
    charts = {f"{view.name}-{chart.kind}": chart for view in views for chart in run_charts(view)}
    charts["comparison"], *_ = comparison(views)
    for name, chart in charts.items():
        save(figure_of([chart]), folder / "figures" / name.replace("/", "-"))
    pictures = sorted((folder / "figures").glob("*.png"))
    entries = [
        {"png": f"figures/{path.name}", "title": path.stem, "caption": "A chart."} for path in pictures
    ]
    write_json(folder / "figures.json", {"figures": entries})
    claims = [made_up_claim("clipping <helps>")]
    claims += [made_up_claim(verdict=verdict) for verdict in ("in part", "open", "not tested here")]
    write_claims(claims, folder, data=["walls"], notes=["Scale: laptop."])

"""Words of README and the hand-written pages: ``python docs/count_words.py``.

Results, and pages that are made while the site is built, are not counted.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 27_800  # of the docs at commit 6ef220b

if __name__ == "__main__":
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    counts = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").split()) for path in paths}
    for path, count in counts.items():
        print(f"{count:6,}  {path}")
    print(f"{sum(counts.values()):6,}  in all, of {MOST_WORDS:,}")

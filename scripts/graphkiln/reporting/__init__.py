"""HTML reports: one style, one kind of charts, and a table next to every chart.

A report is one self-contained HTML file. `report.Report` consists of sections with tables and horizontal charts; other
pages extend `base.html.j2` and use the macros of `charts.html.j2`. The page of a running server shares `look.css`.
"""

from pathlib import Path

LOOK = Path(__file__).parent / "look.css"

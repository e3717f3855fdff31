"""Reports for people: one style, one way to draw, and a table beside every chart.

A report is one HTML file that needs nothing from elsewhere. `report.Report` is enough for what has sections with
tables and horizontal charts; pages with more to say extend `base.html.j2` and draw with the macros of `charts.html.j2`.
The page of a running server shares the colors and the marks of charts, `look.css`.
"""

from pathlib import Path

# The style sheet that everything has in common which people see in a browser.
LOOK = Path(__file__).parent / "look.css"

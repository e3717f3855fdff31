"""Reports for people: one style, one way to draw, and a table beside every chart.

A report is one HTML file that needs nothing from elsewhere. `report.Report` is enough for what has sections with
tables and
horizontal charts; pages with more to say extend `base.html.j2` and draw with the macros of `charts.html.j2`.
"""

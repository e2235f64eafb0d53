"""Charts of a run, for the page, for `report.html` and for files. `static/` is the page: plain JavaScript."""

"""Files for Prometheus and Grafana about the metrics of `metering/table.py`, which `penstock grafana DIR` writes.

promql.py       queries of one metric
dashboard.py    panels, as Grafana's JSON
files.py        rules of alerts, and the files
"""

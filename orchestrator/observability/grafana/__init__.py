"""Files for Prometheus and Grafana about the metrics of `metering/table.py`, which `penstock grafana DIR` writes.

promql.py    queries of one metric           dashboard.py   the panels as Grafana's JSON
panels.py    what the dashboard shows        writing.py     the files
rules.py     rules of alerts
"""

"""Files for Prometheus and Grafana about the metrics of `metering/table.py`, which `penstock grafana DIR` writes.

promql.py       queries of one metric          rules.py      rules of alerts
dashboard.py    panels, as Grafana's JSON      writing.py    the files
"""

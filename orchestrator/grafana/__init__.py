"""What Prometheus and Grafana are told of the metrics of `metering/table.py`: `penstock grafana DIR` writes it.

promql.py    queries of one metric           dashboard.py   the panels as Grafana's JSON
panels.py    what the dashboard shows        writing.py     the files
rules.py     what an alert is sent for
"""

"""Measurements of a running run, for Prometheus and Ray's dashboard.

    worker ─ add, put, observe ─▶ Meters ─ once a second ─▶ ray_export ─▶ Ray's agent of the node ─▶ Prometheus

`table.py` declares every metric, once: instruments, the Grafana dashboard, the alert rules and the document are made of
it. `meters.py` keeps numbers in the process that measures and knows nothing of Ray; `ray_export.py` alone does.
"""

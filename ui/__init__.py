"""The page for runs, which `penstock ui` serves, and files for Prometheus and Grafana.

app.py       HTTP, live updates, keys            answers.py, open_run.py   what the page asks for
grafana/     rules of alerts, dashboard          its JavaScript: `orchestrator/observability/charts/static/`
"""

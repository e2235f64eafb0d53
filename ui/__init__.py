"""The page for runs, which `penstock ui` serves, and files for Prometheus and Grafana.

app.py          HTTP, live updates, keys         answers.py    what the page asks for
rollouts.py     samples                          activity.py   who was busy when, and what actors printed
remote.py       a copy of runs on a remote disk
grafana/        rules of alerts, dashboard       its JavaScript: `orchestrator/observability/charts/static/`
"""

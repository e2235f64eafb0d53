"""The page for runs: `penstock ui` serves it live, `report.html` is one run's charts in a file.

charts/   which charts a run has, from the names of its metrics        server/   HTTP, live updates, keys
runs/     what is read of run directories, while they are written      static/   the page itself: plain JavaScript
"""

"""The page for runs: `penstock ui` serves it live, `report.html` is one run's charts in a file.

runs/   what is read of run directories, while they are written      server/   HTTP, live updates, keys
                                                                     static/   the page itself: plain JavaScript
"""

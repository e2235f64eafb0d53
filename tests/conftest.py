"""Settings that every test shares."""

from hypothesis import settings

# Machines of continuous integration are shared and slow at odd moments: a property is about values, not about time.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

# `tests/oracle` compares with other projects, which live in an environment of their own: `make oracle` names the folder
# and so gets it. A run of everything leaves it out, or it would end with import errors.
collect_ignore = ["oracle"]

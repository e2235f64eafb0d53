"""Settings that every test shares."""

from hypothesis import settings

# Machines of continuous integration are shared and slow at odd moments: a property is about values, not about time.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

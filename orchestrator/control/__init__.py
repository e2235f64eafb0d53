"""The process that drives a run: its controller, the versions it publishes, evaluation, what it observes."""

"""The process that drives a run: its controller, steps, members that join and leave, evaluation, what it observes."""

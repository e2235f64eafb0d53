"""The controller at scale: its own costs with 1,024 engines and 64 ranks on 137 nodes, all of them simulated.

controller's process   the real controller, fleet, supervisor, watch, logs, metrics        what is measured
store's process        the real store, called over its own connections                     measured as well
members' process       1,024 engines with the real pull loop, ranks, rewards, agents       not measured

__main__.py  rounds and tables    run.py      one run, in a process of its own
fleet.py     the played fleet     members.py  what its actors answer
calls.py     calls of actors without Ray      ray_calls.py  what Ray adds to each call
clock.py     seconds that pass faster         hosts.py      the other two processes
"""

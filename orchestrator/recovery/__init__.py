"""What happens when something dies, by the one word for each mechanism.

restart      a member, the store (`restart.py`), or all ranks (`control/step_loop.py`, from `memory_checkpoints.py`)
return       the whole fleet, from the newest checkpoint, within the command (`resume.py`)
takeover     the next command drives the living actors of a dead one (`takeover.py`)
resume       the next command starts from a checkpoint (`resume.py`)
retry        `--retries N` starts the command again (`retries.py`)

`liveness.py` finds members that hang, `decisions.py` decides what to do about each fault.
"""

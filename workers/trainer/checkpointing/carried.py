"""The states that per-batch functions carry from step to step (`Dataflow.compute(state=…)`), as a checkpoint keeps
them: plain data.

A state is plain data, or a dataclass of plain fields. Of a dataclass the fields are kept; its class is the one that the
stage of the resumed run starts with, so a checkpoint never says what is to be made.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.conf.errors import CheckpointError, DataflowError, NotPlainData, PenstockError
from penstock.workers.trainer.checkpointing.plain_data import decode, encode

MEND = "Checkpoints keep it: let the stage's state be such data or a dataclass of it, or set checkpoint.every_steps=0."


def states_to_text(states: Mapping[str, Any], starts: Mapping[str, Any]) -> str:
    """Encode the states. `states`: by the names of their stages. `starts`: what those stages started with. Raises
    `DataflowError` for a state that cannot be kept."""
    return encode({name: _kept(name, state, starts[name]) for name, state in states.items()})


def states_from_text(text: str, starts: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the states. Raises `CheckpointError` for states of other stages, or of another kind than theirs."""
    try:
        found = decode(text)
    except NotPlainData as error:
        raise CheckpointError(f"what is carried from step to step cannot be read: {error}") from None
    if not isinstance(found, dict) or found.keys() != starts.keys():
        names = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise CheckpointError(
            f"it holds the states of {names}, and this dataflow's stages with a state are {sorted(starts)}. Resume "
            "with the algorithm that wrote it."
        )
    return {name: _restored(name, found[name], start) for name, start in starts.items()}


def _kept(name: str, state: Any, start: Any) -> Any:
    """The plain data that is written of a state."""
    if dataclasses.is_dataclass(start) and type(state) is type(start):
        fields = dataclasses.fields(start)
        derived = [field.name for field in fields if not field.init]
        if derived:
            raise DataflowError(f"stage {name!r}: its state's field {derived[0]!r} is not one to make it from. {MEND}")
        state = {field.name: getattr(state, field.name) for field in fields}
    elif dataclasses.is_dataclass(state) and not isinstance(state, type):
        raise DataflowError(
            f"stage {name!r}: its state is a {type(state).__name__} now and started as {type(start).__name__}; a "
            "resumed run makes it from its fields, by the class that it starts with. Start with that class."
        )
    try:
        encode(state)
    except NotPlainData as error:
        raise DataflowError(f"stage {name!r}: of its state, {error} {MEND}") from None
    return state


def _restored(name: str, state: Any, start: Any) -> Any:
    if not dataclasses.is_dataclass(start) or isinstance(start, type):
        return state
    try:
        return type(start)(**state)
    except (TypeError, ValueError, PenstockError) as error:
        raise CheckpointError(
            f"the state of stage {name!r} makes no {type(start).__name__} ({error}). Resume with the algorithm that "
            "wrote it."
        ) from None

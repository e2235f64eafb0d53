"""Whatever happens between a client and the ranks, the adapter ends with the bits of a straight loop, and each request
has one result."""

import asyncio
import contextlib
import functools
import json
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.conf.serve import ServeConfig
from penstock.serve import training_clients
from penstock.serve.saved_weights import Checkpoints, WeightsAddress
from penstock.serve.training_clients import seed_of_client
from penstock.workers.protocols import AdamParams, AdapterSpec, Datum, LossCall
from tests.amounts import amount
from tests.serve.bad_disk import refusing
from tests.serve.fake_backend import FakeBackend
from tests.serve.scripted_client import ScriptedClient, forward_body, live


class MortalBackend(FakeBackend):
    """`kill_at`: numbers of calls at which the server is killed."""

    def __init__(self, lose_at=(), kill_at=(), *, is_late=False):
        super().__init__(lose_at, is_late=is_late)
        self._kill_at, self.killed = set(kill_at), None

    async def called(self, what, act):
        if len(self.calls) in self._kill_at and not self._is_late:
            await self._die()
        number = len(self.calls)
        result = await super().called(what, act)
        if number in self._kill_at and self._is_late:
            await self._die()
        return result

    async def _die(self):
        self._kill_at.discard(len(self.calls))
        self._kill_at.discard(len(self.calls) - 1)
        self.adapters.clear()
        self.samplers.clear()
        self.killed.set()
        await asyncio.sleep(3600)


def straight(script, number=0):
    """The adapter after a loop without a server."""

    async def loop():
        backend = FakeBackend()
        await backend.create_adapter("a", AdapterSpec(2, seed_of_client(f"x:train:{number}")))
        for kind, fields in script:
            if kind == "optim_step":
                await backend.optim_step("a", AdamParams(**fields["adam_params"]))
            elif kind == "forward_backward":
                given = fields["forward_backward_input"]
                for datum in given["data"]:
                    tokens = np.array(datum["model_input"]["chunks"][0]["tokens"], np.int32)
                    inputs = datum["loss_fn_inputs"]
                    weights = np.array(inputs["weights"]["data"], np.float32)
                    plain = Datum(tokens, np.array(inputs["target_tokens"]["data"]), {"weights": weights})
                    await backend.forward("a", [plain], LossCall("cross_entropy"), backward=True)
        return await backend.adapter_state("a")

    return asyncio.run(loop())


def assert_same_bits(found, expected):
    assert found.num_steps == expected.num_steps
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], value, err_msg=name)


REQUESTS = st.one_of(
    st.tuples(st.just("forward_backward"), st.builds(forward_body, st.lists(st.integers(0, 15), min_size=2, max_size=6),
                                                     st.sampled_from([1.0, 0.5, -0.25]))),
    st.tuples(st.just("optim_step"), st.builds(lambda rate: {"adam_params": {"learning_rate": rate}},
                                               st.sampled_from([0.1, 0.01]))),
    st.tuples(st.just("save_weights_for_sampler"), st.just({"path": "named"})),
)  # fmt: skip
SCRIPTS = st.lists(REQUESTS, min_size=1, max_size=14)
MANY = settings(
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    max_examples=amount(10),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def prepared(script):
    """Saves have names of their own."""
    return [(kind, {"path": f"saved-{seq}"} if kind.startswith("save") else fields)
            for seq, (kind, fields) in enumerate(script)]  # fmt: skip


def run_to_the_end(directory, backend, clients, config, is_drained=False, disk=contextlib.nullcontext):
    """Lives on `disk`, one after the other, until everything has its result; returns the states at the end."""
    ending = ("save_weights", {"path": "ending"})
    clients = [replace(client, script=[*client.script, ending]) for client in clients]
    with disk():
        assert any(live(directory, backend, clients, config=config, is_drained=is_drained) for _ in range(40))
    return {client.number: saved(directory, client.model_id) for client in clients}


def saved(directory, model_id):
    return Checkpoints(directory / "checkpoints").state(
        WeightsAddress(model_id, "weights", "ending"), with_optimizer=True
    )


@given(SCRIPTS, st.data())
@MANY
def test_lost_ranks_killed_servers_and_full_disks_change_no_bit(tmp_path_factory, script, data):
    script = prepared(script)
    calls = st.integers(0, 3 * len(script) + 6)
    losses, kills = st.sets(calls, max_size=3), st.sets(calls, max_size=4)  # one more loss, and its tenant is refused
    order = data.draw(st.permutations(range(1, len(script) + 1)))
    twice = data.draw(st.lists(st.integers(1, len(script)), max_size=4))
    backend = MortalBackend(data.draw(losses), data.draw(kills), is_late=data.draw(st.booleans()))
    config = ServeConfig(snapshot_every=data.draw(st.integers(1, 6)), keep_results=64, drain_s=0.0)
    client = ScriptedClient(0, script, [*order, *twice])
    directory, refused = tmp_path_factory.mktemp("run"), data.draw(st.sets(st.integers(0, 120), max_size=12))
    disk = functools.partial(refusing, directory, lambda number, _: number in refused)
    with patch.multiple(training_clients, DISK_PAUSE_S=0.0, LOOK_S=0.01):
        states = run_to_the_end(directory, backend, [client], config, data.draw(st.booleans()), disk)
    assert_same_bits(states[0], straight(script))
    assert sorted(client.answers) == list(range(len(script) + 2))
    assert not any(answer.startswith(b'{"error"') for answer in client.answers.values())


@given(st.lists(SCRIPTS, min_size=2, max_size=3), st.data())
@MANY
def test_each_of_several_clients_gets_the_bits_that_it_gets_alone(tmp_path_factory, scripts, data):
    scripts = [prepared(script) for script in scripts]
    backend = MortalBackend(data.draw(st.sets(st.integers(0, 40), max_size=3)))
    config = ServeConfig(snapshot_every=3, drain_s=0.0, max_resident=data.draw(st.integers(1, 3)))
    clients = [ScriptedClient(number, script) for number, script in enumerate(scripts)]
    states = run_to_the_end(tmp_path_factory.mktemp("run"), backend, clients, config)
    for number, script in enumerate(scripts):
        assert_same_bits(states[number], straight(script, number))
    assert backend.largest_resident <= config.max_resident


def test_a_request_that_fails_by_itself_is_left_out_and_the_others_count(tmp_path):
    good = ("forward_backward", forward_body([1, 2, 3], 1.0))
    bad = ("forward_backward", forward_body([1, 2, 3], 1.0, config={"fail": 1.0}))
    wrong = ("forward_backward", forward_body([1, 99], 1.0))
    step = ("optim_step", {"adam_params": {"learning_rate": 0.1}})
    client = ScriptedClient(0, [good, bad, wrong, good, step])
    states = run_to_the_end(tmp_path, MortalBackend(), [client], ServeConfig())
    assert_same_bits(states[0], straight([good, good, step]))
    assert json.loads(client.answers[2]) == {"error": "out of memory", "category": "server"}
    assert json.loads(client.answers[3])["category"] == "user"


def test_a_request_that_fails_costs_no_other_client_its_adapter(tmp_path):
    good, step = ("forward_backward", forward_body([1, 2, 3], 1.0)), ("optim_step", {"adam_params": {}})
    bad = ("forward_backward", forward_body([1, 2, 3], 1.0, config={"fail": 1.0}))
    clients = [ScriptedClient(0, [good, step] * 4), ScriptedClient(1, [good, bad, good, bad, good])]
    states = run_to_the_end(tmp_path, MortalBackend(), clients, ServeConfig())
    plain = ("optim_step", {"adam_params": {"learning_rate": 1e-4}})
    assert_same_bits(states[0], straight([good, plain] * 4))
    assert_same_bits(states[1], straight([good] * 3, 1))


def test_a_checkpoint_that_is_loaded_counts_though_it_is_deleted_later(tmp_path):
    good, step = ("forward_backward", forward_body([1, 2, 3], 1.0)), ("optim_step", {"adam_params": {}})
    config = ServeConfig(snapshot_every=100)
    first = ScriptedClient(0, [good, step, good, step])
    run_to_the_end(tmp_path, MortalBackend(), [first], config)
    path = f"tinker://{first.model_id}/weights/ending"
    second = ScriptedClient(1, [("load_weights", {"path": path, "optimizer": True}), good])
    assert live(tmp_path, MortalBackend(), [second], config=config)
    (saved,) = tmp_path.glob(f"checkpoints/{first.model_id.replace(':', '_')}/weights/ending/state-*")
    saved.unlink()
    second.script.append(step)
    states = run_to_the_end(tmp_path, MortalBackend(), [second], config)
    plain = ("optim_step", {"adam_params": {"learning_rate": 1e-4}})
    assert_same_bits(states[1], straight([good, plain, good, plain, good, plain]))

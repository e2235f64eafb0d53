"""A client in the server's process that does as the SDK does: numbered requests, retries, polls without end, over as
many lives of the server as it takes."""

import asyncio
import json
from dataclasses import dataclass, field
from functools import partial

from penstock.conf.serve import ServeConfig
from penstock.serve.journal import Entry, JournalDamaged, JournalError
from penstock.serve.service import Service, client_id
from penstock.serve.sessions import ClientFacts
from penstock.serve.tenants import ONLY, Tenants

SESSION_KEY = "one"


def tensor(values, dtype):
    return {"data": list(values), "dtype": dtype, "shape": [len(values)]}


def forward_body(tokens, weight, loss="cross_entropy", config=None):
    """A request in JSON, as SDKs before 0.30 send it."""
    inputs = {"target_tokens": tensor(tokens[1:], "int64"), "weights": tensor([weight] * (len(tokens) - 1), "float32")}
    chunk = {"type": "encoded_text", "tokens": list(tokens[:-1])}
    given = {"loss_fn": loss, "data": [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}]}
    return {"forward_backward_input": given | ({"loss_fn_config": config} if config else {})}


@dataclass
class ScriptedClient:
    """One training client. `script`: kinds and bodies of its requests, the first has number 1."""

    number: int
    script: list
    order: list = field(default_factory=list)
    """Order in which the requests are sent, numbers more than once; then all are sent again until all have results."""
    answers: dict = field(default_factory=dict)
    names: list = field(default_factory=list)
    """The id of the training client, once it is made."""

    @property
    def model_id(self):
        return self.names[0]

    async def run(self, service):
        """Send and poll until every request has its result. One that was told before is told again."""
        session = await again(service, lambda: service.sessions.create(ONLY, SESSION_KEY, 0.0))
        self.names[:] = [client_id(session.id, self.number)]
        facts = ClientFacts(self.model_id, session.id, ONLY, "tiny/bigram", 0.0)
        client = await again(service, lambda: service.create_client(facts))
        body = json.dumps({"lora_config": {"rank": 2}, "session_id": session.id}).encode()
        entries = [await again(service, lambda: self.send(service, client, 0, "create_model", body))]
        sent = [*self.order, *range(1, len(self.script) + 1)]
        for seq in sent:
            kind, fields = self.script[seq - 1]
            body = json.dumps({**fields, "seq_id": seq, "model_id": self.model_id}).encode()
            send = partial(self.send, service, client, seq, kind, body)
            entries.append(await again(service, send))
        for entry in entries:
            await entry.is_done.wait()
            answer = client.log.answer_of(entry)
            assert self.answers.setdefault(entry.seq, answer.body) == answer.body
        return client

    async def send(self, service, client, seq, kind, body):
        return await service.accept(client, Entry(seq, kind, "application/json"), body)


async def again(service, act):
    """Do as the SDK does where the server answers 503: try again."""
    while True:
        try:
            return await act()
        except JournalError as error:
            if service.is_ending.is_set() or isinstance(error, JournalDamaged):
                raise
            await asyncio.sleep(0.001)


def live(directory, backend, clients, *, config=None, is_drained=False):
    """One life of a server: until all clients have all results (True), or the backend's `killed` is set (False)."""

    async def life():
        backend.killed = asyncio.Event()
        settings = config or ServeConfig()
        try:
            service = Service(settings, backend, directory, Tenants(settings))
            await service.open()
        except JournalDamaged:
            raise
        except JournalError:
            return False  # the disk refuses: the command ends with this sentence, and is started again
        work = [asyncio.ensure_future(client.run(service)) for client in clients]
        killed = asyncio.ensure_future(backend.killed.wait())
        everything = asyncio.ensure_future(asyncio.gather(*work))
        await asyncio.wait([everything, killed], return_when=asyncio.FIRST_COMPLETED, timeout=120)
        if not everything.done():
            if is_drained:
                everything.cancel()
                await service.close()
            return False
        try:
            everything.result()
        except JournalError:
            return False
        await service.close()
        return True

    return asyncio.run(life())

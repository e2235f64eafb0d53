"""The server by which agents reach the policy, on the event loop of an environment actor."""

from aiohttp import web

from penstock.workers.gateway.door import Door


class HttpServer:
    """Lifecycle: `start`, `stop`."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> str:
        """The address that clients are given, such as http://127.0.0.1:41234/v1. `port`: 0 for any that is free."""
        self._runner = web.AppRunner(web.Application(), access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return f"http://{host}:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

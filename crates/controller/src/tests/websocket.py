"""Attaches to the console and the screen of the VM `web` at the WebSocket address of its first argument, with the token that is its
second one, and says line by line what comes of it."""

import asyncio
import sys

import websockets
from websockets.exceptions import ConnectionClosed, InvalidStatusCode

URL, TOKEN = sys.argv[1:]
CONSOLE, SCREEN = f"{URL}/v1/vms/web/console/attach", f"{URL}/v1/vms/web/vnc"


def attach(url, **more):
    return websockets.connect(url, extra_headers={"Authorization": f"Bearer {TOKEN}"}, **more)


async def receive(socket, length):
    """The next bytes, in however many messages they come."""
    came = b""
    while len(came) < length:
        came += await socket.recv()
    return came


async def code_of_the_end(socket):
    try:
        while True:
            await socket.recv()
    except ConnectionClosed as end:
        return end.code


async def main():
    async with attach(CONSOLE) as console:
        await console.send(b"\x00\xff" * 20_000)
        await (await console.ping())
        await console.send("text")
        came = await receive(console, 40_004)
        assert came == b"\x00\xff" * 20_000 + b"text", came
        print("a console of bytes", flush=True)
    async with attach(SCREEN, subprotocols=["binary", "base64"]) as screen:
        version = await receive(screen, 12)
        print("a screen:", screen.subprotocol, version.decode().strip(), flush=True)
    async with attach(CONSOLE) as console:
        await console.send(bytes(65_537))
        print("too long:", await code_of_the_end(console), flush=True)
    try:
        await websockets.connect(CONSOLE)
    except InvalidStatusCode as refused:
        print("without a token:", refused.status_code, flush=True)
    async with attach(CONSOLE) as console:
        print("attached", flush=True)
        print("revoked:", await code_of_the_end(console), flush=True)


asyncio.run(asyncio.wait_for(main(), 600))

"""Uses the console and the screen of the VM `web` as a client for WebSockets that is not Perigee's. Arguments: the controller's socket,
what to type, and the answer to wait for. It says at last which version of RFB the screen speaks."""

import asyncio
import sys

import websockets

SOCKET, TYPED, ANSWER = sys.argv[1:]


def attach(path, **more):
    return websockets.unix_connect(SOCKET, f"ws://localhost/v1/vms/web/{path}", **more)


async def main():
    async with attach("console/attach") as console:
        await console.send(TYPED.encode() + b"\n")
        said = b""
        while ANSWER.encode() not in said:
            said += await console.recv()
    async with attach("vnc", subprotocols=["binary"]) as screen:
        version = b""
        while len(version) < 12:
            version += await screen.recv()
        print(screen.subprotocol, version.decode())


asyncio.run(asyncio.wait_for(main(), 300))

"""A pod that answers each line of a TCP connection with its name and that line.

Runs as a script, like the lab's pods, and listens on one port of the given addresses.
"""

import asyncio
import sys

PORT = 8080


async def main(name: str, *addresses: str) -> None:
    """Serve until killed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(f"{name} ".encode() + line)
                await writer.drain()
        except ConnectionError:
            pass  # the client is gone
        finally:
            writer.close()

    for address in addresses:
        await asyncio.start_server(serve, address, PORT, backlog=1024)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

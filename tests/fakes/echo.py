"""A pod that stays on the line: it answers each line of a TCP connection with its name and that line.

Started as a file, like the pods of the lab; it listens on one port of the addresses given.
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
            pass  # the caller went away
        finally:
            writer.close()

    for address in addresses:
        await asyncio.start_server(serve, address, PORT, backlog=1024)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""Send requests to a web server, each on a new connection, and print the result as one line of JSON.

Usage: probe.py HOST PORT COUNT; with COUNT 0, print a line after the first request, and send requests until there is
something to read from standard input.
"""

import http.client
import json
import select
import sys
import time
from collections import Counter

TIMEOUT_SECONDS = 3.0
PAUSE_SECONDS = 0.02


def ask(host: str, port: int) -> str:
    """Return the pod that responded. Raise OSError or HTTPException."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise http.client.HTTPException(f"status {answer.status}")
    return str(json.loads(body)["pod"])


def main() -> None:
    """Send the requests and print the result."""
    host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pods: Counter[str] = Counter()
    failures: list[str] = []
    requests = 0
    while requests < count if count else not select.select([sys.stdin], [], [], 0)[0]:
        requests += 1
        try:
            pods[ask(host, port)] += 1
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            failures.append(f"{type(error).__name__}: {error}")
        if requests == 1 and not count:
            sys.stdout.write("sending\n")
            sys.stdout.flush()
        time.sleep(PAUSE_SECONDS)
    json.dump(
        {"requests": requests, "pods": pods, "failures": failures[:20], "failed": len(failures)}, sys.stdout
    )
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()

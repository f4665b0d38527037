"""Standard error behind a bounded queue, so that a stalled reader of the log blocks no thread."""

import contextlib
import os
import queue
import threading
import time
from typing import Any, TextIO

import structlog

# While the reader stalls, keep this many texts; a text is a log line or a part of a traceback.
_MOST_TEXTS = 10_000
# Write up to this many texts at once: after each write, the thread may wait for the interpreter lock.
_BATCH = 500

log = structlog.get_logger()


class LogQueue:
    """A file that writes to another one in a thread.

    It drops and counts lines that do not fit into the queue or cannot be written. When the queue is empty again, a log
    line says how many were dropped. Any thread may call it.
    """

    def __init__(self, file: TextIO, most_texts: int = _MOST_TEXTS) -> None:
        self._file = file
        # Write to the descriptor: a thread that blocks in `file.write` holds a lock, which aborts Python at exit.
        self._descriptor = file.fileno()
        self._queue: queue.Queue[str | threading.Event] = queue.Queue(most_texts)
        self._lock = threading.Lock()
        self._dropped = self._reported = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Queue a text, or drop it."""
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._drop(text.count("\n"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: callers must not wait for the reader."""

    def drain(self, seconds: float) -> None:
        """Wait up to this time until everything queued so far is written."""
        deadline, drained = time.monotonic() + seconds, threading.Event()
        with contextlib.suppress(queue.Full):
            self._queue.put(drained, timeout=seconds)
            drained.wait(max(0.0, deadline - time.monotonic()))

    def dropped_lines(self) -> int:
        """Return how many lines were dropped."""
        return self._dropped

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < _BATCH:
                    batch.append(self._queue.get_nowait())
            written = self._write("".join(text for text in batch if isinstance(text, str)))
            for drained in batch:
                if isinstance(drained, threading.Event):
                    drained.set()
            if written and self._dropped > self._reported and self._queue.empty():
                lines, self._reported = self._dropped - self._reported, self._dropped
                log.warning("log lines dropped", lines=lines)

    def _write(self, text: str) -> bool:
        """Write a text; drop what cannot be written, because the disk is full or the pipe closed."""
        data = text.encode(self._file.encoding or "utf-8", "backslashreplace")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError:
                self._drop(data.count(b"\n"))
                return False
        return True

    def _drop(self, lines: int) -> None:
        with self._lock:
            self._dropped += lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

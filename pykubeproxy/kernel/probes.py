"""Send probes with known source ports from a network namespace, and say how each ends.

A process of its own sends them: in the namespace, and there without rights. It keeps the connections open until its
standard input ends, so that conntrack shows them. Another one outlives it, however it ends, and removes their entries.
"""

import contextlib
import enum
import errno
import fcntl
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pykubeproxy.kernel.conntrack import FirstPacket
from pykubeproxy.kernel.errors import KernelError
from pykubeproxy.kernel.system import LIBC, libc_error
from pykubeproxy.objects import Family, Protocol

# linux/sched.h, linux/prctl.h, linux/in.h, linux/in6.h, linux/errqueue.h
_CLONE_NEWNET, _SET_DEATH_SIGNAL, _SET_NO_NEW_PRIVILEGES = 0x40000000, 1, 38
_RECEIVE_ERRORS = {socket.AF_INET: (0, 11), socket.AF_INET6: (41, 25)}
_ICMP_ORIGINS = (2, 3)
_ERROR = struct.Struct("=IBBBBII")  # errno, origin, type, code, padding, info, data
_KINDS = {
    Protocol.TCP: (socket.SOCK_STREAM, socket.IPPROTO_TCP),
    Protocol.UDP: (socket.SOCK_DGRAM, socket.IPPROTO_UDP),
    Protocol.SCTP: (socket.SOCK_STREAM, 132),
}
_ICMP = {
    Family.IPV4: {
        (3, 0): "network unreachable",
        (3, 1): "host unreachable",
        (3, 2): "protocol unreachable",
        (3, 3): "port unreachable",
        (3, 4): "packet too big",
        (3, 9): "network prohibited",
        (3, 10): "host prohibited",
        (3, 13): "prohibited by a filter",
        (11, 0): "time to live exceeded",
    },
    Family.IPV6: {
        (1, 0): "no route",
        (1, 1): "prohibited by a filter",
        (1, 3): "address unreachable",
        (1, 4): "port unreachable",
        (2, 0): "packet too big",
        (3, 0): "hop limit exceeded",
    },
}
_PORT_UNREACHABLE = ((3, 3), (1, 4))
_NOBODY = 65534
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)  # linux/capability.h
# Below the usual ports of clients and the node ports.
_PORTS = range(20000, 30000)
_TRIES = 100
# Sends SYN three times: at once, after 1 s and after 3 s.
SECONDS = 3.5
# Probes start together, but not at the same moment: some rules limit rates.
_SPREAD, _LONGEST_PAUSE = 0.2, 0.01
_CLOSE_SECONDS = 0.2
_SPARE_SECONDS = 15.0
# After the end of a process, the kernel may still send the last packets of its connections.
_LAST_PACKETS_SECONDS = 0.02
# linux/tcp.h: state, options, size of segments
_TCP_INFO = struct.Struct("=B4xB10xI")
_ESTABLISHED, _TIMESTAMPS = 1, 1
# Three retransmissions fit.
_DATA_SECONDS = 1.6
_LOOK_SECONDS = 0.01
SMALL = 100
"""Bytes up to which an IP packet is small: any MTU lets it pass."""


def protocol_number(protocol: Protocol) -> int:
    """Return the number of a protocol in IP packets."""
    return _KINDS[protocol][1]


class ProbeOutcome(enum.Enum):
    """How a probe ends.

    - REPLIED: UDP, with an answer
    - REFUSED: by a reset, or by an error of the local kernel
    - UNREACHABLE: an ICMP error came, or the local kernel has no way there
    - UNANSWERED: UDP, without an answer, which says nothing
    - NOT_SENT: a rule or a setting of the local kernel forbids it
    """

    CONNECTED = "connected"
    REPLIED = "replied"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    RESET = "reset"
    TIMED_OUT = "timed-out"
    UNANSWERED = "unanswered"
    NOT_SENT = "not-sent"


class IcmpError(msgspec.Struct, frozen=True):
    """An ICMP or ICMPv6 error.

    - `type`, `code`: its numbers
    - `sender`: the address that sent it, "" if unknown
    """

    type: int
    code: int
    sender: str

    @property
    def from_closed_port(self) -> bool:
        return (self.type, self.code) in _PORT_UNREACHABLE

    def describe(self, family: Family) -> str:
        """Return its meaning."""
        return _ICMP[family].get((self.type, self.code), f"ICMP type {self.type}, code {self.code}")


class Probe(msgspec.Struct, frozen=True, rename="camel"):
    """A probe and how it ended.

    - `source`, `source_port`: of the packet that was sent
    - `outcome`: "connected", "replied" (UDP), "refused", "unreachable", "reset", "timed-out", "unanswered" (UDP) or
      "not-sent"
    - `started`: when, in seconds of the monotonic clock of the node
    - `seconds`: until this end
    - `icmp`: the ICMP error, or null
    - `error`: that of the kernel as text, or ""
    - `lost_size`: bytes of the first IP packet that the other side did not acknowledge, 0 for none; null if no data was
      sent, or the connection ended before
    """

    source: str
    source_port: int
    outcome: ProbeOutcome
    started: float
    seconds: float
    icmp: IcmpError | None = None
    error: str = ""
    lost_size: int | None = None


class ProbeRequest(msgspec.Struct, frozen=True):
    """What to send. `source` "" is for the caller to choose; `payload` is that of UDP.

    `size`: bytes to send over each TCP connection, 0 for none
    """

    protocol: Protocol
    source: str
    destination: str
    port: int
    count: int = 1
    payload: bytes = b""
    seconds: float = SECONDS
    size: int = 0


class _OpenProbe:
    """One socket from its start to its end."""

    def __init__(self, request: ProbeRequest, port: int) -> None:
        self._request = request
        self._family = socket.AF_INET6 if ":" in request.destination else socket.AF_INET
        self.socket = socket.socket(self._family, *_KINDS[request.protocol])
        try:
            self.socket.setblocking(False)
            self.socket.setsockopt(*_RECEIVE_ERRORS[self._family], 1)
            self.socket.bind((request.source, port))
        except OSError:
            self.socket.close()
            raise
        self.port = port
        self.probe: Probe | None = None

    @property
    def _is_udp(self) -> bool:
        return self._request.protocol is Protocol.UDP

    def start(self) -> None:
        self._started = time.monotonic()
        code = self.socket.connect_ex((self._request.destination, self._request.port))
        if self._is_udp and not code:
            try:
                self.socket.send(self._request.payload)
            except OSError as error:
                code = error.errno or errno.EIO
        # An ICMP error of this machine may have come already.
        if not self._failed(0 if code == errno.EINPROGRESS else code) and not self._is_udp and not code:
            self._end(ProbeOutcome.CONNECTED)

    def proceed(self) -> None:
        """End the probe if the socket shows how."""
        if self._failed(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
            return
        if not self._is_udp:
            with contextlib.suppress(OSError):
                self.socket.getpeername()
                self._end(ProbeOutcome.CONNECTED)
            return
        try:
            self.socket.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._failed(error.errno or errno.EIO)
        else:
            self._end(ProbeOutcome.REPLIED)

    def send(self, number: int) -> None:
        """Send zero bytes over a connection."""
        with contextlib.suppress(OSError):
            self.socket.send(bytes(number))

    @property
    def unacknowledged(self) -> int:
        """Return how many bytes the other side has not acknowledged yet."""
        return int.from_bytes(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def judge(self, size: int) -> None:
        """Record whether data of this size was acknowledged; an error, such as a reset, says nothing about that."""
        assert self.probe is not None
        lost: int | None = 0
        if self.unacknowledged:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            state, options, largest = _TCP_INFO.unpack(info)
            headers = (60 if self._family == socket.AF_INET6 else 40) + (12 if options & _TIMESTAMPS else 0)
            lost = headers + min(size, largest) if state == _ESTABLISHED else None
        self.probe = msgspec.structs.replace(self.probe, lost_size=lost)

    def expire(self) -> None:
        self._end(ProbeOutcome.UNANSWERED if self._is_udp else ProbeOutcome.TIMED_OUT)

    def _failed(self, code: int) -> bool:
        """End the probe if it has failed, by an error number or by an ICMP error."""
        icmp = self._icmp()
        if icmp:
            self._end(ProbeOutcome.UNREACHABLE, code, icmp)
        elif code == errno.ECONNREFUSED:
            self._end(ProbeOutcome.REFUSED, code)
        elif code == errno.ECONNRESET:
            self._end(ProbeOutcome.RESET, code)
        elif code == errno.ETIMEDOUT:
            self.expire()
        elif code in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            self._end(ProbeOutcome.UNREACHABLE, code)
        elif code:
            self._end(ProbeOutcome.NOT_SENT, code)
        return bool(icmp or code)

    def _icmp(self) -> IcmpError | None:
        """Return the ICMP error that the kernel has queued."""
        try:
            _, control, _, _ = self.socket.recvmsg(1, 512, socket.MSG_ERRQUEUE)
        except OSError:
            return None
        for _, _, data in control:
            if len(data) < _ERROR.size:
                continue
            _, origin, kind, code, *_ = _ERROR.unpack_from(data)
            if origin in _ICMP_ORIGINS:
                return IcmpError(kind, code, _address(data[_ERROR.size :]))
        return None

    def _end(self, outcome: ProbeOutcome, code: int = 0, icmp: IcmpError | None = None) -> None:
        seconds = round(time.monotonic() - self._started, 6)
        error = os.strerror(code) if code else ""
        self.probe = Probe(
            self._request.source, self.port, outcome, round(self._started, 6), seconds, icmp, error
        )


def _address(raw: bytes) -> str:
    """Return the address of a sockaddr, "" if there is none."""
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, raw[4:8])
    return socket.inet_ntop(socket.AF_INET6, raw[8:24]) if family == socket.AF_INET6 else ""


def _send(request: ProbeRequest, attempts: Sequence[_OpenProbe]) -> None:
    """Start all probes and wait until each has ended, or until standard input ends."""
    waiting = select.poll()
    waiting.register(sys.stdin, 0)  # only its end
    pause = min(_SPREAD / len(attempts), _LONGEST_PAUSE)
    by_descriptor = {attempt.socket.fileno(): attempt for attempt in attempts}
    unstarted = list(reversed(attempts))
    started = time.monotonic()
    wanted = select.POLLIN if request.protocol is Protocol.UDP else select.POLLOUT
    while True:
        if unstarted:
            attempt = unstarted.pop()
            attempt.start()
            if attempt.probe is None:
                waiting.register(attempt.socket, wanted)
            end = time.monotonic() + request.seconds
        elif time.monotonic() >= end:
            for attempt in attempts:
                if attempt.probe is None:
                    attempt.expire()
        if all(attempt.probe for attempt in attempts):
            return
        timeout = pause if unstarted else max(0.0, end - time.monotonic())
        for descriptor, _ in waiting.poll(1000 * timeout):
            if descriptor not in by_descriptor:
                return
            attempt = by_descriptor[descriptor]
            attempt.proceed()
            if attempt.probe is not None:
                waiting.unregister(descriptor)
        # A probe that ends early does not make the next ones come sooner.
        if unstarted:
            sent = len(attempts) - len(unstarted)
            time.sleep(max(0.0, started + sent * pause - time.monotonic()))


def _send_data(size: int, attempts: Sequence[_OpenProbe]) -> None:
    """Send one byte over each connection, and the others where that arrives."""
    connected = [one for one in attempts if one.probe and one.probe.outcome is ProbeOutcome.CONNECTED]
    for number in (1, size - 1):
        for attempt in connected:
            attempt.send(number)
        end = time.monotonic() + _DATA_SECONDS
        while any(attempt.unacknowledged for attempt in connected) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        for attempt in connected:
            attempt.judge(number)
        connected = [attempt for attempt in connected if not attempt.unacknowledged]


def _opened(request: ProbeRequest) -> Iterator[_OpenProbe]:
    """Open sockets at random free ports, so that a probe meets no conntrack entry of an earlier one.

    Raises OSError if the kernel lacks the protocol or the address.
    """
    for port in random.sample(_PORTS, min(len(_PORTS), request.count + _TRIES)):
        try:
            yield _OpenProbe(request, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        request = msgspec.structs.replace(request, count=request.count - 1)
        if not request.count:
            return
    raise OSError(errno.EADDRINUSE, "too few free ports")


def _close(attempts: Sequence[_OpenProbe]) -> None:
    """End connections as clients do; reset those whose other side keeps them open."""
    connected = [
        attempt.socket
        for attempt in attempts
        if attempt.probe and attempt.probe.outcome is ProbeOutcome.CONNECTED
    ]
    for one in connected:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_WR)
    end = time.monotonic() + _CLOSE_SECONDS
    while connected and (left := end - time.monotonic()) > 0:
        for one in select.select(connected, [], [], left)[0]:
            try:
                if one.recv(4096):
                    continue
            except OSError:
                pass
            connected.remove(one)
    for attempt in attempts:
        with contextlib.suppress(OSError):
            attempt.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        attempt.socket.close()


def _enter(descriptor: int) -> None:
    """Move this process into a network namespace. Raises OSError."""
    if LIBC.setns(descriptor, _CLONE_NEWNET):
        raise libc_error()


def _drop_rights() -> None:
    """Give up all capabilities for good, and the user if that is permitted; sockets need neither. Raises OSError."""
    with contextlib.suppress(PermissionError):
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    if LIBC.capset(_CAPABILITY_HEADER, bytes(24)) or LIBC.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise libc_error()


def _start_remover(request: ProbeRequest) -> int:
    """Start the process that removes the entries of conntrack; return where it reads ports until this process ends."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)
        return writing
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        ports = [int(port) for port in pipe.read().split()]
    time.sleep(_LAST_PACKETS_SECONDS)
    number = protocol_number(request.protocol)
    for port in ports:
        with contextlib.suppress(OSError):
            FirstPacket(number, request.source, port, request.destination, request.port).delete()
    os._exit(0)


class _ProbeAnswer(msgspec.Struct):
    ports: tuple[int, ...] = ()
    probes: tuple[Probe, ...] = ()
    failure: str = ""


def _serve(descriptor: int) -> None:
    """Open sockets in a namespace, -1 is this one; send after a line on standard input, and close at its end."""
    line = sys.stdin.buffer.readline()
    if not line:
        return  # a signal ended the command before it sent the request
    request = msgspec.json.decode(line, type=ProbeRequest)
    remover = _start_remover(request)
    attempts: list[_OpenProbe] = []
    try:
        if descriptor >= 0:
            _enter(descriptor)
        _drop_rights()
        # After the change of the user, which clears this.
        LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        attempts += _opened(request)
        os.write(remover, b" ".join(b"%d" % attempt.port for attempt in attempts))
        _tell(_ProbeAnswer(ports=tuple(attempt.port for attempt in attempts)))
        if sys.stdin.buffer.readline():
            _send(request, attempts)
            if request.size and request.protocol is Protocol.TCP:
                _send_data(request.size, attempts)
            _tell(_ProbeAnswer(probes=tuple(attempt.probe for attempt in attempts if attempt.probe)))
            sys.stdin.buffer.read()
    except BrokenPipeError:
        pass
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EPROTONOSUPPORT:
            reason = "this kernel has no SCTP sockets; load the module sctp"
        _tell(_ProbeAnswer(failure=reason))
    _close(attempts)


def _tell(answer: _ProbeAnswer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.flush()


class Sender:
    """Probes that are ready to be sent, by a process `pid`. `flows` are their first packets."""

    def __init__(self, process: subprocess.Popen[bytes], request: ProbeRequest) -> None:
        self._process, self._request = process, request
        self.pid = process.pid
        number = protocol_number(request.protocol)
        self.flows = [
            FirstPacket(number, request.source, port, request.destination, request.port)
            for port in self._ask(request).ports
        ]

    def send(self) -> tuple[Probe, ...]:
        """Send the probes and return how each ends. Raises KernelError."""
        return self._ask(True).probes

    def _ask(self, sent: object) -> _ProbeAnswer:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(sent) + b"\n")
            self._process.stdin.flush()
            seconds = self._request.seconds + _SPARE_SECONDS
            ready = select.select([self._process.stdout], [], [], seconds)[0]
            line = self._process.stdout.readline() if ready else b""
            answer = (
                msgspec.json.decode(line, type=_ProbeAnswer) if line else _ProbeAnswer(failure="no result")
            )
        except (OSError, ValueError) as error:
            raise KernelError(f"cannot send probes: {error}") from error
        if answer.failure:
            raise KernelError(f"cannot send probes: {answer.failure}")
        return answer


@contextlib.contextmanager
def opened(request: ProbeRequest, namespace: str = "") -> Iterator[Sender]:
    """Open sockets in the namespace at a path, "" for this one, and close them at the end. Raises KernelError.

    At the end, conntrack of the caller's namespace has no entries of them.
    """
    command = [sys.executable, "-P", "-m", __name__, "-1"]
    with contextlib.ExitStack() as stack:
        try:
            descriptors: tuple[int, ...] = ()
            if namespace:
                file = stack.enter_context(Path(namespace).open("rb"))
                descriptors = (file.fileno(),)
                command[-1] = str(file.fileno())
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                # Ctrl-C in a terminal ends all processes of the group.
                command,
                stdin=pipe,
                stdout=pipe,
                pass_fds=descriptors,
                process_group=0,
            )
        except OSError as error:
            where = namespace or "this node"
            raise KernelError(f"cannot send probes from {where}: {error.strerror}") from error
        stack.enter_context(process)
        stack.callback(_end, process)
        yield Sender(process, request)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have a sender close its connections, and wait until their entries of conntrack are removed."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.stdin.close()
        process.wait(_SPARE_SECONDS)
        select.select([process.stdout], [], [], _SPARE_SECONDS)  # both processes have it open
    with contextlib.suppress(PermissionError):  # without CAP_KILL, as the process is of another user
        process.kill()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

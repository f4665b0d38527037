"""The pages of the metrics address, as kube-proxy has them."""

import json
import platform
import re
import time
from collections.abc import Callable, Mapping

import pykubeproxy
from pykubeproxy.agent import http
from pykubeproxy.config import Config, configz, flagz

# The kube-proxy whose flags, metrics and pages these are.
_EMULATED = "1.36"
# The very words of upstream: monitoring looks for them.
_STATUSZ_HEAD = (
    "\nkube-proxy statusz\nWarning: This endpoint is not meant to be machine parseable, has no formatting"
    " compatibility guarantees and is for debugging purposes only.\n"
)
# User and password in the URL of --master.
_PASSWORD = re.compile(r"^(master: [^/]*//)[^/]*@", re.MULTILINE)


def metrics_pages(
    metrics: Callable[[], http.Answer],
    config: Callable[[], Config],
    flags: Mapping[str, object],
    clock: Callable[[], float] = time.time,
) -> http.Page:
    """/metrics and the pages that tell of configuration and version; none of them holds a secret.

    `config` gives the one in force, `flags` are those of the command line as `config.load` takes them.
    """
    started = clock()
    table: dict[str, Callable[[], http.Answer]] = {
        "/configz": lambda: http.Answer(_compact(configz(config())), http.JSON),
        "/flagz": lambda: http.text(_PASSWORD.sub(r"\1", flagz(flags))),
        "/healthz": lambda: http.text("ok"),
        "/metrics": metrics,
        "/proxyMode": lambda: http.text("iptables"),
    }
    paths = sorted(table)
    table["/statusz"] = lambda: http.text(statusz(started, clock(), paths))
    return http.pages(table)


def statusz(started: float, now: float, paths: list[str]) -> str:
    """The text of /statusz; times are seconds since 1970."""
    minutes, seconds = divmod(max(0, int(now - started)), 60)
    hours, minutes = divmod(minutes, 60)
    start = time.gmtime(started)
    lines = {
        "Started": f"{time.strftime('%a %b', start)} {start.tm_mday:2} {time.strftime('%H:%M:%S UTC %Y', start)}",
        "Up": f"{hours} hr {minutes:02} min {seconds:02} sec",
        "Python version": platform.python_version(),
        "Binary version": pykubeproxy.__version__,
        "Emulation version": _EMULATED,
        "Paths": " ".join(paths),
    }
    return "\n".join([_STATUSZ_HEAD, *(f"{name}  {value}" for name, value in lines.items()), ""])


def _compact(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()

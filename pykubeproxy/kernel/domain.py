"""Address families as sockets and netlink number them."""

import socket

from pykubeproxy.objects import Family

DOMAIN = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}

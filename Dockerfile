# Build the image of the agent. The first stage builds a virtual environment, the second holds only what the agent runs.
#
# The base image is pinned by digest and Python packages by hash (`make lock` renews the hashes). Debian packages are
# checked against the archive's signatures; a build installs their newest security updates. To renew the base image,
# choose a newer tag debian:bookworm-DATE-slim and the digest that `docker buildx imagetools inspect TAG` prints.
# Bookworm has iptables 1.8.9, the version that the tests and measurements use.
ARG BASE=docker.io/library/debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE} AS build
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install -y -q --no-install-recommends gcc libc6-dev python3-dev python3-venv
COPY requirements/build.txt requirements/node.txt /src/requirements/
# /opt/build has the build tools; /opt/pykubeproxy is shipped and has no pip. python-iptables is built from source.
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install -q --require-hashes -r /src/requirements/build.txt \
    && python3 -m venv --without-pip /opt/pykubeproxy
# Without debug information (-g0) the build of python-iptables is reproducible.
RUN PATH=/opt/build/bin:$PATH CFLAGS=-g0 /opt/build/bin/pip wheel -q --require-hashes --no-build-isolation \
        -w /opt/wheels -r /src/requirements/node.txt
COPY pyproject.toml README.md LICENSE /src/
COPY pykubeproxy /src/pykubeproxy
# The lab is a development tool that runs from a checkout.
RUN /opt/build/bin/pip wheel -q --no-build-isolation --no-deps -w /opt/wheels /src \
    && /opt/build/bin/pip --python /opt/pykubeproxy/bin/python install -q --no-index --no-deps /opt/wheels/*.whl \
    && rm -r /opt/pykubeproxy/lib/python3*/site-packages/pykubeproxy/lab \
    && chmod -R go-w /opt/pykubeproxy

FROM ${BASE}
LABEL org.opencontainers.image.title="pykubeproxy" \
      org.opencontainers.image.description="A Kubernetes service proxy that works through iptables" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.documentation="/usr/share/doc/pykubeproxy/README.md"
# The package iptables has both backends, nftables has nft, which prints the rules of firewalls; kmod has modprobe, which
# loads the modules of iptables-legacy. The base image has setpriv, which makes the kernel kill iptables-restore when the
# agent ends.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends iptables kmod nftables python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*
COPY --from=build /opt/pykubeproxy /opt/pykubeproxy
COPY README.md LICENSE /usr/share/doc/pykubeproxy/
# The agent writes no files in the image, so the root file system may be read-only.
ENV PATH=/opt/pykubeproxy/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
ENTRYPOINT ["pykubeproxy"]
CMD ["run"]

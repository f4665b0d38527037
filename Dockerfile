# The image of the agent. The first stage builds, the second holds only what runs; neither keeps a processor out.
#
# The base is pinned by digest, what comes from PyPI by hash (make lock renews these), and what comes from Debian by the
# signatures of the archive, whose newest security updates a build takes in. To renew the base, take a newer dated tag of
# debian:bookworm-…-slim and the digest that `docker buildx imagetools inspect TAG` prints for it. Bookworm has
# iptables 1.8.9, with which everything here is measured and tested.
ARG BASE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE} AS build
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install -y -q --no-install-recommends gcc libc6-dev python3-dev python3-venv
COPY requirements.txt requirements-build.txt /src/
# One environment to build with, and the one to be shipped, which needs no pip. python-iptables comes as source.
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install -q --require-hashes -r /src/requirements-build.txt \
    && python3 -m venv --without-pip /opt/pykubeproxy
# python-iptables is linked against the C library and loads the others by name; with -g0 it is the same each time.
RUN PATH=/opt/build/bin:$PATH CFLAGS=-g0 /opt/build/bin/pip wheel -q --require-hashes --no-build-isolation \
        -w /opt/wheels -r /src/requirements.txt
COPY pyproject.toml README.md LICENSE /src/
COPY pykubeproxy /src/pykubeproxy
# The lab is for trying out, and runs from a checkout.
RUN /opt/build/bin/pip wheel -q --no-build-isolation --no-deps -w /opt/wheels /src \
    && /opt/build/bin/pip --python /opt/pykubeproxy/bin/python install -q --no-index --no-deps /opt/wheels/*.whl \
    && rm -r /opt/pykubeproxy/lib/python3*/site-packages/pykubeproxy/lab \
    && chmod -R go-w /opt/pykubeproxy

FROM ${BASE}
LABEL org.opencontainers.image.title="pykubeproxy" \
      org.opencontainers.image.description="A Kubernetes service proxy that works through iptables" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.documentation="/usr/share/doc/pykubeproxy/README.md"
# Both kinds of iptables, and modprobe for the modules of the legacy one.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends iptables kmod python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*
COPY --from=build /opt/pykubeproxy /opt/pykubeproxy
COPY README.md LICENSE /usr/share/doc/pykubeproxy/
# Nothing is written to the image at run time: the root file system may be read-only.
ENV PATH=/opt/pykubeproxy/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
ENTRYPOINT ["pykubeproxy"]
CMD ["run"]

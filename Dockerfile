# Two images from one file: `gateway` (no torch) and `engine` (target and draft).
#   docker build --target gateway -t outrider-gateway .
#   docker build --target engine  -t outrider-engine .
# Uses no BuildKit syntax, so Docker 20.10's classic builder works too.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# All containers use the same user, so that only they can access the shared sockets and CUDA memory.
RUN groupadd --gid 10001 outrider && useradd --uid 10001 --gid outrider --no-create-home --home-dir /tmp outrider \
    && mkdir -p /run/outrider && chown outrider:outrider /run/outrider && chmod 700 /run/outrider
WORKDIR /opt/outrider
COPY constraints.txt .

FROM base AS wheel
ARG INDEX_URL=
ARG EXTRA_INDEX_URL=
COPY . source
RUN python -m pip wheel --no-deps --wheel-dir dist \
      ${INDEX_URL:+--index-url "$INDEX_URL"} ${EXTRA_INDEX_URL:+--extra-index-url "$EXTRA_INDEX_URL"} ./source

FROM base AS gateway
ARG INDEX_URL=
ARG EXTRA_INDEX_URL=
COPY --from=wheel /opt/outrider/dist dist
RUN wheel=$(echo dist/*.whl) && python -m pip install -c constraints.txt \
      ${INDEX_URL:+--index-url "$INDEX_URL"} ${EXTRA_INDEX_URL:+--extra-index-url "$EXTRA_INDEX_URL"} "$wheel[otel]"
USER outrider
VOLUME /run/outrider
ENTRYPOINT ["outrider", "serve"]
CMD ["gateway"]

FROM base AS engine
ARG INDEX_URL=
ARG EXTRA_INDEX_URL=
# When a kernel first runs, Triton compiles its launcher with the system's compiler and Python's headers.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && { python -c 'import pathlib, sysconfig, sys; sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' \
         || apt-get install -y --no-install-recommends python3-dev; } \
    && rm -rf /var/lib/apt/lists/*
RUN python -m pip install -c constraints.txt \
      ${INDEX_URL:+--index-url "$INDEX_URL"} ${EXTRA_INDEX_URL:+--extra-index-url "$EXTRA_INDEX_URL"} torch
COPY --from=wheel /opt/outrider/dist dist
RUN wheel=$(echo dist/*.whl) && python -m pip install -c constraints.txt \
      ${INDEX_URL:+--index-url "$INDEX_URL"} ${EXTRA_INDEX_URL:+--extra-index-url "$EXTRA_INDEX_URL"} "$wheel[engine,otel]"
# The volumes for compiled kernels, with the tiles chosen for a GPU, and for models of the hub take their
# owner from these folders.
RUN mkdir -p /var/cache/outrider && chown outrider:outrider /var/cache/outrider && chmod 700 /var/cache/outrider
RUN mkdir -p /var/cache/huggingface && chown outrider:outrider /var/cache/huggingface
ENV TRITON_CACHE_DIR=/var/cache/outrider HF_HOME=/var/cache/huggingface
USER outrider
VOLUME /run/outrider /var/cache/outrider /var/cache/huggingface
ENTRYPOINT ["outrider", "serve"]
CMD ["target"]

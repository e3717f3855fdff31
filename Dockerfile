# graphkiln on the CPU, without a GPU image's gigabytes:
#
#   docker build --target cpu -t graphkiln .
#   docker run --rm -p 8000:8000 -p 8001:8001 -p 8002:8002 -v "$PWD/model_repository:/models:ro" graphkiln
#
# With the page for people on port 8003 (docs/page.md), for this machine alone:
#
#   docker run --rm -p 8000:8000 -p 127.0.0.1:8003:8003 -v "$PWD/model_repository:/models:ro" graphkiln \
#       graphkiln serve --model-store /models --page
#
# For production, on NVIDIA's current Triton, on CPUs and GPUs (--gpus all); BASE may name another release of it:
#
#   docker build --target triton -t graphkiln-triton .
#   docker run --rm --gpus all --shm-size=1g -p 8000:8000 -p 8001:8001 -p 8002:8002 \
#       -v "$PWD/model_repository:/models:ro" graphkiln-triton
#
# The same with a store inside, for stores in S3 and its like or in a registry, and for NVIDIA GPUs:
#
#   docker build --target store --build-arg STORE=model_repository -t graphkiln-digits .
#   docker build --target remote -t graphkiln-remote .
#   docker build --target gpu -t graphkiln-gpu .        # run it with --gpus all
#
# See docs/releasing.md.

ARG BASE=nvcr.io/nvidia/tritonserver:26.10-py3

FROM debian:bookworm-slim AS python
# The clock of everything that writes a date (useradd, wheels): the same for each build, so that layers are the same.
ARG SOURCE_DATE_EPOCH=1580601600
# Logs and caches tell when it was built. Bytecode is made anew: Debian's is checked against times of files, which a
# reproducible image does not keep.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 libpython3.11 haproxy \
    && PYTHONHASHSEED=0 python3 -m compileall -q -f --invalidation-mode unchecked-hash /usr/lib/python3.11 /usr/lib/python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/cache/ldconfig/aux-cache \
    && find /var/log -type f -delete

FROM python AS tools
# Graphs that change the case of text (StringNormalizer) need a locale, which the slim image lacks.
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv locales binutils \
    && localedef --no-archive -i en_US -f UTF-8 en_US.UTF-8
# What writes the inventory. It stays here.
COPY deploy/image/requirements-sbom.txt /tools/
RUN python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
        -r /tools/requirements-sbom.txt
COPY --from=python /var/lib/dpkg/status /tools/debian/status
COPY --from=python /usr/share/doc /tools/debian/doc

# What is installed is locked, with hashes: see docs/releasing.md. A change of our own code installs none of it anew.
FROM tools AS libraries-cpu
COPY deploy/image/requirements-build.txt deploy/image/requirements-cpu.txt /tools/
RUN python3 -m venv /opt/graphkiln \
    && /opt/graphkiln/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check --no-deps --require-hashes \
        -r /tools/requirements-build.txt -r /tools/requirements-cpu.txt

FROM scratch AS source
COPY pyproject.toml README.md CHANGELOG.md LICENSE /
COPY backend /backend
COPY client /client
COPY converters /converters
COPY scripts /scripts
COPY model_repository /model_repository

FROM libraries-cpu AS build-cpu
COPY deploy/image /tools/
COPY --from=source / /source/
RUN /tools/install-graphkiln /source

FROM python AS runtime
ARG SOURCE_DATE_EPOCH=1580601600
# A new volume belongs to whom its folder in the image belongs to: without these, to root, and nothing could be kept there.
RUN useradd --create-home --uid 1000 --no-log-init graphkiln \
    && install --directory --owner=graphkiln --group=graphkiln /cache /home/graphkiln/.cache
COPY --from=tools /usr/lib/locale/en_US.utf8 /usr/lib/locale/en_US.utf8
ENV PATH=/opt/graphkiln/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GRAPHKILN_HOST=0.0.0.0 \
    GRAPHKILN_PAGE_HOST=0.0.0.0 \
    GRAPHKILN_MODEL_STORE=/models
USER graphkiln
WORKDIR /home/graphkiln
EXPOSE 8000 8001 8002 8003
# As patient as the liveness probe of deploy/kubernetes: while models load, for ten minutes at most, nobody answers.
HEALTHCHECK --interval=10s --timeout=5s --start-period=660s --retries=66 \
    CMD ["python3", "-m", "graphkiln_backend.server.healthcheck"]
CMD ["graphkiln", "serve", "--model-store", "/models"]
LABEL org.opencontainers.image.title="graphkiln" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM runtime AS cpu
COPY --from=build-cpu /opt/graphkiln /opt/graphkiln
LABEL org.opencontainers.image.description="Serves proven static graphs through NVIDIA Triton, on the CPU" \
      org.opencontainers.image.version="0.1.0"

FROM cpu AS store
ARG STORE=model_repository
COPY --chown=root:root ${STORE} /models

# Below what the CPU's images need: some builders build each stage above the one they are asked for.
FROM libraries-cpu AS libraries-remote
COPY deploy/image/requirements-remote.txt /tools/
RUN /opt/graphkiln/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check --no-deps --require-hashes \
    -r /tools/requirements-remote.txt

FROM libraries-remote AS build-remote
COPY deploy/image /tools/
COPY --from=source / /source/
RUN /tools/install-graphkiln /source

FROM runtime AS remote
COPY --from=build-remote /opt/graphkiln /opt/graphkiln
LABEL org.opencontainers.image.description="Serves proven static graphs from remote stores through NVIDIA Triton, on the CPU" \
      org.opencontainers.image.version="0.1.0"

FROM tools AS libraries-gpu
COPY deploy/image/requirements-build.txt deploy/image/requirements-gpu.txt /tools/
RUN python3 -m venv /opt/graphkiln \
    && /opt/graphkiln/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check --no-deps --require-hashes \
        -r /tools/requirements-build.txt -r /tools/requirements-gpu.txt

FROM libraries-gpu AS build-gpu
COPY deploy/image /tools/
COPY --from=source / /source/
RUN /tools/install-graphkiln /source

FROM runtime AS gpu
COPY --from=build-gpu /opt/graphkiln /opt/graphkiln
# Where the wheels of CUDA and cuDNN lie, and what NVIDIA's container toolkit brings from the host.
ENV LD_LIBRARY_PATH=/opt/graphkiln/lib/python3.11/site-packages/nvidia/cu13/lib:/opt/graphkiln/lib/python3.11/site-packages/nvidia/cudnn/lib \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.description="Serves proven static graphs through NVIDIA Triton, on NVIDIA GPUs" \
      org.opencontainers.image.version="0.1.0"

# On a Triton that is there: its Python, its libraries, its CUDA. The inventory names what is installed beside them.
FROM ${BASE} AS libraries-triton
USER root
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv locales \
    && localedef --no-archive -i en_US -f UTF-8 en_US.UTF-8 \
    && mkdir /tools && cp -r /usr/share/doc /tools/doc
COPY deploy/image/requirements-sbom.txt deploy/image/requirements-build.txt deploy/image/requirements-triton.txt /tools/
RUN python3 -m venv /opt/sbom && python3 -m venv /opt/graphkiln \
    && /opt/sbom/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
        -r /tools/requirements-sbom.txt \
    && /opt/graphkiln/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check --no-deps --require-hashes \
        -r /tools/requirements-build.txt -r /tools/requirements-triton.txt

FROM libraries-triton AS build-triton
COPY deploy/image /tools/
COPY --from=source / /source/
RUN mkdir /tools/debian && mv /tools/doc /tools/debian/ && cp /var/lib/dpkg/status /tools/debian/ \
    && /tools/install-graphkiln /source

FROM ${BASE} AS triton
USER root
# NVIDIA's image has a user of number 1000 already, by another name.
RUN apt-get update && apt-get install -y --no-install-recommends haproxy && rm -rf /var/lib/apt/lists/* \
    && { id -un 1000 >/dev/null 2>&1 || useradd --uid 1000 --no-log-init graphkiln; } \
    && install --directory --owner=1000 --group=1000 /cache /home/graphkiln /home/graphkiln/.cache
COPY --from=libraries-triton /usr/lib/locale/en_US.utf8 /usr/lib/locale/en_US.utf8
COPY --from=build-triton /opt/graphkiln /opt/graphkiln
ENV PATH=/opt/graphkiln/bin:$PATH \
    HOME=/home/graphkiln \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GRAPHKILN_HOST=0.0.0.0 \
    GRAPHKILN_PAGE_HOST=0.0.0.0 \
    GRAPHKILN_MODEL_STORE=/models
USER 1000
WORKDIR /home/graphkiln
EXPOSE 8000 8001 8002 8003
HEALTHCHECK --interval=10s --timeout=5s --start-period=660s --retries=66 \
    CMD ["python3", "-m", "graphkiln_backend.server.healthcheck"]
ENTRYPOINT []
CMD ["graphkiln", "serve", "--model-store", "/models"]
LABEL org.opencontainers.image.title="graphkiln" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="Serves proven static graphs through NVIDIA's current Triton" \
      org.opencontainers.image.version="0.1.0"

# Without --target: the image for the CPU.
FROM cpu

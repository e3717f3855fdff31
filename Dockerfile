# graphkiln on the CPU, without a GPU image's gigabytes:
#
#   docker build --target cpu -t graphkiln .
#   docker run --rm -p 8000:8000 -p 8001:8001 -p 8002:8002 -v "$PWD/model_repository:/models:ro" graphkiln
#
# The same with a store inside:
#
#   docker build --target store --build-arg STORE=model_repository -t graphkiln-digits .

FROM debian:bookworm-slim AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 libpython3.11 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*

FROM python AS build
# Graphs that change the case of text (StringNormalizer) need a locale, which the slim image lacks.
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv locales binutils \
    && localedef --no-archive -i en_US -f UTF-8 en_US.UTF-8
# What is installed is locked, with hashes: see docs/releasing.md. A change of our own code installs none of it anew.
COPY deploy/image /source/deploy/image
RUN python3 -m venv /opt/graphkiln \
    && /opt/graphkiln/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
        -r /source/deploy/image/requirements-build.txt -r /source/deploy/image/requirements-cpu.txt
COPY pyproject.toml README.md CHANGELOG.md LICENSE /source/
COPY backend /source/backend
COPY client /source/client
COPY converters /source/converters
COPY scripts /source/scripts
COPY model_repository /source/model_repository
# The context holds no .git: `--build-arg VERSION=0.2.0` says what is built.
ARG VERSION
RUN SETUPTOOLS_SCM_PRETEND_VERSION="$VERSION" /opt/graphkiln/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation /source \
    && /opt/graphkiln/bin/pip uninstall --yes hatchling hatch-vcs setuptools-scm vcs-versioning pathspec pluggy tomlkit \
        trove-classifiers setuptools pip \
    && /source/deploy/image/prune /opt/graphkiln

FROM python AS cpu
LABEL org.opencontainers.image.title="graphkiln" \
      org.opencontainers.image.description="Serves proven static graphs through NVIDIA Triton, on the CPU" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --create-home --uid 1000 graphkiln
COPY --from=build /opt/graphkiln /opt/graphkiln
COPY --from=build /usr/lib/locale/en_US.utf8 /usr/lib/locale/en_US.utf8
ENV PATH=/opt/graphkiln/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GRAPHKILN_HOST=0.0.0.0 \
    GRAPHKILN_MODEL_STORE=/models
USER graphkiln
WORKDIR /home/graphkiln
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python3", "-m", "graphkiln_backend.server.healthcheck"]
CMD ["graphkiln", "serve", "--model-store", "/models"]

FROM cpu AS store
ARG STORE=model_repository
COPY --chown=root:root ${STORE} /models

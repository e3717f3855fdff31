# graphkiln on the CPU, without a GPU image's gigabytes:
#
#   docker build --target cpu -t graphkiln .
#   docker run --rm -p 8000:8000 -p 8001:8001 -p 8002:8002 -v "$PWD/model_repository:/models:ro" graphkiln

FROM debian:bookworm-slim AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 libpython3.11 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
# Graphs that change the case of text (StringNormalizer) need a locale, which the slim image lacks.
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv locales \
    && localedef --no-archive -i en_US -f UTF-8 en_US.UTF-8
COPY pyproject.toml README.md CHANGELOG.md LICENSE /source/
COPY backend /source/backend
COPY client /source/client
COPY converters /source/converters
COPY scripts /source/scripts
COPY model_repository /source/model_repository
# OpenVINO computes in bf16 on CPUs that can. Its plugins for other devices and other frameworks' readers stay out.
RUN python3 -m venv /opt/graphkiln \
    && /opt/graphkiln/bin/pip install --no-cache-dir --disable-pip-version-check "/source[serve,openvino]" \
    && /opt/graphkiln/bin/pip uninstall --yes pip \
    && cd /opt/graphkiln/lib/python3*/site-packages/openvino/libs \
    && rm -f libopenvino_intel_[gn]pu_* libopenvino_tensorflow* libopenvino_pytorch* libopenvino_paddle* cache.json

FROM python AS cpu
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

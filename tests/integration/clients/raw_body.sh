#!/usr/bin/env bash
# The bytes of one tensor as the whole body: no JSON, no library. Usage: raw_body.sh URL TENSOR_FILE
set -euo pipefail
curl --silent --show-error --fail-with-body \
    --header "Content-Type: application/octet-stream" \
    --header "Inference-Header-Content-Length: 0" \
    --data-binary "@$2" \
    "$1/v2/models/digits/infer"

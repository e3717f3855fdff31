#!/usr/bin/env bash
# model-signing 1.1.1 with sigstore 4.5.1: a fresh installation cannot be imported.
#
# `pip install model-signing` succeeds and `pip check` finds nothing, but the package imports OpenSSL (pyOpenSSL), which
# it does not require. Earlier releases of sigstore brought it along; 4.5.1 no longer does. With pyopenssl beside it,
# everything works.
#
# Seen:
#   No broken requirements found.
#   ModuleNotFoundError: No module named 'OpenSSL'
#   with pyopenssl: model_signing, version 1.1.1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check model-signing==1.1.1 sigstore==4.5.1 cryptography==50.0.2
venv/bin/pip check --disable-pip-version-check
without=$(venv/bin/model_signing --version 2>&1 | tail -1 || true)
echo "$without"
venv/bin/pip install -q --disable-pip-version-check pyopenssl==26.4.0
with=$(venv/bin/model_signing --version)
echo "with pyopenssl: $with"
[ "$without" = "ModuleNotFoundError: No module named 'OpenSSL'" ] && [ "$with" = "model_signing, version 1.1.1" ]

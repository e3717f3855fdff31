#!/usr/bin/env bash
# model-signing 1.1.1: `model_signing sign key --password` never opens an encrypted key.
#
# The command hands the password on as text; cryptography takes bytes and refuses it, whatever the password. The same key
# signs by the Python interface if the password is given as bytes, which its annotation (`str | None`) does not allow.
# Signing with a certificate takes no password at all.
#
# Seen:
#   Signing failed with error: Cannot convert "<class 'str'>" instance to a buffer.
#   signed with bytes: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check model-signing==1.1.1 sigstore==4.5.1 cryptography==50.0.2 pyopenssl==26.4.0
mkdir model
echo weights > model/weights
openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes256 -pass pass:secret -out key.pem
failed=$(venv/bin/model_signing sign key model --signature model.sig --private_key key.pem --password secret 2>&1 | head -1 || true)
echo "$failed"
venv/bin/python - <<'P'
from model_signing import signing

signing.Config().use_elliptic_key_signer(private_key="key.pem", password=b"secret").sign("model", "model.sig")
P
signed=$([ -s model.sig ] && echo True || echo False)
echo "signed with bytes: $signed"
[ "$failed" = "Signing failed with error: Cannot convert \"<class 'str'>\" instance to a buffer." ] && [ "$signed" = True ]

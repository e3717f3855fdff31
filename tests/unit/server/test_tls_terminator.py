"""The process that ends TLS connections; what it does to bytes stands in `test_tls`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trustme
from certificates import address, write
from running import free_ports

from graphkiln_backend.server.tls import TlsTerminator


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """Whose end closes the pipe to its standard input, however the parent ended."""
    (port,) = free_ports(1)
    files = write(trustme.CA().issue_cert("127.0.0.1"), tmp_path)
    code = f"""
import os
from pathlib import Path
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.tls import TlsFiles, TlsTerminator
files = TlsFiles(certificate=Path({str(files.certificate)!r}), key=Path({str(files.key)!r}))
address = ListenAddress(protocol="HTTP", host="127.0.0.1", port={port})
print(TlsTerminator(files, address, address).pid, flush=True)
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 9
    with pytest.raises(ProcessLookupError):
        wait_gone(int(done.stdout))
    with TlsTerminator(files, address(port), address(port)):
        pass  # the port is free again


def wait_gone(pid: int) -> None:
    """Raises ProcessLookupError as soon as a process is gone."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        os.kill(pid, 0)
        time.sleep(0.02)

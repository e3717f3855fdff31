"""JPEGs that are small and take hours: progressive ones may say little of all pixels again and again.

A scan of an image costs the time for all of its pixels, and takes some hundred bytes in the file where it says that
nothing changes. No decoder can be quicker: a 38 kB file of a thousand scans took libjpeg-turbo a minute. Pillow sets no
limit.

Source: "Two Issues with the JPEG Standard", LJT-01-003 (libjpeg-turbo); its `djpeg -maxscans`.
"""

from __future__ import annotations

import re
from typing import BinaryIO

from PIL import Image

_MOST_SCANS = 500
"""Source: what libjpeg-turbo's own tools and NVIDIA DALI allow. Programs write ten, careful ones some sixty."""
_MOST_PIXELS = 1 << 32
"""Of all scans together: 24 of the largest image that is decoded at all."""
_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")
"""What ends the data of a scan: in them, 0xff stands before 0 and before the marks of a restart."""
_SCAN, _END = 0xDA, 0xD9
_WITHOUT_LENGTH = (0x01, 0xD8)
"""Markers that nothing follows. Source: ITU T.81, table B.1."""


def check_scans(image: Image.Image, file: BinaryIO) -> None:
    """Refuses a JPEG that would take far longer than its size says.

    Args:
        image: Its header alone was read.
        file: What it is read from; read from wherever that is left at.

    Raises:
        ValueError: It is one.
    """
    if "progressive" not in image.info or image.format not in ("JPEG", "MPO"):
        return
    scans = count_scans(_read_whole(file))
    if scans > _MOST_SCANS or scans * image.width * image.height > _MOST_PIXELS:
        raise ValueError(
            f"it would take too long: {scans} scans of {image.width}x{image.height} pixels; save it without them"
        )


def _read_whole(file: BinaryIO) -> bytes:
    place = file.tell()
    file.seek(0)
    content = file.read()
    file.seek(place)
    return content


def count_scans(jpeg: bytes) -> int:
    """Scans of the first image of a file; as far as the file goes, where that is damaged."""
    scans = place = 0
    while found := _MARKER.search(jpeg, place):
        place, marker = found.end(), found[1][0]
        if marker == _END:
            break
        scans += marker == _SCAN
        if marker not in _WITHOUT_LENGTH:
            place += int.from_bytes(jpeg[place : place + 2], "big")
    return scans

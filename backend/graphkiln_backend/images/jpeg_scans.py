"""Refuse progressive JPEGs whose many scans would take any decoder minutes to hours.

Such a file repeats all of its pixels in hundreds of scans, and Pillow sets no limit. Source: "Two Issues with the JPEG
Standard", LJT-01-003 (libjpeg-turbo).
"""

from __future__ import annotations

import re
from typing import BinaryIO

from PIL import Image

# Limit of libjpeg-turbo's own tools (`djpeg -maxscans`) and NVIDIA DALI. Programs write ten, careful ones some sixty.
_MOST_SCANS = 500
_MOST_PIXELS = 1 << 32  # of all scans together: 24 of the largest image that is decoded at all
# Ends the data of a scan: in them, 0xff is followed by 0 or a restart marker.
_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")
_SCAN, _END = 0xDA, 0xD9
_WITHOUT_LENGTH = (0x01, 0xD8)  # markers that no length follows. Source: ITU T.81, table B.1.


def check_scans(image: Image.Image, file: BinaryIO) -> None:
    """Refuse a JPEG that would take far longer than its size suggests.

    Args:
        image: Image of which the header was read.
        file: Its file; the position is kept.

    Raises:
        ValueError: It has too many scans.
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
    """Count the scans of the first image of a file; of a damaged one, those before its end."""
    scans = place = 0
    while found := _MARKER.search(jpeg, place):
        place, marker = found.end(), found[1][0]
        if marker == _END:
            break
        scans += marker == _SCAN
        if marker not in _WITHOUT_LENGTH:
            place += int.from_bytes(jpeg[place : place + 2], "big")
    return scans

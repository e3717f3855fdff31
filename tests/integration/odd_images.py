"""Unusual images and damaged image files, as bytes."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageCms

ORIENTATION = 0x0112
SIZE = (60, 40)
_FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")


def drawn(width: int = SIZE[0], height: int = SIZE[1]) -> Image.Image:
    """Draw a light, slightly colored box off the center."""
    pixels = np.full((height, width, 3), 20, np.uint8)
    pixels[height // 8 : -(-height // 2), width // 4 : -(-width // 2)] = (250, 240, 200)
    return Image.fromarray(pixels)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def deep(image: Image.Image) -> Image.Image:
    """Make a gray image of 16 bits."""
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


def png_of_48_bits(image: Image.Image) -> bytes:
    """Encode RGB of 16 bits per channel, which Pillow reads but does not write."""
    rows = np.asarray(image).astype(">u2") * np.uint16(257)
    raw = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", image.width, image.height, 16, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def without_marker(jpeg: bytes, name: bytes) -> bytes:
    """Remove the JFIF segment of a JPEG."""
    start = jpeg.index(name) - 4
    return jpeg[:start] + jpeg[start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big") :]


def odd_files() -> dict[str, bytes]:
    """Readable images by name."""
    image, other = drawn(), Image.new("RGB", SIZE, "white")
    transparent = image.convert("RGBA")
    transparent.putalpha(Image.linear_gradient("L").resize(SIZE))
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE)
    several = {"save_all": True, "append_images": [other]}
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return {
        "a light pixel": saved(Image.new("RGB", (1, 1), "white"), "PNG"),
        "a dark pixel": saved(Image.new("L", (1, 1), 0), "BMP"),
        "a line": saved(drawn(700, 1), "PNG"),
        "a column": saved(drawn(1, 700), "JPEG"),
        "8,000 pixels": saved(drawn(8000, 4500).convert("L"), "JPEG"),
        "8,000 pixels high": saved(drawn(30, 8000), "PNG"),
        "CMYK JPEG": saved(image.convert("CMYK"), "JPEG"),
        "CMYK TIFF": saved(image.convert("CMYK"), "TIFF"),
        "YCbCr TIFF": saved(image.convert("YCbCr"), "TIFF"),
        "16 bits PNG": saved(deep(image), "PNG"),
        "16 bits TIFF": saved(deep(image), "TIFF"),
        "one bit": saved(image.convert("1"), "PNG"),
        "alpha PNG": saved(transparent, "PNG"),
        "gray and alpha": saved(transparent.convert("LA"), "PNG"),
        "alpha WebP": saved(transparent, "WEBP", lossless=True),
        "palette": saved(palette, "PNG"),
        "transparent palette": saved(palette, "PNG", transparency=0),
        "GIF": saved(palette, "GIF"),
        "animated GIF": saved(image, "GIF", **several),
        "animated WebP": saved(image, "WEBP", lossless=True, **several),
        "animated PNG": saved(image, "PNG", **several),
        "pages": saved(image, "TIFF", **several),
        "progressive": saved(image, "JPEG", progressive=True),
        "gray JPEG": saved(image.convert("L"), "JPEG"),
        "48 bits PNG": png_of_48_bits(image),
        "two pictures": saved(image, "MPO", **several),
        "two pictures, turned": saved(image, "MPO", exif=turned(8), **several),
        "4:4:4": saved(image, "JPEG", subsampling=0),
        "inks that no program signed": without_marker(saved(image.convert("CMYK"), "JPEG"), b"Adobe"),
        "a line of ten thousand": saved(drawn(10_000, 1), "JPEG"),
        "a column of ten thousand": saved(drawn(1, 10_000), "PNG"),
        "pages of several kinds": saved(image, "TIFF", save_all=True, append_images=[Image.new("CMYK", (5, 9))]),
        **{f"{kind} and more behind it": saved(image, kind) + b"\xff\xd8\xff\xe0 more" for kind in _FORMATS},
        **{f"ICC profile {kind}": saved(image, kind, icc_profile=profile) for kind in ("JPEG", "PNG", "WEBP", "TIFF")},
        **{f"EXIF {number} JPEG": saved(image, "JPEG", exif=turned(number)) for number in range(1, 10)},
        **{f"EXIF {number} {kind}": saved(image, kind, exif=turned(number)) for kind in ("PNG", "WEBP", "TIFF")
           for number in (3, 6)},
    }  # fmt: skip


def damaged_files() -> dict[str, bytes]:
    """Files by name that are no image, or cannot be read."""
    image = drawn(200, 200)
    gray = np.asarray(image.convert("L"))
    files = {kind: saved(image, kind) for kind in _FORMATS}
    cut = {f"half a {kind}": content[: len(content) // 2] for kind, content in files.items()}
    progressive = saved(image, "JPEG", progressive=True)
    bomb = bytearray(files["PNG"])
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2  # the header's width and height
    return {
        **cut,
        "half a progressive JPEG": progressive[: len(progressive) // 2],
        "nothing": b"",
        "text": b"hello",
        "a header": files["PNG"][:20],
        "another format": saved(image, "PPM"),
        "AVIF": saved(image, "AVIF"),
        "a drawing": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        "base64": base64.b64encode(files["JPEG"]),
        "a data URL": b"data:image/jpeg;base64," + base64.b64encode(files["JPEG"]),
        "a bomb": bytes(bomb),
        "32 bits TIFF": saved(Image.fromarray(gray.astype(np.int32)), "TIFF"),
        "floats TIFF": saved(Image.fromarray(gray.astype(np.float32)), "TIFF"),
    }

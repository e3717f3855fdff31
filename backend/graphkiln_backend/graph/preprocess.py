"""Preprocessing of images: the spec, geometry and normalization in numpy.

Written by converters, published by the server in `config.pbtxt`, executed by the client. Decoding and resizing
need Pillow and live in `graphkiln_backend.images`; geometry and normalization are here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from graphkiln_backend.graph.decoding import OMIT_DEFAULT, decode_json, encode_json
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from graphkiln_backend.graph.signature import Dim
else:
    np = LazyModule("numpy")

# Key of the spec in config.pbtxt's `parameters`; its value is JSON.
PREPROCESS = "preprocess"

Interpolation = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Letterbox:
    """Resize an image into a fixed size, keep its aspect ratio, and pad the rest.

    Attributes:
        size: `(height, width)` in pixels.
        padding: A gray value from 0 to 255, or None for zeros in the normalized sample, as
            torchvision's and transformers' detectors pad.
        position: Position of the image. An odd number of padding pixels is split with the smaller part first.
        rounding: How the resized size is rounded: to the `nearest` pixel, or `down`.
        enlarge: Whether smaller images are enlarged.

    Source: Ultralytics `LetterBox` (the defaults); `torchvision.models.detection.transform` (`top-left`, `down`, None).
    """

    size: tuple[int, int]
    padding: int | None = 114
    position: Literal["center", "top-left"] = "center"
    rounding: Literal["nearest", "down"] = "nearest"
    enlarge: bool = True

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ManifestError("preprocess.letterbox.size must be at least 1 pixel")
        if self.padding is not None and not 0 <= self.padding <= 255:
            raise ManifestError(f"preprocess.letterbox.padding must be from 0 to 255, got {self.padding}")

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Size `(height, width)` in pixels that an image of that size is resized to."""
        scale = min(self.size[0] / height, self.size[1] / width)
        if scale > 1 and not self.enlarge:
            return height, width
        sizes = [(height, self.size[0]), (width, self.size[1])]
        tight = [limit / size == scale for size, limit in sizes]
        rounded = [round(size * scale) if self.rounding == "nearest" else int(size * scale) for size, _ in sizes]
        fitted = [
            limit if is_tight else min(max(size, 1), limit)
            for size, (_, limit), is_tight in zip(rounded, sizes, tight, strict=True)
        ]
        return fitted[0], fitted[1]

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Box `(left, top, right, bottom)` of the letterbox in pixels of the resized image; left and top are <= 0."""
        top, left = ((limit - size) // 2 for size, limit in zip((height, width), self.size, strict=True))
        if self.position == "top-left":
            top = left = 0
        return -left, -top, self.size[1] - left, self.size[0] - top


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocess:
    """From a decoded image to one sample of an input tensor.

    The steps, in order: convert to `color`; resize; center-crop, or letterbox in place of both; for float dtypes scale
    to 0..1, subtract `mean` and divide by `std`, per channel; arrange as `layout`.

    Attributes:
        resize: Length of the shorter side in pixels (aspect ratio kept), or exact `(height, width)`, or None.
        crop: `(height, width)` of the center crop, or None. A smaller image is padded with black.
        interpolation: Filter of the resize; all but nearest are antialiased.
        crop_rounding: Where an odd number of pixels is cut off or added: `half-even` as torchvision and timm do, `down`
            as transformers does. They differ by one pixel for every fourth size.
        mean: Mean per channel, in units of 0..1; empty for none.
        std: Standard deviation per channel, in units of 0..1; empty for none.
        color: Channels and their order.
        layout: Order of the dimensions of one sample (without the batch).
        dtype: Element type of the tensor. UINT8 takes raw pixels: no scaling, no mean, no std.
        letterbox: Resizes and pads in place of `resize` and `crop`; or None.

    Source: `torchvision.transforms` Resize, CenterCrop, ToTensor and Normalize on PIL images.
    """

    resize: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    interpolation: Interpolation = "bilinear"
    crop_rounding: Literal["half-even", "down"] = "half-even"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    color: Literal["RGB", "BGR", "L"] = "RGB"
    layout: Literal["CHW", "HWC"] = "CHW"
    dtype: DType = DType.FP32
    letterbox: Letterbox | None = field(default=None, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        for key in ("mean", "std"):
            values = getattr(self, key)
            if values and len(values) != self.channels:
                raise ManifestError(f"preprocess.{key} must have {self.channels} values, got {len(values)}")
        if any(value == 0 for value in self.std):
            raise ManifestError("preprocess.std must not hold a zero")
        if self.dtype not in (DType.UINT8, DType.FP16, DType.FP32):
            raise ManifestError(f"preprocess.dtype must be UINT8, FP16 or FP32, got {self.dtype}")
        if self.dtype is DType.UINT8 and (self.mean or self.std):
            raise ManifestError("preprocess.mean and preprocess.std must be empty for dtype UINT8")
        sides = (self.resize,) if isinstance(self.resize, int) else self.resize or ()
        if any(side < 1 for side in (*sides, *(self.crop or ()))):
            raise ManifestError("preprocess.resize and preprocess.crop must be at least 1 pixel")
        if self.letterbox and (self.resize is not None or self.crop is not None):
            raise ManifestError("preprocess.letterbox resizes and pads itself: leave out resize and crop")

    @classmethod
    def from_json(cls, text: str) -> Preprocess:
        """Parse a published spec.

        Raises:
            ManifestError: Not JSON, or not a spec; the message names the bad key.
        """
        return decode_json(cls, text, what="the preprocess spec", path=PREPROCESS)

    def to_json(self) -> str:
        """Serialize the spec as one line of JSON."""
        return encode_json(self)

    @property
    def channels(self) -> int:
        """Number of color channels."""
        return 1 if self.color == "L" else 3

    @property
    def size(self) -> tuple[int, int] | None:
        """`(height, width)` of each sample in pixels, or None if it depends on the image."""
        resized = self.resize if isinstance(self.resize, tuple) else None
        return self.letterbox.size if self.letterbox else self.crop or resized

    def misfit(self, shape: Sequence[Dim]) -> str:
        """Describe samples if they do not fit an input, else return an empty string.

        Args:
            shape: Shape of the input, with or without a batch dimension.
        """
        height, width = self.size or (0, 0)  # 0 for a size that depends on the image
        sample = (height, width, self.channels) if self.layout == "HWC" else (self.channels, height, width)
        pairs = list(zip(sample, shape[-3:], strict=False))
        shorter = self.resize if isinstance(self.resize, int) and self.size is None else 0
        sides = [wanted for own, wanted in pairs if not own and isinstance(wanted, int)]
        if (
            len(shape) in (3, 4)
            and all(own == wanted for own, wanted in pairs if own and isinstance(wanted, int))
            and not (shorter and len(sides) == 2 and min(sides) != shorter)
        ):
            return ""
        words = ", ".join(str(own or "any") for own in sample)
        return f"{self.layout} [{words}]" + (f" with a shorter side of {shorter}" if shorter else "")

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Size `(height, width)` in pixels after the resize of an image of that size.

        Source: `torchvision.transforms.functional._compute_resized_output_size` (the longer side is truncated).
        """
        if self.letterbox:
            return self.letterbox.resized(height, width)
        if self.resize is None:
            return height, width
        if isinstance(self.resize, tuple):
            return self.resize
        if height <= width:
            return self.resize, int(self.resize * width / height)
        return int(self.resize * height / width), self.resize

    def cropped(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Box `(left, top, right, bottom)` of the sample in pixels of the resized image; outside of it is padding.

        The center crop or the letterbox.

        Source: `torchvision.transforms.functional.center_crop` (rounds half to even; pads before it crops);
        `transformers.image_transforms.center_crop` (rounds down in both cases).
        """
        if self.letterbox:
            return self.letterbox.box(height, width)
        if self.crop is None:
            return 0, 0, width, height
        crop_height, crop_width = self.crop
        top, left = self._crop_offset(height, crop_height), self._crop_offset(width, crop_width)
        return left, top, left + crop_width, top + crop_height

    def _crop_offset(self, size: int, crop: int) -> int:
        if self.crop_rounding == "down":
            return (size - crop) // 2
        return round((size - crop) / 2.0) if size >= crop else -((crop - size) // 2)

    def normalize(self, image_hwc: npt.NDArray[np.uint8]) -> AnyArray:
        """Turn pixels into one sample.

        Args:
            image_hwc: uint8 `[height, width, channels]` in this spec's color order.

        Returns:
            `[channels, height, width]` or `[height, width, channels]`, contiguous, of this spec's dtype.
        """
        arranged = image_hwc if self.layout == "HWC" else image_hwc.transpose(2, 0, 1)
        if self.dtype is DType.UINT8:
            return np.ascontiguousarray(arranged)
        sample = np.ascontiguousarray(arranged).astype(np.float32)
        rows = sample if self.layout == "CHW" else sample.reshape(len(sample), -1)
        rows /= np.float32(255)
        if self.mean:
            rows -= self._beside_rows(self.mean, image_hwc.shape[1])
        if self.std:
            rows /= self._beside_rows(self.std, image_hwc.shape[1])
        return sample.astype(self.dtype.numpy, copy=False)

    def picture(self, sample: AnyArray) -> npt.NDArray[np.uint8]:
        """Turn a sample back into pixels for people; the inverse of `normalize`, rounded to 8 bits.

        Returns:
            `[height, width, 3]` in RGB, or `[height, width]` for a gray image.

        Raises:
            ManifestError: The shape is not that of a sample.
        """
        arranged = sample.transpose(1, 2, 0) if self.layout == "CHW" and sample.ndim == 3 else sample
        if arranged.ndim != 3 or arranged.shape[2] != self.channels:
            raise ManifestError(f"{list(sample.shape)} is no {self.color} image in {self.layout}")
        if self.dtype is not DType.UINT8:
            scaled = arranged.astype(np.float64) * (self.std or 1.0) + (self.mean or 0.0)
            arranged = np.nan_to_num(scaled * 255).round().clip(0, 255)
        pixels = arranged.astype(np.uint8)
        if self.color == "L":
            return pixels[..., 0]
        return pixels[..., ::-1] if self.color == "BGR" else pixels

    def _beside_rows(self, values: tuple[float, ...], width: int) -> npt.NDArray[np.float32]:
        """Arrange channel values for broadcasting; for `HWC` repeated for a whole row: strides of 3 are slow."""
        factors = np.asarray(values, np.float32)
        return factors.reshape(-1, 1, 1) if self.layout == "CHW" else np.tile(factors, width)

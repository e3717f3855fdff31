"""Shared by every peer: options, image to tensor, scores to labels, the session."""

import argparse
import io
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from PIL import Image

HOST = "127.0.0.1"
MAX_BATCH = 8
BATCH_WAIT_SECONDS = 0.002
THREADS = 2
# Environment variable, set where ONNX Runtime would saturate sums of int8 on this CPU: request exact ones.
EXACT_PRODUCTS = "EXACT_PRODUCTS"

SHORTER_SIDE = 232
CROP = 224
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)

Label = tuple[str, float]
Array = npt.NDArray[np.float32]


def options() -> argparse.Namespace:
    """Read the options of every peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="path of the ONNX file")
    parser.add_argument("--port", type=int, required=True, help="HTTP port to listen on")
    return parser.parse_args()


def tensor(image: Image.Image) -> Array:
    """Turn an image into a normalized float32 [3, 224, 224] array."""
    image = image.convert("RGB")
    scale = SHORTER_SIDE / min(image.size)
    width, height = (max(CROP, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - CROP) // 2, (height - CROP) // 2
    image = image.crop((left, top, left + CROP, top + CROP))
    pixels = (np.asarray(image, dtype=np.float32) / 255 - MEAN) / STD
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def preprocess(jpeg: bytes) -> Array:
    """Decode a JPEG into a normalized float32 [3, 224, 224] array."""
    return tensor(Image.open(io.BytesIO(jpeg)))


def session(path: str) -> ort.InferenceSession:
    """Load an ONNX model for the CPU with a fixed number of threads and exact products in int8."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = THREADS
    if EXACT_PRODUCTS in os.environ:
        settings.add_session_config_entry("session.x64quantprecision", "1")
    return ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def score(model: ort.InferenceSession, images: Iterable[Array]) -> Array:
    """Score preprocessed images in one run of the model: [n, 1000]."""
    (scores,) = model.run(None, {model.get_inputs()[0].name: np.stack(list(images))})
    return np.asarray(scores)


def top5(scores: Array) -> list[Label]:
    """Return the five best classes of one [1000] score vector, best first."""
    best = np.argsort(-scores, kind="stable")[:5]  # equal scores, which int8 has, in the same order everywhere
    return [(f"class {index}", float(scores[index])) for index in best]

"""Classification of images, compared with labels and scores that are computed in this process."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.system.closing import Closeable
from graphkiln_client import Client
from graphkiln_client.results import Result
from soaking.ledger import DEADLINE_S, WrongAnswer
from soaking.models import DIGIT_IMAGES, TOLERANCE, digit_labels, digits_reference
from soaking.reaching import Reach
from soaking.senders import protocol

IMAGES = tuple(sorted(DIGIT_IMAGES.glob("*.png")))


class Classifying(Closeable):
    """Sends images, alone and many at once.

    Args:
        url: Of the server.
        reach: How it is reached.
    """

    def __init__(self, url: str, reach: Reach) -> None:
        self.name = f"classify {protocol(url)}"
        self._client = Client(url, timeout_s=DEADLINE_S, max_retries=0, **reach.security)

    def ask(self, chance: random.Random) -> None:
        """Classifies one image, or all.

        Raises:
            WrongAnswer: A label or score is not the reference's.
            ClientError: The request failed.
        """
        digits = self._client.model("digits")  # metadata, labels and preprocessing are asked for anew
        top_k = chance.randint(1, 10)
        if chance.random() < 0.7:
            image = chance.choice(IMAGES)
            check(image, digits.classify(image, top_k=top_k), top_k)
            return
        for image, result in zip(IMAGES, digits.classify_many(IMAGES, top_k=top_k), strict=True):
            if isinstance(result, ClientError):
                raise result
            check(image, result, top_k)

    def close(self) -> None:
        self._client.close()


def check(image: Path, result: Result, top_k: int) -> None:
    """Compares a ranking with the reference.

    Raises:
        WrongAnswer: It is another one.
    """
    scores = expected_scores(image)
    best = np.argsort(-scores, kind="stable")[:top_k]
    labels = digit_labels(int(result.version))
    got = [(entry.index, entry.label) for entry in result.classifications]
    if got != [(int(index), labels[index]) for index in best]:
        raise WrongAnswer(f"{image.name} is {got[:3]} instead of {[labels[index] for index in best[:3]]}")
    if not np.allclose([entry.score for entry in result.classifications], scores[best], TOLERANCE, TOLERANCE):
        raise WrongAnswer(f"{image.name} has other scores: {result.classifications[:2]}")


@cache
def expected_scores(image: Path) -> AnyArray:
    """The digits model's scores of an image `[10]`: shrunk to 32 x 32 by Pillow, and scaled to -1..1."""
    with Image.open(image) as opened:
        pixels = np.asarray(opened.convert("L").resize((32, 32), Image.Resampling.BILINEAR), np.float32)
    sample = ((pixels / 255 - 0.5) / 0.5)[np.newaxis, np.newaxis]
    scores: AnyArray = digits_reference(1, {"INPUT_0": sample})["OUTPUT_0"][0]
    return scores

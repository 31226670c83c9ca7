"""The data and the model: scikit-learn's digits (1,797 images of 8 x 8 pixels) and a perceptron with one hidden layer, in numpy."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np

PIXELS, HIDDEN, CLASSES = 64, 32, 10
#: the last images are held out, to measure the accuracy
HELD_OUT = 297

Array = np.ndarray


def load_digits() -> tuple[Array, Array]:
    """Return images (n, 64) from 0 to 1 and labels (n,), from the file in scikit-learn, whose import would take a second per rank."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the digits come with scikit-learn: pip install 'gangline[examples]'")
    path = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    text = np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8)
    # Numbers of one or two digits, each followed by a comma or a newline.
    ends = np.flatnonzero(text < ord("0"))
    ones, tens = text[ends - 1] - ord("0"), text[ends - 2]
    values = ones + 10 * np.where(tens >= ord("0"), tens - ord("0"), 0)
    values[0] = ones[0]
    table = values.reshape(-1, PIXELS + 1)
    return table[:, :PIXELS] / 16.0, table[:, PIXELS].astype(np.int64)


class Perceptron:
    """Parameters and momentum, each as one flat vector, so that gradients are exchanged and checkpoints written in one piece."""

    def __init__(self, seed: int) -> None:
        shapes = [(PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
        random = np.random.default_rng(seed)
        self.parameters = np.concatenate(
            [random.normal(0, (2 / shape[0]) ** 0.5, shape).ravel() if len(shape) == 2 else np.zeros(shape) for shape in shapes]
        )
        self.momentum = np.zeros_like(self.parameters)
        self._cuts = np.cumsum([np.prod(shape) for shape in shapes])[:-1]

    def gradient(self, images: Array, labels: Array) -> tuple[Array, float]:
        """Return the gradient and the loss, both summed over these images."""
        weights_1, bias_1, weights_2, bias_2 = self._split(self.parameters)
        hidden = np.maximum(images @ weights_1 + bias_1, 0)
        log_p = hidden @ weights_2 + bias_2
        log_p -= log_p.max(axis=1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
        rows = np.arange(len(labels))
        error = np.exp(log_p)
        error[rows, labels] -= 1
        back = (error @ weights_2.T) * (hidden > 0)
        parts = [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        return np.concatenate([part.ravel() for part in parts]), float(-log_p[rows, labels].sum())

    def update(self, gradient: Array, *, rate: float) -> None:
        """Take one step against the (mean) gradient."""
        self.momentum = 0.9 * self.momentum + gradient
        self.parameters = self.parameters - rate * self.momentum

    def accuracy(self, images: Array, labels: Array) -> float:
        """Return the share of the images that are recognised."""
        weights_1, bias_1, weights_2, bias_2 = self._split(self.parameters)
        scores = np.maximum(images @ weights_1 + bias_1, 0) @ weights_2 + bias_2
        return float((scores.argmax(axis=1) == labels).mean())

    def _split(self, flat: Array) -> list[Array]:
        weights_1, bias_1, weights_2, bias_2 = np.split(flat, self._cuts)
        return [weights_1.reshape(PIXELS, HIDDEN), bias_1, weights_2.reshape(HIDDEN, CLASSES), bias_2]


def batch_rows(step: int, size: int, images: int, seed: int) -> Array:
    """Return the rows of the step's batch. They depend on nothing but the step, so a resumed run sees what it would have seen anyway."""
    per_epoch = images // size
    epoch, index = divmod(step, per_epoch)
    order = _order(epoch, images, seed)
    return order[index * size : (index + 1) * size]


_orders: dict[tuple[int, int, int], Array] = {}


def _order(epoch: int, images: int, seed: int) -> Array:
    key = (epoch, images, seed)
    if key not in _orders:
        _orders.clear()
        _orders[key] = np.random.default_rng([seed, epoch]).permutation(images)
    return _orders[key]

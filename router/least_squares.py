"""Coefficients learnt from the last few observations: windowed least squares of logarithms, robust to outliers.

    prefill = LeastSquares(3)
    prefill.add((1.0, tokens, tokens * context), seconds)
    prefill.predict((1.0, 64, 64 * 32))

The first feature is 1, the second the size; others are products of two sizes. Errors count by their ratio, so that
short requests are as well predicted as long ones, and half as long is as wrong as twice. Coefficients are never
negative: more work never takes less time. After a first fit, observations far off it are left out of a second.

What is seen is mostly much of the same, such as the short prompt of a health check each second. So a few observations
of each size are kept beyond the window; what they cannot tell apart is taken for the constant part; and what is larger
than all that was seen takes at most in proportion longer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 64
LEAST_SAMPLES = 3  # before that nothing is known
_KEPT = 4  # of each power of two of the size
_OUTLIER = 4.0  # times the median deviation
_LEAST_DEVIATION = 0.05  # deviations below this are no outliers, however well the rest fits
_REFIT_EVERY = 8  # observations, once the window holds a few; twice as many once it is full
_STEPS = 2  # from relative errors to logarithms
_FURTHEST = 1.0  # logarithm of a ratio: those further off pull no harder
_LEAST_RATIO = 1e-9
_RIDGE = 1e-6  # weight of "none" against the observations, for all but the constant

_Array = npt.NDArray[np.float64]
_Sample = tuple[Sequence[float], float]


class LeastSquares:
    """y = sum of coefficient * feature. Owned by one event loop; fitted when asked for."""

    def __init__(self, num_features: int) -> None:
        self._samples: deque[_Sample] = deque()
        self._kept: dict[int, deque[_Sample]] = {}  # that have left the window, by the power of two of their size
        self._coefficients: list[float] = [0.0] * num_features
        self._largest: list[float] = [0.0] * num_features  # that was seen of each feature
        self._since_fit = 0

    def __len__(self) -> int:
        """Observations in the window."""
        return len(self._samples)

    @property
    def known(self) -> bool:
        return len(self._samples) >= LEAST_SAMPLES

    def add(self, features: Sequence[float], value: float) -> None:
        """One observation; values that are not over 0 tell nothing and are ignored."""
        if value > 0:
            self._samples.append((features, value))
            self._since_fit += 1
            if len(self._samples) > WINDOW:
                old = self._samples.popleft()
                self._kept.setdefault(_power(old), deque(maxlen=_KEPT)).append(old)

    def predict(self, features: Sequence[float]) -> float:
        """Never negative; 0 before anything is known."""
        value = seen = 0.0
        times = 1.0
        for i, coefficient in enumerate(self.coefficients):  # a dozen predictions a request: no generators
            feature, largest = features[i], self._largest[i]
            value += coefficient * feature
            if feature <= largest:
                seen += coefficient * feature
                continue
            seen += coefficient * largest
            if largest > 0:
                times = max(times, feature / largest if i < 2 else math.sqrt(feature / largest))
        return value if times == 1.0 else min(value, seen * times)

    @property
    def coefficients(self) -> list[float]:
        if self._since_fit >= self._refit_after and self.known:
            self._coefficients = self._fit()
            self._since_fit = 0
        return self._coefficients

    @property
    def _refit_after(self) -> int:
        """Observations after which the next fit is due."""
        if len(self._samples) < 2 * _REFIT_EVERY:
            return 1
        return _REFIT_EVERY if len(self._samples) < WINDOW else 2 * _REFIT_EVERY

    def _fit(self) -> list[float]:
        samples = [*self._samples, *self._not_seen_lately()]
        features = np.array([each for each, _ in samples], dtype=np.float64)
        values = np.array([value for _, value in samples], dtype=np.float64)
        self._largest = [float(each) for each in features.max(axis=0)]
        found = _non_negative(features, 1 / values, np.ones(len(values)))
        # Relative errors favour the least values, so most may be too small by one factor.
        found *= math.exp(_median(_log_ratios(values, features @ found)))
        for _ in range(_STEPS):
            found = _nearer(features, values, found)
        off = np.abs(_log_ratios(values, features @ found))
        kept = off <= max(_LEAST_DEVIATION, _OUTLIER * _median(off))
        if LEAST_SAMPLES <= np.count_nonzero(kept) < len(samples):
            for _ in range(_STEPS):
                found = _nearer(features[kept], values[kept], found)
        return [float(each) for each in found]

    def _not_seen_lately(self) -> list[_Sample]:
        """For each size of which the window holds too few observations, the last ones that left it."""
        if not self._kept:
            return []
        seen: dict[int, int] = {}
        for sample in self._samples:
            power = _power(sample)
            seen[power] = seen.get(power, 0) + 1
        return [each for power, kept in self._kept.items() for each in list(kept)[seen.get(power, 0) :]]


def _power(sample: _Sample) -> int:
    return math.frexp(sample[0][1])[1]


def _median(values: _Array) -> float:
    middle = len(values) // 2
    return float(np.partition(values, middle)[middle])


def _log_ratios(values: _Array, guesses: _Array) -> _Array:
    return -np.log(np.maximum(guesses / values, _LEAST_RATIO))


def _nearer(features: _Array, values: _Array, found: _Array) -> _Array:
    """A step of Gauss and Newton from `found` towards the least squares of the logarithms."""
    guesses = np.maximum(features @ found, _LEAST_RATIO * values)
    pull = np.minimum(np.maximum(_log_ratios(values, guesses), -_FURTHEST), _FURTHEST)
    return _non_negative(features, 1 / guesses, 1 + pull)


def _non_negative(features: _Array, weights: _Array, target: _Array) -> _Array:
    """Least squares of weights * (features @ x) = target, x >= 0: what would get less is left out, the worst first."""
    rows = features * weights[:, None]
    products, towards = rows.T @ rows, target @ rows
    scale = np.sqrt(products.diagonal())
    used = [i for i, each in enumerate(scale.tolist()) if each > 0]
    result = np.zeros(len(scale))
    while used:
        within = scale[used]
        square = products[used][:, used] / (within[:, None] * within)
        square.flat[:: len(used) + 1] += [_RIDGE if i else 0.0 for i in used]
        found = np.linalg.solve(square, towards[used] / within)
        if len(used) == 1 or float(found.min()) >= 0:
            result[used] = np.maximum(found, 0) / within
            break
        used.pop(int(found.argmin()))
    return result

"""Coefficients learnt from the last few observations: windowed least squares on relative errors, robust to outliers.

    prefill = LeastSquares(3)
    prefill.add((1.0, tokens, tokens * context), seconds)
    prefill.predict((1.0, 64, 64 * 32))

Each observation counts by its relative error, so that short requests are as well predicted as long ones. Coefficients
are never negative: more work never takes less time. After a first fit, observations far off it are left out of a
second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 64
LEAST_SAMPLES = 3  # before that nothing is known
_OUTLIER = 4.0  # times the median deviation
_LEAST_DEVIATION = 0.05  # deviations below this are no outliers, however well the rest fits
_REFIT_EVERY = 4  # observations, once the window holds a few


class LeastSquares:
    """y = sum of coefficient * feature. Owned by one event loop; fitted when asked for."""

    def __init__(self, num_features: int) -> None:
        self._samples: deque[tuple[Sequence[float], float]] = deque(maxlen=WINDOW)
        self._coefficients: list[float] = [0.0] * num_features
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

    def predict(self, features: Sequence[float]) -> float:
        """Never negative; 0 before anything is known."""
        return sum(a * b for a, b in zip(self.coefficients, features, strict=True))

    @property
    def coefficients(self) -> list[float]:
        due = self._since_fit if len(self._samples) < 4 * _REFIT_EVERY else self._since_fit // _REFIT_EVERY
        if due and self.known:
            self._coefficients = self._fit()
            self._since_fit = 0
        return self._coefficients

    def _fit(self) -> list[float]:
        features = np.array([each for each, _ in self._samples], dtype=np.float64)
        values = np.array([value for _, value in self._samples], dtype=np.float64)
        rows = features / values[:, None]  # so that every target is 1 and errors are relative
        first = _non_negative(rows)
        off = np.abs(rows @ first - 1)
        kept = off <= max(_LEAST_DEVIATION, _OUTLIER * float(np.median(off)))
        fitted = first if bool(kept.all()) or kept.sum() < LEAST_SAMPLES else _non_negative(rows[kept])
        return [float(each) for each in fitted]


def _non_negative(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares of rows @ x = 1 with x >= 0: features that would get less are left out, the worst first."""
    scale = np.abs(rows).max(axis=0)
    used = [int(i) for i in np.flatnonzero(scale > 0)]
    result = np.zeros(rows.shape[1])
    target = np.ones(len(rows))
    while used:
        found = np.linalg.lstsq(rows[:, used] / scale[used], target, rcond=1e-6)[0]
        if float(found.min()) >= 0 or len(used) == 1:
            result[used] = np.maximum(found, 0) / scale[used]
            break
        used.pop(int(found.argmin()))
    return result

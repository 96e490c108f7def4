"""How large a batch may be so that a step keeps to a TPOT target: a line fitted to the steps seen lately."""

from __future__ import annotations

import math

MEMORY_STEPS = 64  # steps that the fit looks back, about
OUTLIER_RATIO = 4  # a step that waited for the machine counts as this many times the mean at most


class Pace:
    """step seconds = base + slope * sequences, by exponentially weighted least squares.

    Step time depends on context lengths too; the fit follows those as they drift.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._mean_size = self._mean_s = 0.0
        self._variance = self._covariance = 0.0
        self._slope_s = 0.0  # seconds a sequence; 0 until two batch sizes were seen

    def observe(self, num_sequences: int, step_s: float) -> None:
        self._num_steps += 1
        weight = 1 / min(self._num_steps, MEMORY_STEPS)
        if self._num_steps > 1:
            step_s = min(step_s, OUTLIER_RATIO * self._mean_s)
        size_off, time_off = num_sequences - self._mean_size, step_s - self._mean_s
        self._mean_size += weight * size_off
        self._mean_s += weight * time_off
        self._variance = (1 - weight) * (self._variance + weight * size_off * size_off)
        self._covariance = (1 - weight) * (self._covariance + weight * size_off * time_off)
        if self._variance > 0.05:  # below, all steps had about the same size and say nothing about others
            self._slope_s = max(0.0, self._covariance / self._variance)

    def predict(self, num_sequences: int) -> float:
        """Seconds that a step of this many sequences should take; 0 before the first step."""
        return self._mean_s + self._slope_s * (num_sequences - self._mean_size)

    def limit(self, target_s: float, most: int) -> int:
        """Sequences, 1 to `most`, that a step can hold and keep to target_s (0: no target)."""
        if target_s <= 0 or not self._num_steps:
            return most
        if self._slope_s > 0:
            size = self._mean_size + (target_s - self._mean_s) / self._slope_s
        elif self._mean_s <= target_s:
            size = math.inf  # larger batches are tried before they are judged
        else:
            size = self._mean_size * target_s / self._mean_s  # as if all of a step's time were its sequences'
        return most if size >= most else max(1, int(size))

"""Loss scaling of fp16-mixed for gradients of which every rank holds a part: all ranks skip the same steps.

As torch.amp.GradScaler: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

import json
import math
from pathlib import Path

# A step that overflows is skipped and halves the factor. Below this one the gradients themselves overflow.
MIN_SCALE = 1e-4
_GROWTH_INTERVAL = 2000  # steps without an overflow
_FILE = "loss_scale.json"


class LossScale:
    """The factor of the loss: halved after a step that overflows, doubled after many that do not. Powers of two round nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 65536.0 if enabled else 1.0
        self._good = 0  # steps since the last change

    def update(self, norm: float) -> bool:
        """Return whether a step with this gradient norm, equal on all ranks, is taken, and adjust the factor."""
        if not self.enabled:
            return True
        if not math.isfinite(norm):
            self.value, self._good = self.value / 2, 0
            return False
        self._good += 1
        if self._good == _GROWTH_INTERVAL:
            self.value, self._good = self.value * 2, 0
        return True

    @property
    def exhausted(self) -> bool:
        """Whether the factor is so small that the gradients themselves overflow."""
        return self.enabled and self.value < MIN_SCALE

    def save(self, folder: Path) -> None:
        if self.enabled:
            (folder / _FILE).write_text(json.dumps([self.value, self._good]), encoding="utf-8")

    def load(self, folder: Path) -> None:
        if self.enabled:
            value, good = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            self.value, self._good = float(value), int(good)

"""TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onroute.core.errors import UserError


class TensorBoard:
    """`Tracker` that writes to `folder`/tensorboard.

    resumed_from: the last step that a resumed run keeps; TensorBoard hides later points.
    Raises `UserError` when TensorBoard is not installed."""

    def __init__(self, folder: Path, *, resumed_from: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "observability-missing-package",
                f"TensorBoard cannot be imported: {error}",
                "tracking.trackers",
                'install it: pip install "onroute[tracking]", or set tracking.trackers = []',
            ) from error
        purge_step = None if resumed_from is None else resumed_from + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()

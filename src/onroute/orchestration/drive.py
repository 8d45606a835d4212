"""One drive through a run folder, wherever the parts live."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from onroute.core.config.load import dump_toml
from onroute.core.config.sections import RunConfig
from onroute.observability.metrics import open_metrics
from onroute.observability.progress import Progress
from onroute.orchestration.driver import Outcome, Parts, SynchronousDriver
from onroute.orchestration.folder import RunFolder
from onroute.orchestration.handles import Held
from onroute.orchestration.resume import find_resumption

KEEP_NONE = -1
"""A run to be resumed that has no checkpoint begins anew, where an attempt before it left metrics."""


async def drive(
    config: RunConfig,
    folder: RunFolder,
    parts_of_run: AbstractAsyncContextManager[Parts[Held]],
    *,
    progress: Progress,
) -> Outcome:
    """Open the parts, then the folder, and drive to the end; the parts are closed again in any case.

    The folder is made when all parts are there, so that a run that can't start leaves none.
    """
    async with parts_of_run as parts:
        folder.create()
        with folder.locked():
            resumption = find_resumption(folder, config)
            folder.write(folder.config, dump_toml(config))
            kept = resumption.step if resumption is not None else None
            if resumption is None and config.run.resume != "never":
                kept = KEEP_NONE
            with open_metrics(folder.path, config.tracking.trackers, resumed_from=kept) as metrics:
                driver = SynchronousDriver(config, parts, folder, metrics=metrics, progress=progress)
                return await driver.run()

"""The catalogues of all rooms, as the config validator wants them."""

from __future__ import annotations

from onroute.algorithms.catalog import ADVANTAGES, LOSSES
from onroute.core.config.catalog import Catalogs
from onroute.engines.catalog import ENGINES
from onroute.environments.catalog import ENVIRONMENTS
from onroute.observability.catalog import TRACKERS

CATALOGS = Catalogs(
    engines=ENGINES,
    environments=ENVIRONMENTS,
    advantages=ADVANTAGES,
    losses=LOSSES,
    trackers=TRACKERS,
)

"""Which way the ranks of a job are run: in containers when it names an image, else as processes."""

from __future__ import annotations

from gangline.core.model.spec import JobSpec
from gangline.nodeagent.adoption import RankStatus
from gangline.nodeagent.drivers.container import ContainerDriver
from gangline.nodeagent.drivers.driver import Driver, Site
from gangline.nodeagent.drivers.process import ProcessDriver


class Drivers:
    """The drivers of one node."""

    def __init__(self, site: Site) -> None:
        self._process = ProcessDriver(site)
        self._container = ContainerDriver(site)

    def of(self, spec: JobSpec) -> Driver:
        """Return the driver of a job."""
        return self._container if spec.image else self._process

    async def bury(self, status: RankStatus) -> None:
        """Kill and remove what is left of a rank whose supervisor is gone; how it was run is not known any more."""
        await self._process.bury(status)
        await self._container.bury(status)

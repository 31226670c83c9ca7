"""Which way the ranks of a job are run: in containers when it names an image, else as processes."""

from __future__ import annotations

from gangline.core.model.spec import JobSpec
from gangline.nodeagent.adoption import RankStatus
from gangline.nodeagent.drivers.driver import Driver, Site
from gangline.nodeagent.drivers.process import ProcessDriver
from gangline.nodeagent.isolation import Refused


class Drivers:
    """The drivers of one node."""

    def __init__(self, site: Site) -> None:
        self._process = ProcessDriver(site)

    def of(self, spec: JobSpec) -> Driver:
        """Return the driver of a job. Raises Refused."""
        if spec.image:
            raise Refused("this node runs no containers")
        return self._process

    async def bury(self, status: RankStatus) -> None:
        """Kill and remove what is left of a rank whose supervisor is gone; how it was run is not known any more."""
        await self._process.bury(status)

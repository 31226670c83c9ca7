"""Real GPUs, as a backend of `gpus.GpuWatch`: questions to the driver with their deadlines."""

from __future__ import annotations

from collections.abc import Callable

from gangline.core.telemetry import Log
from gangline.nodeagent.gpudata import Facts, Happened, Instance, Partition, ReadFacts, ReadSamples, Samples
from gangline.nodeagent.gpudriver import DriverState, GpuDriver

#: seconds that each kind of question may take: the first one initialises the driver, and making an instance takes seconds on large GPUs
FACTS_S = 30.0
SAMPLES_S = 10.0
PARTITION_S = 60.0
#: waits for events of half a second each come back at least so often, unless the driver hangs
EVENTS_S = 30.0


class NvmlGpus:
    """A backend of `gpus.GpuWatch`."""

    def __init__(
        self, happened: Callable[[Happened], None], log: Log, *, interval_s: float = 5.0, facts_s: float = FACTS_S, samples_s: float = SAMPLES_S,
        backoff_s: float = 1.0,
    ) -> None:  # fmt: skip
        """`happened` is called with each event; `interval_s` is how often samples are read at most."""
        self._driver = GpuDriver(happened, log, backoff_s=backoff_s)
        self.interval_s = interval_s
        self._facts_s, self._samples_s = facts_s, samples_s

    @property
    def state(self) -> DriverState:
        """How the driver is."""
        return self._driver.state

    @property
    def message(self) -> str:
        """Why, when it does not answer."""
        return self._driver.message

    @property
    def since_ms(self) -> int:
        """Since when, by the wall clock."""
        return self._driver.since_ms

    @property
    def restarts(self) -> int:
        """How often the process that asks was started again."""
        return self._driver.restarts

    @property
    def pause_s(self) -> float:
        """Seconds until it is worth asking again."""
        return self._driver.pause_s

    async def facts(self) -> Facts:
        """Read what GPUs there are. Raises DriverError."""
        answer = await self._driver.ask(ReadFacts(), self._facts_s)
        assert answer.facts is not None
        return answer.facts

    async def samples(self) -> Samples:
        """Read all figures. Raises DriverError."""
        answer = await self._driver.ask(ReadSamples(), self._samples_s)
        assert answer.samples is not None
        if answer.samples.events_age_s > EVENTS_S:
            age_s = answer.samples.events_age_s
            self._driver.give_up("silent", f"the driver of the GPUs has not come back from a wait for events for {age_s:.0f} s")
        return answer.samples

    async def partition(self, ask: Partition) -> tuple[Instance, ...]:
        """Make, unmake and look at MIG instances. Raises DriverError with the reason when that cannot be done."""
        answer = await self._driver.ask(ask, PARTITION_S)
        assert answer.instances is not None
        return answer.instances.there

    def renew(self) -> None:
        """Look at the GPUs afresh: NVML names those that it saw when it was initialised."""
        self._driver.renew()

    def close(self) -> None:
        """End the process that asks."""
        self._driver.close()

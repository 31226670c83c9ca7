"""A whole cluster in one event loop on simulated time, of one seed: `gangline chaos sim`. docs/chaos.md says how to read it."""

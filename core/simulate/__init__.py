"""Simulation: traces replayed in virtual time through the code that decides in production (docs/simulate.md)."""

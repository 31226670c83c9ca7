"""How ranks are run: as processes of the node (process.py) or in containers (container.py), behind one interface (driver.py)."""

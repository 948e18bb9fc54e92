"""Live monitoring of runs and sweeps: curves that grow, and a page that refreshes itself."""

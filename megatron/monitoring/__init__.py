"""Runs and sweeps while they train: curves read as they grow, and a page of a run or sweep that shows itself anew."""

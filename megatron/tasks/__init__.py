"""Tasks that models are trained on from scratch, at lengths up to one and scored beyond it."""

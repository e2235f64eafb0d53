"""Seconds that engines and ranks take, from a model's sizes and a GPU's rates. Pure: no torch."""
